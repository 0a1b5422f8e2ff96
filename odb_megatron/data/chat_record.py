"""What a record of a chat or text file means: its layout is recognised by its columns.

A turn is never dropped and a role never guessed; whatever would change what is learnt and is not
understood is an error. No file is opened here, and no tokenizer known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from odb_megatron.data.records import strict_json

__all__ = ["REASONING_KEYS", "ChatFormatError", "ChatRecord", "Conversation"]
__all__ += ["PlainText", "TakeImage", "parse_record", "template_arguments"]

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_PROMPTS = ("prompt", "question", "query", "input", "problem")
_RESPONSES = ("response", "completion", "answer", "output", "canonical_solution", "solution")
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
_PREFERENCE = re.compile(r"(?:^|_)(?:chosen|rejected|preferred|desirable|undesirable|kto)(?:$|_)")
_IMAGE_COLUMNS = ("images", "image")
_OTHER_MEDIA = ("videos", "video", "audios", "audio")
_TEMPLATE_KEYS = ("enable_thinking", "reasoning_effort")
_TEXT_ALONE = (
    "and this model reads text alone: take a multimodal script (docs/models.md), or leave such "
    "records out"
)

TakeImage = Callable[[Mapping[str, Any], str], str]
_Row = Mapping[str, Any]
_Message = dict[str, Any]
_T = TypeVar("_T")


class ChatFormatError(ValueError):
    """A chat template or file that cannot be used; no fault of one record, so none is skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages as chat templates of transformers take them.

    Attributes:
        messages: `role` (system, developer, user, assistant or tool), `content`, `tool_calls` with
            arguments as they were given, reasoning under each of its names.
        weights: of each message in the loss; 0 for all but the assistant's.
        tools: on offer, each `{"type": "function", "function": {...}}`.
        template_arguments: the record's own `chat_template_kwargs`.
    """

    messages: tuple[_Message, ...]
    weights: tuple[float, ...]
    tools: tuple[dict[str, Any], ...] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pairs = zip(self.messages, self.weights, strict=True)
        said = [weight for message, weight in pairs if _is_answer(message)]
        roles = ", ".join(str(message["role"]) for message in self.messages[:8])
        if not said:
            raise ValueError(
                f"no assistant message with content to learn from; roles seen: {roles}. Add the "
                "answer, or leave the record out"
            )
        if not any(said):
            raise ValueError("every assistant message with content has the weight 0")


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


def parse_record(record: _Row, *, images: TakeImage | None = None) -> ChatRecord:
    """Read a record; the first layout whose columns hold something is taken.

    `messages` (OpenAI); `conversations` (ShareGPT); `instruction` and `instances`, of which the
    first is taken (Self-Instruct); `instruction` and a response (Alpaca, Dolly), with `input` or
    `context` and `history`; a prompt and a response column, texts or lists of messages (TRL);
    `text`; `prompt` alone as text, where no other column could be the answer. A chat may also have
    `system` (or `system_prompt`), `tools` or `functions` (a list or its JSON text),
    `chat_template_kwargs`, and a loss key: one weight, or a list of one for each message.

    Args:
        record: one row of a file, by column; null is as if not there.
        images: takes a part of a message that is a picture, and its path in the record for errors;
            returns what stands for it in the text. None to refuse pictures.

    Raises:
        ChatFormatError: preference data, or a key that sounds like a loss weight and is not known.
        ValueError: the reason; the caller knows the file and the line.
    """
    row = {name: value for name, value in record.items() if value is not None}
    _check_columns(row, images)
    has_chat = "messages" in row or "conversations" in row
    has_pair = row.keys() & {*_PROMPTS, "instruction"} and row.keys() & {*_RESPONSES, "instances"}
    if "text" in row and not has_chat and not has_pair:
        return PlainText(text=_typed(row["text"], str, "text"), weight=_weights(row, [{}])[0])
    others = (value for key, value in row.items() if key not in ("prompt", *_LOSS_KEYS))
    if isinstance(row.get("prompt"), str) and not any(map(_may_be_text, others)):
        return PlainText(text=row["prompt"], weight=_weights(row, [{}])[0])
    messages = _turns(row, images)
    if not messages:
        raise ValueError("the conversation is empty; expected at least one assistant message")
    factors = _weights(row, messages)
    system = next((name for name in ("system", "system_prompt") if row.get(name)), "")
    if system and messages[0]["role"] in ("system", "developer"):
        raise ValueError(
            "the record has a system column and its first message is a system message too; keep "
            "one of them"
        )
    if system:
        messages.insert(0, {"role": "system", "content": _typed(row[system], str, system)})
        factors.insert(0, 0.0)
    pairs = [(one, one.pop("weight", 0.0) * by) for one, by in zip(messages, factors, strict=True)]
    arguments = row.get("chat_template_kwargs", {})
    if isinstance(arguments, str):
        arguments = _json(arguments, "chat_template_kwargs")
    arguments = _typed(arguments, dict, "chat_template_kwargs")
    if row.get("documents"):
        arguments = {**arguments, "documents": row["documents"]}
    return Conversation(
        messages=tuple(messages),
        weights=tuple(weight if one["role"] == "assistant" else 0.0 for one, weight in pairs),
        tools=_tools(row),
        template_arguments=arguments,
    )


def template_arguments(text: str) -> dict[str, Any]:
    """Parse further variables of a chat template, a JSON object.

    Raises:
        ValueError: it is none.
    """
    return _typed(_json(text, "the value"), dict, "the value")


# --- layouts ------------------------------------------------------------------------------------


def _check_columns(row: _Row, images: TakeImage | None) -> None:
    pairs = [name for name in row if _sounds_like(_PREFERENCE, str(name))]
    label = row.get("label")
    if isinstance(label, bool) or (label in (0, 1) and "completion" in row):  # KTO
        pairs.append("label")
    if pairs:
        raise ChatFormatError(
            f"the record is preference data (column {', '.join(pairs)}), of which one side is not "
            "to be learnt; this trains on one answer: keep prompt and chosen answer as messages"
        )
    _check_keys(row, "the record", has_images=images is not None)
    if arguments := [name for name in _TEMPLATE_KEYS if name in row]:
        raise ValueError(
            f"the record has {', '.join(arguments)} beside its messages; the chat template gets "
            "what is in chat_template_kwargs: put it there"
        )


def _check_keys(item: _Row, path: str, *, has_images: bool = False) -> None:
    if unknown := [key for key in item if _is_unknown_loss(str(key))]:
        raise ChatFormatError(
            f"{path} has the key {unknown[0]!r}, which sounds as if it said what is learnt and is "
            f"not known; known: {', '.join(_LOSS_KEYS)}. Rename it, or take it out"
        )
    media = _OTHER_MEDIA + (() if has_images else _IMAGE_COLUMNS)
    if found := [name for name in media if item.get(name)]:
        raise ValueError(f"{path} has {', '.join(found)}, {_TEXT_ALONE}")


@lru_cache(maxsize=1024)
def _sounds_like(pattern: re.Pattern[str], key: str) -> bool:
    return pattern.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower()) is not None


def _is_unknown_loss(key: str) -> bool:
    return key not in _LOSS_KEYS and _sounds_like(_SOUNDS_LIKE_LOSS, key)


def _turns(row: _Row, images: TakeImage | None) -> list[_Message]:
    chats = [name for name in ("messages", "conversations") if name in row]
    if name := next((one for one in chats if row[one]), next(iter(chats), "")):
        value = row[name]
        is_json = isinstance(value, str) and value.lstrip()[:1] == "["
        return _messages(_json(value, name) if is_json else value, name, images)
    response = next((name for name in _RESPONSES if name in row), None)
    if "instruction" in row and (response or "instances" in row):
        return _instruction(row, response)
    prompts = [name for name in _PROMPTS if name in row]
    if response and prompts:
        prompt, *more = prompts + ["context"] * bool(row.get("context"))
        if more := [name for name in more if row[name]]:
            raise ValueError(
                f"the record has {prompt} and {', '.join(more)}; which of them the question is, "
                "and in which order, is not known: put them into one column"
            )
        if not isinstance(row[prompt], list):
            return _pair(_typed(row[prompt], str, prompt), _typed(row[response], str, response))
        before = [one | {"weight": 0.0} for one in _messages(row[prompt], prompt, images)]  # TRL's
        if isinstance(row[response], list):
            return before + _messages(row[response], response, images)
        return before + _pair("", _typed(row[response], str, response))[1:]
    if isinstance(row.get("prompt"), Mapping) and "replies" in row["prompt"]:
        raise ValueError(
            "a message tree (prompt.replies) holds many conversations, but a record is one sample; "
            "write each path from the root to a leaf as a record with 'messages'"
        )
    raise ValueError(
        f"columns {', '.join(map(str, row)) or 'none'} fit no known layout; expected messages, or "
        "conversations, or instruction with output (or instances), or a pair of one of "
        f"{', '.join(_PROMPTS)} and one of {', '.join(_RESPONSES)}, or text. Rename the columns"
    )


def _pair(user: str, assistant: str) -> list[_Message]:
    return [
        {"role": "user", "content": user, "weight": 1.0},
        {"role": "assistant", "content": assistant, "weight": 1.0},
    ]


def _instruction(row: _Row, response: str | None) -> list[_Message]:
    """Alpaca's and Dolly's rows; Self-Instruct's, of which the first instance is taken."""
    item, path, turns = row, "", []
    if "instances" in row:
        if not _typed(row["instances"], list, "instances"):
            raise ValueError("instances is empty; expected at least one {input, output}")
        path, response = "instances[0].", "output"
        item = _typed(row["instances"][0], dict, "instances[0]")
    for i, pair in enumerate(_typed(row.get("history", []), list, "history")):
        at = f"history[{i}]"
        if len(_typed(pair, list, at)) != 2:
            raise ValueError(f"{at} has {len(pair)} items; expected [user text, assistant text]")
        turns += _pair(*(_typed(text, str, f"{at}[{k}]") for k, text in enumerate(pair)))
    assert response is not None, "one of the two is there"
    context = next((name for name in ("input", "context") if item.get(name)), "input")
    texts = (_typed(row["instruction"], str, "instruction"), item.get(context) or "")
    # Joined by one newline, as LLaMA-Factory does for its alpaca format.
    question = "\n".join(filter(None, [texts[0], _typed(texts[1], str, path + context)]))
    return turns + _pair(question, _typed(item.get(response), str, path + response))


