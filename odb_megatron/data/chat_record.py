"""What a record of a chat or text file means: its layout is recognised by its columns.

Pure: no files, no tokenizer. Must not drop a turn, guess a role, or render text for a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from odb_megatron.data.records import strict_json

__all__ = [
    "ChatRecord",
    "Conversation",
    "Layout",
    "Message",
    "PlainText",
    "ToolCall",
    "layout_of",
    "parse_record",
]

_PROMPTS = ("prompt", "question", "query", "input", "problem")
_RESPONSES = ("response", "completion", "answer", "output", "canonical_solution", "solution")
_SYSTEMS = ("system", "system_prompt")
_ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "tool_response"), "tool"),
    "system": "system",
    "developer": "developer",
}


class Layout(Enum):
    """The known layouts, in order of precedence: the first whose columns hold something is taken.

    `MESSAGES`: `messages` (OpenAI). `CONVERSATIONS`: `conversations` (ShareGPT). `INSTANCES`:
    `instruction` and `instances`, of which the first is taken (Self-Instruct seed tasks).
    `INSTRUCTION`: `instruction` and a response column, with `input` or `context` (Alpaca, Dolly).
    `PAIR`: the first prompt column and the first response column, in the order the error text of
    `layout_of` names them. `TEXT`: `text`. `PROMPT`: `prompt` alone as plain text, only when no
    other column holds text, messages or objects (which might be the answer).
    """

    MESSAGES = "messages"
    CONVERSATIONS = "conversations"
    INSTANCES = "instances"
    INSTRUCTION = "instruction"
    PAIR = "pair"
    TEXT = "text"
    PROMPT = "prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call the assistant makes; `arguments` is an object, or text that is no JSON object."""

    name: str
    arguments: Mapping[str, object] | str
    call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn.

    Attributes:
        role: system, developer, user, assistant or tool.
        content: its text, "" for an assistant that only calls tools.
        tool_calls: the assistant's calls.
        name: the speaker's or the tool's name.
        tool_call_id: which call a tool's message answers.
        reasoning: the assistant's `reasoning_content`.
        learn: whether an assistant's turn carries loss: not with `weight` 0, nor in a list prompt.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    learn: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Turns in order, at least one of them the assistant's to learn, and the tools on offer."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, object], ...] = ()

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError("the conversation is empty; expected at least one assistant message")
        if not any(m.role == "assistant" and m.learn and _says_something(m) for m in self.messages):
            roles = ", ".join(m.role for m in self.messages[:8])
            raise ValueError(
                f"no assistant message with content to learn from; roles seen: {roles}. Add the "
                "answer, or leave the record out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainText:
    """A document: every token carries loss."""

    text: str

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError(
                "the text is empty; expected at least one character that is not a space"
            )


ChatRecord = Conversation | PlainText


def layout_of(record: Mapping[str, object]) -> Layout:
    """The layout of a record.

    Raises:
        ValueError: its columns fit no layout.
    """
    has = {name for name, value in record.items() if value is not None}
    if "messages" in has:
        return Layout.MESSAGES
    if "conversations" in has:
        return Layout.CONVERSATIONS
    if {"instruction", "instances"} <= has:
        return Layout.INSTANCES
    if "instruction" in has and has & set(_RESPONSES):
        return Layout.INSTRUCTION
    if has & set(_PROMPTS) and has & set(_RESPONSES):
        return Layout.PAIR
    if "text" in has:
        return Layout.TEXT
    is_alone = not any(_may_be_text(v) for name, v in record.items() if name != "prompt")
    if isinstance(record.get("prompt"), str) and is_alone:
        return Layout.PROMPT
    raise ValueError(_unknown_columns(record))


def parse_record(record: Mapping[str, object]) -> ChatRecord:
    """Read a record.

    Any chat layout may also have `system` (or `system_prompt`), a text put before the first turn,
    and `tools`, a list of tool schemas or its JSON text.

    Args:
        record: one row of a file, by column.

    Returns:
        the conversation, or the plain text.

    Raises:
        ValueError: the reason; the caller knows the file and the line.
    """
    layout = layout_of(record)
    if layout in (Layout.TEXT, Layout.PROMPT):
        return PlainText(text=_text(record[layout.value], layout.value))
    turns = _turns(record, layout)
    system = next((_text(record[k], k) for k in _SYSTEMS if record.get(k)), "")
    if system:
        if turns and turns[0].role in ("system", "developer"):
            raise ValueError(
                "the record has a system column and its first message is a system message too; "
                "keep one of them"
            )
        turns = [Message(role="system", content=system), *turns]
    return Conversation(messages=tuple(turns), tools=_tools(record.get("tools")))


def _turns(record: Mapping[str, object], layout: Layout) -> list[Message]:
    if layout in (Layout.MESSAGES, Layout.CONVERSATIONS):
        return _messages(record[layout.value], layout.value)
    if layout is Layout.INSTANCES:
        instances = _list(record["instances"], "instances")
        if not instances:
            raise ValueError("instances is empty; expected at least one {input, output}")
        first = _mapping(instances[0], "instances[0]")
        return _instruction_turns(
            _text(record["instruction"], "instruction"),
            _text(first.get("input") or "", "instances[0].input"),
            _text(first.get("output"), "instances[0].output"),
        )
    response = next(name for name in _RESPONSES if record.get(name) is not None)
    if layout is Layout.INSTRUCTION:
        context = next((name for name in ("input", "context") if record.get(name)), "input")
        return _history(record.get("history")) + _instruction_turns(
            _text(record["instruction"], "instruction"),
            _text(record.get(context) or "", context),
            _text(record[response], response),
        )
    prompt = next(name for name in _PROMPTS if record.get(name) is not None)
    return _pair(record[prompt], record[response], prompt, response)


def _pair(prompt: object, response: object, prompt_name: str, response_name: str) -> list[Message]:
    if isinstance(prompt, list) and isinstance(
        response, list
    ):  # TRL's conversational prompt/completion
        before = [replace(m, learn=False) for m in _messages(prompt, prompt_name)]
        return before + _messages(response, response_name)
    return [
        Message(role="user", content=_text(prompt, prompt_name)),
        Message(role="assistant", content=_text(response, response_name)),
    ]


def _instruction_turns(instruction: str, context: str, output: str) -> list[Message]:
    # Joined by one newline, as LLaMA-Factory does for its alpaca format.
    user = f"{instruction}\n{context}" if context else instruction
    return [Message(role="user", content=user), Message(role="assistant", content=output)]


def _history(value: object) -> list[Message]:
    turns: list[Message] = []
    for i, pair in enumerate(_list(value if value is not None else [], "history")):
        texts = _list(pair, f"history[{i}]")
        if len(texts) != 2:
            raise ValueError(
                f"history[{i}] has {len(texts)} items; expected [user text, assistant text]"
            )
        turns.append(Message(role="user", content=_text(texts[0], f"history[{i}][0]")))
        turns.append(Message(role="assistant", content=_text(texts[1], f"history[{i}][1]")))
    return turns


def _messages(value: object, path: str) -> list[Message]:
    return [_message(item, f"{path}[{i}]") for i, item in enumerate(_list(value, path))]


def _message(value: object, path: str) -> Message:
    """A turn in OpenAI's keys (role, content) or ShareGPT's (from, value)."""
    item = _mapping(value, path)
    role_key, content_key = ("from", "value") if "from" in item else ("role", "content")
    if role_key not in item:
        raise ValueError(
            f"{path} has keys {', '.join(map(str, item)) or 'none'}; "
            "expected role and content, or from and value"
        )
    given = _text(item[role_key], f"{path}.{role_key}")
    role = _ROLES.get(given)
    if role is None:
        raise ValueError(
            f"{path}.{role_key} is {given!r}; known roles: {', '.join(sorted(_ROLES))}"
        )
    content_path = f"{path}.{content_key}"
    content = item.get(content_key)
    calls: tuple[ToolCall, ...] = ()
    if given == "function_call":
        calls, content = _calls_from_text(content, content_path), ""
    elif role == "assistant":
        calls = _calls(item, path)
        content = "" if content is None and calls else content
    return Message(
        role=role,
        content=_content(content, content_path),
        tool_calls=calls,
        name=_optional_text(item, "name", path),
        tool_call_id=_optional_text(item, "tool_call_id", path),
        reasoning=_optional_text(item, "reasoning_content", path) or None,
        learn=_weight(item.get("weight"), path),
    )


def _content(value: object, path: str) -> str:
    if not isinstance(value, list):
        return _text(value, path)
    texts = []
    for i, part in enumerate(value):
        kind = _mapping(part, f"{path}[{i}]").get("type")
        if kind != "text":
            raise ValueError(
                f"{path}[{i}] is a part of type {kind!r}; only text parts are supported here"
            )
        texts.append(_text(part.get("text"), f"{path}[{i}].text"))
    return "".join(texts)


def _calls(item: Mapping[str, object], path: str) -> tuple[ToolCall, ...]:
    if item.get("function_call") is not None:  # OpenAI's older single call
        return (_call(item["function_call"], f"{path}.function_call"),)
    calls = item["tool_calls"] if item.get("tool_calls") is not None else []
    path = f"{path}.tool_calls"
    return tuple(_call(c, f"{path}[{i}]") for i, c in enumerate(_list(calls, path)))


def _calls_from_text(value: object, path: str) -> tuple[ToolCall, ...]:
    call = _json(_text(value, path), path)
    return tuple(_call(c, path) for c in (call if isinstance(call, list) else [call]))


def _call(value: object, path: str) -> ToolCall:
    item = _mapping(value, path)
    function = _mapping(item.get("function", item), f"{path}.function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = strict_json(arguments.encode())
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    elif arguments is None:
        arguments = {}
    elif not isinstance(arguments, Mapping):
        raise ValueError(
            f"{path}.arguments is {_kind(arguments)}; expected an object or its JSON text"
        )
    call_id = _optional_text(item, "id", path)
    return ToolCall(
        name=_text(function.get("name"), f"{path}.name"), arguments=arguments, call_id=call_id
    )


def _tools(value: object) -> tuple[Mapping[str, object], ...]:
    if value is None or value == "":
        return ()
    tools = []
    for i, tool in enumerate(
        _list(_json(value, "tools") if isinstance(value, str) else value, "tools")
    ):
        item = _mapping(tool, f"tools[{i}]")
        wrapped = item if "function" in item else {"type": "function", "function": item}
        _text(_mapping(wrapped["function"], f"tools[{i}].function").get("name"), f"tools[{i}].name")
        tools.append(wrapped)
    return tuple(tools)


def _weight(value: object, path: str) -> bool:
    if value is None:
        return True
    if value not in (0, 1):
        raise ValueError(
            f"{path}.weight is {value!r}; expected 0 or 1, since loss masks are not fractional"
        )
    return bool(value)


def _says_something(message: Message) -> bool:
    return bool(message.content.strip() or message.tool_calls or message.reasoning)


def _may_be_text(value: object) -> bool:
    is_list = isinstance(value, list) and not all(isinstance(item, str) for item in value)
    return is_list or isinstance(value, (str, Mapping))


def _unknown_columns(record: Mapping[str, object]) -> str:
    prompt = record.get("prompt")
    if isinstance(prompt, Mapping) and "replies" in prompt:
        return (
            "a message tree (prompt.replies) holds many conversations, but a record is one sample; "
            "write each path from the root to a leaf as a record with 'messages'"
        )
    seen = ", ".join(f"{k} (null)" if v is None else str(k) for k, v in record.items()) or "none"
    return (
        f"columns {seen} fit no known layout; expected messages, or conversations, or instruction "
        f"with output (or instances), or a pair of one of {', '.join(_PROMPTS)} and one of "
        f"{', '.join(_RESPONSES)}, or text. Rename the columns"
    )


def _text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{path} is {_kind(value)}; expected text")
    return value


def _optional_text(item: Mapping[str, object], key: str, path: str) -> str | None:
    value = item.get(key)
    return None if value is None else _text(value, f"{path}.{key}")


def _list(value: object, path: str) -> Sequence[object]:
    if not isinstance(value, list):
        raise ValueError(f"{path} is {_kind(value)}; expected a list")
    return value


def _mapping(value: object, path: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{path} is {_kind(value)}; expected an object")
    return value


def _json(value: str, path: str) -> object:
    try:
        return strict_json(value.encode())
    except ValueError as error:
        raise ValueError(f"{path} is text that {error}") from error


def _kind(value: object) -> str:
    return "null or missing" if value is None else f"of type {type(value).__name__}"
