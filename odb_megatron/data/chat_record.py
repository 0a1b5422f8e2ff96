"""What a record of a chat or text file means: its layout is recognised by its columns.

Pure: no files, no tokenizer. A turn is never dropped and a role never guessed; whatever would
change what is learnt and is not understood is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from odb_megatron.data.records import strict_json

__all__ = ["REASONING_KEYS", "ChatFormatError", "ChatRecord", "Conversation", "PlainText"]
__all__ += ["parse_record", "template_arguments"]

_PROMPTS = ("prompt", "question", "query", "input", "problem")
_RESPONSES = ("response", "completion", "answer", "output", "canonical_solution", "solution")
_SYSTEMS = ("system", "system_prompt")
_ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "function_call"), "assistant"),
    **dict.fromkeys(("model",), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "tool_response", "ipython"), "tool"),
    "system": "system",
    "developer": "developer",
}
_LOSS_KEYS = ("weight", "loss_weight", "loss", "loss_mask", "train", "trainable")
_SOUNDS_LIKE_LOSS = re.compile(
    r"(?:^|_)(?:loss(?:es)?|weights?|masks?|masked|train|trainable|learn|learnable|supervised?)(?:$|_)"
)
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_MEDIA = ("images", "image", "videos", "video", "audios", "audio")
_PREFERENCE = re.compile(r"(?:^|_)(?:chosen|rejected|preferred|desirable|undesirable|kto)(?:$|_)")
_TEMPLATE_KEYS = ("enable_thinking", "reasoning_effort")


class ChatFormatError(ValueError):
    """A chat template or file that cannot be used; no fault of one record, so none is skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages as chat templates of transformers take them.

    Attributes:
        messages: `role` (system, developer, user, assistant or tool), `content`, `tool_calls` with
            arguments as an object where they are one, reasoning under each of its names.
        weights: of each message in the loss; 0 for all but the assistant's.
        tools: on offer, each `{"type": "function", "function": {...}}`.
        template_arguments: the record's own `chat_template_kwargs`.
    """

    messages: tuple[dict[str, Any], ...]
    weights: tuple[float, ...]
    tools: tuple[dict[str, Any], ...] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        learnt = zip(self.messages, self.weights, strict=True)
        if not any(weight and _says_something(message) for message, weight in learnt):
            roles = ", ".join(str(m["role"]) for m in self.messages[:8]) or "none"
            raise ValueError(
                f"no assistant message with content to learn from; roles seen: {roles}. Add the "
                "answer, or leave the record out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainText:
    """A document: every token carries loss, of this weight."""

    text: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError(
                "the text is empty; expected at least one character that is not a space"
            )


ChatRecord = Conversation | PlainText


def parse_record(record: Mapping[str, Any]) -> ChatRecord:
    """Read a record; the first layout whose columns hold something is taken.

    `messages` (OpenAI); `conversations` (ShareGPT); `instruction` and `instances`, of which the
    first is taken (Self-Instruct); `instruction` and a response (Alpaca, Dolly), with `input` or
    `context` and `history`; a prompt and a response column, texts or lists of messages (TRL);
    `text`; `prompt` alone as text, where no other column could be the answer. A chat may also have
    `system` (or `system_prompt`), `tools` or `functions` (a list or its JSON text),
    `chat_template_kwargs`, and a loss key: one weight, or a list of one for each message.

    Args:
        record: one row of a file, by column; null is as if not there.

    Raises:
        ChatFormatError: preference data, or a key that sounds like a loss weight and is not known.
        ValueError: the reason; the caller knows the file and the line.
    """
    row = {name: value for name, value in record.items() if value is not None}
    _check_columns(row)
    for layout in ("text", "prompt"):
        if _is_plain(row, layout):
            weight = _weights(row, 1)[0]
            return PlainText(text=_text(row[layout], layout), weight=weight)
    messages = _turns(row)
    system = next((_text(row[name], name) for name in _SYSTEMS if row.get(name)), "")
    first = 0
    if system:
        if messages and messages[0][0]["role"] in ("system", "developer"):
            raise ValueError(
                "the record has a system column and its first message is a system message too; "
                "keep one of them"
            )
        messages, first = [({"role": "system", "content": system}, 1.0), *messages], 1
    if not messages:
        raise ValueError("the conversation is empty; expected at least one assistant message")
    given = [1.0] * first + _weights(row, len(messages) - first, [m for m, _ in messages[first:]])
    return Conversation(
        messages=tuple(message for message, _ in messages),
        weights=tuple(
            own * factor if message["role"] == "assistant" else 0.0
            for (message, own), factor in zip(messages, given, strict=True)
        ),
        tools=_tools(row),
        template_arguments=_template_arguments(row),
    )


def _template_arguments(row: Mapping[str, Any]) -> Mapping[str, Any]:
    value, path = row.get("chat_template_kwargs", {}), "chat_template_kwargs"
    given = _object(_json(value, path) if isinstance(value, str) else value, path)
    return {**given, "documents": row["documents"]} if row.get("documents") else given


def template_arguments(text: str) -> dict[str, Any]:
    """Parse further variables of a chat template, a JSON object.

    Raises:
        ValueError: it is none.
    """
    found = _json(text, "the value")
    if not isinstance(found, dict):
        raise ValueError(
            f"the value is {_kind(found)}; expected a JSON object, such as "
            "'{\"enable_thinking\": false}'"
        )
    return found


# --- layouts ------------------------------------------------------------------------------------


def _check_columns(row: Mapping[str, Any]) -> None:
    pairs = [name for name in row if _is_preference(str(name))]
    label = row.get("label")
    if isinstance(label, bool) or (label in (0, 1) and "completion" in row):  # KTO
        pairs.append("label")
    if pairs:
        raise ChatFormatError(
            f"the record is preference data (column {', '.join(pairs)}), of which one side is not "
            "to be learnt; this trains on one answer: keep prompt and chosen answer as messages"
        )
    _check_loss_keys(row, "the record")
    _check_media(row, "the record")
    arguments = [name for name in _TEMPLATE_KEYS if name in row]
    if arguments:
        raise ValueError(
            f"the record has {', '.join(arguments)} beside its messages; the chat template gets "
            "what is in chat_template_kwargs: put it there"
        )


def _check_media(item: Mapping[str, Any], path: str) -> None:
    media = [name for name in _MEDIA if item.get(name)]
    if media:
        raise ValueError(
            f"{path} has {', '.join(media)}, and this model reads text alone: take a "
            "multimodal script (docs/multimodal.md), or leave such records out"
        )


@lru_cache(maxsize=1024)
def _is_preference(key: str) -> bool:
    return _PREFERENCE.search(key.lower()) is not None


@lru_cache(maxsize=1024)
def _sounds_like_loss(key: str) -> bool:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower()
    return key not in _LOSS_KEYS and _SOUNDS_LIKE_LOSS.search(words) is not None


def _check_loss_keys(item: Mapping[str, Any], path: str) -> None:
    unknown = [key for key in item if _sounds_like_loss(str(key))]
    if unknown:
        raise ChatFormatError(
            f"{path} has the key {unknown[0]!r}, which sounds as if it said what is learnt and is "
            f"not known; known: {', '.join(_LOSS_KEYS)}. Rename it, or take it out"
        )


def _is_plain(row: Mapping[str, Any], name: str) -> bool:
    if name == "text":
        chats = {"messages", "conversations"} & row.keys()
        pair = row.keys() & {*_PROMPTS, "instruction"} and row.keys() & {*_RESPONSES, "instances"}
        return "text" in row and not chats and not pair
    others = (value for key, value in row.items() if key not in ("prompt", *_LOSS_KEYS))
    return isinstance(row.get("prompt"), str) and not any(map(_may_be_text, others))


def _turns(row: Mapping[str, Any]) -> list[tuple[dict[str, Any], float]]:
    """Return each message with its own weight."""
    chats = [name for name in ("messages", "conversations") if name in row]
    for name in sorted(chats, key=lambda one: not row[one]):
        value = row[name]
        return _messages(_json(value, name) if _is_json(value) else value, name)
    if "instruction" in row and "instances" in row:
        instances = _list(row["instances"], "instances")
        if not instances:
            raise ValueError("instances is empty; expected at least one {input, output}")
        first = _object(instances[0], "instances[0]")
        context, output = first.get("input") or "", first.get("output")
        return _instruction(row, (context, "instances[0].input"), (output, "instances[0].output"))
    response = next((name for name in _RESPONSES if name in row), None)
    if response and "instruction" in row:
        context = next((name for name in ("input", "context") if row.get(name)), "input")
        turns = _history(row.get("history", []))
        answer = (row[response], response)
        return turns + _instruction(row, (row.get(context) or "", context), answer)
    prompts = [name for name in _PROMPTS if name in row]
    if response and prompts:
        prompt, *more = prompts + ["context"] * bool(row.get("context"))
        if more := [name for name in more if row[name]]:
            raise ValueError(
                f"the record has {prompt} and {', '.join(more)}; which of them the question is, "
                "and in which order, is not known: put them into one column"
            )
        if isinstance(row[prompt], list):  # TRL's
            before = [(message, 0.0) for message, _ in _messages(row[prompt], prompt)]
            if isinstance(row[response], list):
                return before + _messages(row[response], response)
            return before + _pair("", _text(row[response], response))[1:]
        return _pair(_text(row[prompt], prompt), _text(row[response], response))
    raise ValueError(_unknown_columns(row))


def _pair(user: str, assistant: str) -> list[tuple[dict[str, Any], float]]:
    return [
        ({"role": "user", "content": user}, 1.0),
        ({"role": "assistant", "content": assistant}, 1.0),
    ]


def _instruction(
    row: Mapping[str, Any], context: tuple[Any, str], output: tuple[Any, str]
) -> list[tuple[dict[str, Any], float]]:
    # Joined by one newline, as LLaMA-Factory does for its alpaca format.
    texts = [_text(row["instruction"], "instruction"), _text(*context)]
    return _pair("\n".join(filter(None, texts)), _text(*output))


def _history(value: Any) -> list[tuple[dict[str, Any], float]]:
    turns = []
    for i, pair in enumerate(_list(value, "history")):
        texts = _list(pair, f"history[{i}]")
        if len(texts) != 2:
            raise ValueError(
                f"history[{i}] has {len(texts)} items; expected [user text, assistant text]"
            )
        turns += _pair(*(_text(text, f"history[{i}][{k}]") for k, text in enumerate(texts)))
    return turns


# --- messages -----------------------------------------------------------------------------------


def _messages(value: Any, path: str) -> list[tuple[dict[str, Any], float]]:
    return [_message(item, f"{path}[{i}]") for i, item in enumerate(_list(value, path))]


def _message(value: Any, path: str) -> tuple[dict[str, Any], float]:
    """A turn in OpenAI's keys (role, content) or ShareGPT's (from, value)."""
    item = {key: part for key, part in _object(value, path).items() if part is not None}
    role_key, content_key = ("from", "value") if "from" in item else ("role", "content")
    if role_key not in item:
        raise ValueError(
            f"{path} has keys {', '.join(map(str, item)) or 'none'}; "
            "expected role and content, or from and value"
        )
    given = _text(item.pop(role_key), f"{path}.{role_key}")
    role = _ROLES.get(given)
    if role is None:
        raise ValueError(
            f"{path}.{role_key} is {given!r}; known roles: {', '.join(sorted(_ROLES))}"
        )
    weight = _weight(item, path)
    _check_media(item, path)
    if role != "assistant" and any(key in item for key in _LOSS_KEYS) and weight:
        weight = _refuse_learning(role, path)
    content = item.pop(content_key, None)
    item = {key: part for key, part in item.items() if part != "" or key not in REASONING_KEYS}
    message = {key: part for key, part in item.items() if key not in _LOSS_KEYS}
    if given == "function_call":
        text = _text(content, f"{path}.{content_key}")
        found = _json(text, f"{path}.{content_key}")
        message["tool_calls"], content = found if isinstance(found, list) else [found], None
    elif "function_call" in message:  # OpenAI's older single call
        if message.get("tool_calls"):
            raise ValueError(f"{path} has function_call and tool_calls; keep one of them")
        message["tool_calls"] = [message.pop("function_call")]
    if role == "assistant":
        calls = _list(message.pop("tool_calls", []), f"{path}.tool_calls")
        if calls:
            where = f"{path}.tool_calls"
            message["tool_calls"] = [_call(c, f"{where}[{i}]") for i, c in enumerate(calls)]
        message |= _reasoning(message, path)
    if content is not None or "tool_calls" not in message:
        message["content"] = _content(content, f"{path}.{content_key}")
    for key in ("name", "tool_call_id"):
        if key in message:
            _text(message[key], f"{path}.{key}")
    return {"role": role, **message}, weight


def _content(value: Any, path: str) -> str:
    if not isinstance(value, list):
        return _text(value, path)
    texts = []
    for i, part in enumerate(value):
        kind = _object(part, f"{path}[{i}]").get("type")
        if kind != "text":
            raise ValueError(
                f"{path}[{i}] is a part of type {kind!r}, and this model reads text alone: take a "
                "multimodal script (docs/multimodal.md), or leave such records out"
            )
        if said := [key for key in part if key in _LOSS_KEYS or _sounds_like_loss(str(key))]:
            raise ValueError(
                f"{path}[{i}] has {said[0]}; weights are of whole messages: split the message"
            )
        texts.append(_text(part.get("text"), f"{path}[{i}].text"))
    return "".join(texts)


def _reasoning(message: Mapping[str, Any], path: str) -> dict[str, str]:
    """Return the reasoning under every name that templates read."""
    texts = {_text(message[key], f"{path}.{key}") for key in REASONING_KEYS if key in message}
    if len(texts) > 1:
        raise ValueError(f"{path} has different texts of reasoning; keep one of {REASONING_KEYS}")
    return dict.fromkeys(REASONING_KEYS, texts.pop()) if texts else {}


def _call(value: Any, path: str) -> dict[str, Any]:
    item = dict(_object(value, path))
    function = dict(_object(item.get("function", item), f"{path}.function"))
    name = _text(function.get("name"), f"{path}.name")
    names = [key for key in ("arguments", "parameters", "args") if function.get(key) is not None]
    arguments = function[names[0]] if names else {}
    if len(names) > 1:
        raise ValueError(f"{path} has {' and '.join(names)}; expected arguments alone")
    if not isinstance(arguments, (Mapping, str)):
        raise ValueError(
            f"{path}.arguments is {_kind(arguments)}; expected an object or its JSON text"
        )
    call_id = item.get("id")
    return {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
        **({} if call_id is None else {"id": _text(call_id, f"{path}.id")}),
    }


def _tools(row: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    names = [name for name in ("tools", "functions") if row.get(name)]
    if not names:
        return ()
    if len(names) > 1:
        raise ValueError("the record has tools and functions; keep one of them")
    value, path = row[names[0]], names[0]
    tools = []
    listed = _json(value, path) if isinstance(value, str) else value
    for i, tool in enumerate(_list(listed, path)):
        item = dict(_object(tool, f"{path}[{i}]"))
        wrapped = item if "function" in item else {"type": "function", "function": item}
        function = _object(wrapped["function"], f"{path}[{i}].function")
        _text(function.get("name"), f"{path}[{i}].name")
        tools.append(wrapped)
    return tuple(tools)


# --- weights ------------------------------------------------------------------------------------


def _weight(item: Mapping[str, Any], path: str) -> float:
    """Return what the loss keys of a message say; 1 where there is none."""
    _check_loss_keys(item, path)
    found = {key: _number(item[key], f"{path}.{key}") for key in _LOSS_KEYS if key in item}
    if len(set(found.values())) > 1:
        raise ValueError(f"{path} has {' and '.join(found)}, which differ; keep one of them")
    return next(iter(found.values()), 1.0)


def _weights(
    row: Mapping[str, Any], count: int, messages: Sequence[Mapping[str, Any]] = ()
) -> list[float]:
    """Return what the record's own loss key says of each message, 1 where there is none."""
    names = [key for key in _LOSS_KEYS if key in row]
    if not names:
        return [1.0] * count
    if len(names) > 1:
        raise ValueError(f"the record has {' and '.join(names)}; keep one of them")
    value, path = row[names[0]], names[0]
    if not isinstance(value, list):
        return [_number(value, path)] * count
    given = [_number(one, f"{path}[{i}]") for i, one in enumerate(value)]
    roles = [str(message["role"]) for message in messages]
    if len(given) == count:
        for i, (role, weight) in enumerate(zip(roles, given, strict=True)):
            if weight and role != "assistant":
                _refuse_learning(role, f"{path}[{i}]")
        return given
    if len(given) == roles.count("assistant"):
        rest = iter(given)
        return [next(rest) if role == "assistant" else 1.0 for role in roles]
    raise ValueError(
        f"{path} has {len(given)} entries for {count} messages, {roles.count('assistant')} of the "
        "assistant; expected one for each, or one for each of the assistant's"
    )