# --- messages -----------------------------------------------------------------------------------


def _messages(value: Any, path: str, images: TakeImage | None) -> list[_Message]:
    return [
        _message(item, f"{path}[{i}]", images) for i, item in enumerate(_typed(value, list, path))
    ]


def _message(value: Any, path: str, images: TakeImage | None) -> _Message:
    """A turn in OpenAI's keys (role, content) or ShareGPT's (from, value), and its `weight`."""
    item = {key: part for key, part in _typed(value, dict, path).items() if part is not None}
    role_key, content_key = ("from", "value") if "from" in item else ("role", "content")
    if role_key not in item:
        raise ValueError(
            f"{path} has keys {', '.join(map(str, item)) or 'none'}; "
            "expected role and content, or from and value"
        )
    named = _typed(item.pop(role_key), str, f"{path}.{role_key}")
    if (role := _ROLES.get(named)) is None:
        known = ", ".join(sorted(_ROLES))
        raise ValueError(f"{path}.{role_key} is {named!r}; known roles: {known}")
    _check_keys(item, path)
    weights = {key: _number(item.pop(key), f"{path}.{key}") for key in _LOSS_KEYS if key in item}
    if len(set(weights.values())) > 1:
        raise ValueError(f"{path} has {' and '.join(weights)}, which differ; keep one of them")
    weight = next(iter(weights.values()), 1.0)
    if weights and weight and role != "assistant":
        _refuse_learning(role, path)
    content, where = item.pop(content_key, None), f"{path}.{content_key}"
    message = {key: part for key, part in item.items() if part != "" or key not in REASONING_KEYS}
    if named == "function_call":
        found = _json(_typed(content, str, where), where)
        message["tool_calls"], content = found if isinstance(found, list) else [found], None
    elif "function_call" in message:  # OpenAI's older single call
        if message.get("tool_calls"):
            raise ValueError(f"{path} has function_call and tool_calls; keep one of them")
        message["tool_calls"] = [message.pop("function_call")]
    if role == "assistant":
        given = _typed(message.pop("tool_calls", []), list, f"{path}.tool_calls")
        if calls := [_call(one, f"{path}.tool_calls[{i}]") for i, one in enumerate(given)]:
            message["tool_calls"] = calls
    thoughts: list[str] = []
    if content is not None or "tool_calls" not in message:
        message["content"] = _content(content, where, images, thoughts)
    if thoughts and role != "assistant":
        raise ValueError(f"{where} has a part of type 'thinking', and its role is {role}")
    if role == "assistant":
        keys = [key for key in REASONING_KEYS if key in message]
        texts = {_typed(message[key], str, f"{path}.{key}") for key in keys}
        texts |= {"".join(thoughts)} - {""}
        if len(texts) > 1:
            raise ValueError(
                f"{path} has different texts of reasoning; keep one of {', '.join(REASONING_KEYS)}"
            )
        message |= dict.fromkeys(REASONING_KEYS, *texts) if texts else {}
    for key in ("name", "tool_call_id"):
        if key in message:
            _typed(message[key], str, f"{path}.{key}")
    return {"role": role, **message, "weight": weight}