def _number(value: Any, path: str) -> float:
    if not isinstance(value, (bool, int, float)) or not (0 <= value < math.inf):
        raise ValueError(f"{path} is {value!r}; expected true or false, or a weight of at least 0")
    return float(value)


def _refuse_learning(role: str, path: str) -> float:
    raise ValueError(
        f"{path} asks to learn a message of the role {role}; only the assistant's are learnt: set "
        "it to 0"
    )


# --- texts --------------------------------------------------------------------------------------


def _says_something(message: Mapping[str, Any]) -> bool:
    said = (message.get("content"), message.get("reasoning_content"))
    return bool(message.get("tool_calls")) or any(text and text.strip() for text in said)


def _may_be_text(value: Any) -> bool:
    is_list = isinstance(value, list) and not all(isinstance(item, str) for item in value)
    return is_list or isinstance(value, (str, Mapping))


def _unknown_columns(row: Mapping[str, Any]) -> str:
    prompt = row.get("prompt")
    if isinstance(prompt, Mapping) and "replies" in prompt:
        return (
            "a message tree (prompt.replies) holds many conversations, but a record is one sample; "
            "write each path from the root to a leaf as a record with 'messages'"
        )
    return (
        f"columns {', '.join(map(str, row)) or 'none'} fit no known layout; expected messages, or "
        "conversations, or instruction with output (or instances), or a pair of one of "
        f"{', '.join(_PROMPTS)} and one of {', '.join(_RESPONSES)}, or text. Rename the columns"
    )


def _expect(kind: type | tuple[type, ...], name: str) -> Callable[[Any, str], Any]:
    def check(value: Any, path: str) -> Any:
        if not isinstance(value, kind):
            raise ValueError(f"{path} is {_kind(value)}; expected {name}")
        return value

    return check


_text: Callable[[Any, str], str] = _expect(str, "text")
_list: Callable[[Any, str], list[Any]] = _expect(list, "a list")
_object: Callable[[Any, str], Mapping[str, Any]] = _expect(Mapping, "an object")


def _is_json(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip()[:1] == "["


def _json(value: str, path: str) -> Any:
    try:
        return strict_json(value.encode())
    except ValueError as error:
        raise ValueError(f"{path} is text that {error}") from error


def _kind(value: Any) -> str:
    return "null or missing" if value is None else f"of type {type(value).__name__}"