def _content(value: Any, path: str, images: TakeImage | None, thoughts: list[str]) -> str:
    """Return the text; note what Mistral's parts of type `thinking` before it say."""
    if not isinstance(value, list):
        return _typed(value, str, path)
    texts: list[str] = []
    for i, part in enumerate(value):
        where = f"{path}[{i}]"
        kind = _typed(part, dict, where).get("type")
        if said := [key for key in part if key in _LOSS_KEYS or _is_unknown_loss(str(key))]:
            raise ValueError(f"{where} has {said[0]}; weights are of whole messages: split it")
        if kind == "text":
            texts.append(_typed(part.get("text"), str, f"{where}.text"))
        elif kind == "thinking" and not texts:
            thoughts.append(_content(part.get("thinking"), f"{where}.thinking", None, []))
        elif images is not None and kind in ("image", "image_url"):
            texts.append(images(part, where))
        else:
            raise ValueError(f"{where} is a part of type {kind!r}, {_TEXT_ALONE}")
    return "".join(texts)


def _call(value: Any, path: str) -> dict[str, Any]:
    item = _typed(value, dict, path)
    function = _typed(item.get("function", item), dict, f"{path}.function")
    name = _typed(function.get("name"), str, f"{path}.name")
    names = [key for key in ("arguments", "parameters", "args") if function.get(key) is not None]
    given = function[names[0]] if names else {}
    if len(names) > 1:
        raise ValueError(f"{path} has {' and '.join(names)}; expected arguments alone")
    if not isinstance(given, (Mapping, str)):
        raise ValueError(f"{path}.arguments is {_kind(given)}; expected an object or its JSON text")
    own_id = {} if item.get("id") is None else {"id": _typed(item["id"], str, f"{path}.id")}
    return {"type": "function", "function": {"name": name, "arguments": given}, **own_id}


def _tools(row: _Row) -> tuple[dict[str, Any], ...]:
    names = [name for name in ("tools", "functions") if row.get(name)]
    if len(names) > 1:
        raise ValueError("the record has tools and functions; keep one of them")
    path = "".join(names)
    listed = _json(row[path], path) if isinstance(row.get(path), str) else row.get(path, [])
    tools = []
    for i, tool in enumerate(_typed(listed, list, path)):
        item = dict(_typed(tool, dict, f"{path}[{i}]"))
        wrapped = item if "function" in item else {"type": "function", "function": item}
        function = _typed(wrapped["function"], dict, f"{path}[{i}].function")
        _typed(function.get("name"), str, f"{path}[{i}].name")
        tools.append(wrapped)
    return tuple(tools)


# --- weights ------------------------------------------------------------------------------------


def _weights(row: _Row, messages: Sequence[_Row]) -> list[float]:
    """Return what the record's own loss key says of each message, 1 where there is none."""
    names = [key for key in _LOSS_KEYS if key in row]
    if not names:
        return [1.0] * len(messages)
    if len(names) > 1:
        raise ValueError(f"the record has {' and '.join(names)}; keep one of them")
    value, path = row[names[0]], names[0]
    if not isinstance(value, list):
        return [_number(value, path)] * len(messages)
    given = [_number(one, f"{path}[{i}]") for i, one in enumerate(value)]
    roles = [str(message.get("role")) for message in messages]
    num = roles.count("assistant")
    if len(given) == num < len(roles):
        rest = iter(given)
        return [next(rest) if role == "assistant" else 1.0 for role in roles]
    if len(given) != len(roles):
        raise ValueError(
            f"{path} has {len(given)} entries for {len(roles)} messages, {num} of the assistant; "
            "expected one for each, or one for each of the assistant's"
        )
    for i, (role, weight) in enumerate(zip(roles, given, strict=True)):
        if weight and role != "assistant":
            _refuse_learning(role, f"{path}[{i}]")
    return given


def _number(value: Any, path: str) -> float:
    if not isinstance(value, (bool, int, float)) or not (0 <= value < math.inf):
        raise ValueError(f"{path} is {value!r}; expected true or false, or a weight of at least 0")
    return float(value)


def _refuse_learning(role: str, path: str) -> None:
    raise ValueError(
        f"{path} asks to learn a message of the role {role}; only the assistant's are learnt: set "
        "it to 0"
    )


# --- values -------------------------------------------------------------------------------------


def _is_answer(message: _Row) -> bool:
    said = (message.get("content"), message.get("reasoning_content"))
    is_said = message.get("tool_calls") or any(text and text.strip() for text in said)
    return message["role"] == "assistant" and bool(is_said)


def _may_be_text(value: Any) -> bool:
    is_list = isinstance(value, list) and not all(isinstance(item, str) for item in value)
    return is_list or isinstance(value, (str, Mapping))


def _typed(value: Any, kind: type[_T], path: str) -> _T:
    if isinstance(value, kind):
        return value
    names = {"str": "text", "list": "a list", "dict": "an object"}
    raise ValueError(f"{path} is {_kind(value)}; expected {names[kind.__name__]}")


def _json(value: str, path: str) -> Any:
    try:
        return strict_json(value.encode())
    except ValueError as error:
        raise ValueError(f"{path} is text that {error}") from error


def _kind(value: Any) -> str:
    return "null or missing" if value is None else f"of type {type(value).__name__}"
