"""Chat records as token ids with a weight for each, through chat templates of transformers.

What a conversation looks like is the template's business and where the assistant speaks is marked
in it: by its author, or by TRL's training version of it. For a template that nobody has marked,
private characters around every message's strings tell which of the rendered text is whose; without
them it must be the same text. So a text that imitates a turn cannot move what is learnt.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import chain, pairwise, product
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from odb_megatron.data.chat_record import (
    REASONING_KEYS,
    ChatFormatError,
    ChatRecord,
    Conversation,
    PlainText,
)
from odb_megatron.data.records import strict_json
from odb_megatron.data.tokenizer import CHATML_TEMPLATE, TextTokenizer

__all__ = ["MAX_TEXT_CHARS", "ChatRenderer", "ChatTemplate"]

MAX_TEXT_CHARS = 8 << 20
"""Longest text that is tokenized: a fast tokenizer takes some 240 bytes per token meanwhile."""

# Llama's and gpt-oss's templates print today's date, so that lengths would depend on the day of
# the run; this is the date that Llama's fall back to where no clock is offered.
_TEMPLATE_DATE = datetime(2024, 7, 26)
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_RESERVED = ("messages", "tools", "add_generation_prompt")
_ANY_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}
_MARK_IT = (
    "put {% generation %} and {% endgeneration %} around the assistant's text and end marker in "
    "the tokenizer's chat_template"
)

_Ids = npt.NDArray[np.int64]
_Weights = npt.NDArray[np.float32]
_Messages = list[dict[str, Any]]
_Span = tuple[int, int, float]
"""Characters [start, end) of a rendered text, and their weight in the loss."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template in Jinja, and in words where it is from."""

    source: str
    origin: str

    @cached_property
    def is_marked(self) -> bool:
        """Whether `{% generation %}` shows where the assistant speaks."""
        return _GENERATION.search(_COMMENT.sub("", self.source)) is not None

    @cached_property
    def has_thinking_parts(self) -> bool:
        """Whether it may want reasoning as a part of a content, as Mistral's do."""
        return re.search(r"== ['\"]thinking['\"]", self.source) is not None

    @cached_property
    def words(self) -> frozenset[str]:
        """The names it may read."""
        return frozenset(re.findall(r"\w+", self.source))

    @cached_property
    def tags(self) -> re.Pattern[str]:
        """Finds the tags that it mentions: it may split a message's text there."""
        found = re.findall(r"<[^<>\s]{1,40}>|\[/?[A-Z_ ]{2,}\]|◁[^◁▷]{1,40}▷", self.source)
        return re.compile("|".join(sorted(map(re.escape, set(found)))) or "(?!)")


class ChatRenderer:
    """Turns records into ids and weights of equal length.

    With marks, learnt is what they enclose, as transformers' `return_assistant_tokens_mask` has it:
    every token that overlaps a marked span. Without, an assistant's turn from the end of its header
    to the token that ends it, and nothing of a turn without text. The text is tokenized once,
    without added special tokens; a tokenizer without offsets (a slow one, or Megatron's own)
    tokenizes it piece by piece, cut at the edges of the spans, so its ids may differ from those of
    the whole text near them.

    Templates insert a message's text as it is: the string `<|im_end|>` in it becomes that token.
    Tools, tool calls and the role `developer` are put where a template that does not know them
    still prints them. `strftime_now` always answers 26 July 2024. Plain text is tokenized as the
    tokenizer does by itself, and all of it carries loss.

    Args:
        tokenizer: of transformers, or any of Megatron's.
        template_arguments: further variables of the chat template, such as `enable_thinking`.

    Raises:
        ValueError: the tokenizer is of neither kind, or has a chat format of its own.
    """

    def __init__(
        self, tokenizer: object, *, template_arguments: Mapping[str, object] | None = None
    ) -> None:
        self.tokenizer = TextTokenizer(tokenizer)
        longest_first = sorted(map(re.escape, self.tokenizer.special), key=len, reverse=True)
        self._control = re.compile("|".join([*longest_first, r"<[^<>\s]{1,40}>", r"\[/?[A-Z_]+\]"]))
        self._arguments = dict(template_arguments or {})
        self._templates: dict[bool, ChatTemplate] = {}
        self._frames: dict[tuple[str, str], _Frame] = {}
        self._left_out: Counter[str] = Counter()

    def render(self, record: ChatRecord) -> tuple[_Ids, _Weights]:
        """Ids (int64 [L]) and the weight of each in the loss (float32 [L]) of a record.

        Raises:
            ChatFormatError: the template does not show for certain where the assistant speaks.
            ValueError: nor does it in this record, or it refuses the record, or that is too long.
        """
        text, spans = (record.text, []) if isinstance(record, PlainText) else self._spans(record)
        if len(text) > MAX_TEXT_CHARS:
            raise ValueError(
                f"the text has {len(text)} characters; up to {MAX_TEXT_CHARS} are tokenized: split "
                "the record"
            )
        if isinstance(record, PlainText):
            ids = np.asarray(self.tokenizer.encode_document(text), dtype=np.int64)
            return ids, np.full(ids.size, record.weight, dtype=np.float32)
        ids, weights = self._encode(text, spans)
        if not weights.any():
            is_marked = self.template(has_tools=bool(record.tools)).is_marked
            raise (ChatFormatError if is_marked else ValueError)(
                f"no token of the rendered conversation carries loss; {_MARK_IT}"
            )
        return ids, weights

    def template(self, *, has_tools: bool = False) -> ChatTemplate:
        """Return the template of conversations with tools or without."""
        if has_tools not in self._templates:
            template = _choose(self.tokenizer.chat_template, has_tools=has_tools)
            try:
                _check_arguments(self._arguments, template, "the template arguments")
            except ValueError as error:
                raise ChatFormatError(str(error)) from None
            self._templates[has_tools] = template
        return self._templates[has_tools]

    def digest(self) -> str:
        """Digest of the templates that are used, with tools and without, and their arguments."""
        sources: list[str] = []
        with contextlib.suppress(ValueError):  # data without chats needs none
            sources = [self.template(has_tools=has_tools).source for has_tools in (False, True)]
        used = json.dumps([*sources, self._arguments], default=str)
        return hashlib.sha256(used.encode()).hexdigest()

    def _spans(self, conversation: Conversation) -> tuple[str, Sequence[_Span]]:
        """Return the rendered text and what of it carries loss."""
        template = self.template(has_tools=bool(conversation.tools))
        own = conversation.template_arguments
        _check_arguments(own, template, "the record's chat_template_kwargs")
        messages, tools = _for_template(conversation, template)
        arguments = {**self.tokenizer.variables, **self._arguments, **own, "tools": tools}
        # Where tools were put into a message before the first, it has no weight.
        added = len(messages) - len(conversation.messages)
        weights = [0.0] * added + list(conversation.weights)
        rendering, lost = _rendered(template, arguments, messages)
        for what in lost:
            self._warn(f"the chat template leaves out {what}: the model is trained without it")
        if not template.is_marked:
            frame = self._frame(template, arguments)
            asks_tool = "tool_calls" in conversation.messages[-1]
            return _found_turns(rendering, weights, frame, asks_tool=asks_tool)
        marks = rendering.marks
        speaking = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len({weights[i] for i in speaking}) == 1:
            return rendering.text, [(*mark, weights[speaking[0]]) for mark in marks]
        owners = _owners(rendering, speaking)
        return rendering.text, [(*m, weights[i]) for m, i in zip(marks, owners, strict=True)]

    def _frame(self, template: ChatTemplate, arguments: Mapping[str, Any]) -> _Frame:
        arguments = {**arguments, "tools": [_ANY_TOOL] if arguments["tools"] else None}
        key = template.source, json.dumps(arguments, default=str)
        if key not in self._frames:
            try:
                self._frames[key] = _probe(template, arguments, self._control)
            except ValueError as error:
                raise ChatFormatError(
                    f"where the assistant speaks was not found in two plain turns: {error}"
                ) from error
            if not self._frames[key].end and not self._frames[key].last_end:
                self._warn(
                    "no token was found by which the chat template ends a turn of the assistant, "
                    "so the model does not learn to stop; put one into the template"
                )
        return self._frames[key]

    def _encode(self, text: str, spans: Sequence[_Span]) -> tuple[_Ids, _Weights]:
        spans = [span for span in spans if span[1] > span[0]]
        ids, offsets = self.tokenizer.encode(text)
        if offsets is None:  # tokenize the pieces between the edges of the spans one by one
            edges = sorted({0, len(text), *(edge for span in spans for edge in span[:2])})
            pieces = [(self.tokenizer.encode(text[a:b])[0], (a, b)) for a, b in pairwise(edges)]
            ids = [one for own, _ in pieces for one in own]
            offsets = [place for own, place in pieces for _ in own]
        weights = np.zeros(len(ids), dtype=np.float32)
        flat = chain.from_iterable(offsets)
        starts, ends = np.fromiter(flat, np.int64, 2 * len(ids)).reshape(-1, 2).T
        for start, end, weight in reversed(spans):  # a token that overlaps two is the first one's
            weights[(starts < end) & (ends > start)] = weight
        return np.fromiter(ids, np.int64, len(ids)), weights

    def _warn(self, text: str) -> None:
        """Warn of what may come often: at its 1st, 10th, 100th time, with the count."""
        self._left_out[text] += 1
        if str(self._left_out[text]).strip("0") == "1":
            warnings.warn(f"{text} (seen {self._left_out[text]} times)", stacklevel=2)


def _check_arguments(given: Mapping[str, Any], template: ChatTemplate, whose: str) -> None:
    for name in given:
        if name in _RESERVED or name not in template.words:
            raise ValueError(
                f"{whose} give the chat template {name!r}, which "
                + ("the conversation itself gives" if name in _RESERVED else "it does not read")
                + ": correct the name, or drop it"
            )


def _choose(given: str | Mapping[str, str] | None, *, has_tools: bool) -> ChatTemplate:
    if isinstance(given, Mapping):
        names = ["tool_use"] * has_tools + ["default"]
        given = next((given[name] for name in names if name in given), None)
        if given is None:
            raise ChatFormatError("the tokenizer has chat templates and none is named default")
    if not given:
        return ChatTemplate(CHATML_TEMPLATE, "ChatML: the tokenizer has no chat template")
    own = ChatTemplate(str(given), "the tokenizer's own, whose author marked what is learnt")
    if own.is_marked:
        return own
    for name, source, training in _trained_by_trl():
        if source.strip() == own.source.strip():
            return ChatTemplate(training, f"TRL's training version of {name}")
    return ChatTemplate(
        own.source, "the tokenizer's own; what is learnt was found in the rendered text"
    )


@lru_cache(maxsize=1)
def _trained_by_trl() -> tuple[tuple[str, str, str], ...]:
    """Return (name, vendor's template, its training version) of each that TRL has.

    Read from its files (trl/chat_templates of 1.16): importing TRL imports torch and pandas too.

    Raises:
        ChatFormatError: TRL is there and its templates are not.
    """
    found = importlib.util.find_spec("trl")
    if found is None or not found.submodule_search_locations:
        return ()
    folder = Path(found.submodule_search_locations[0]) / "chat_templates"
    trained = {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}
    names = [name for name in trained if f"{name}_training" in trained]
    if not names:
        raise ChatFormatError(
            f"the installed TRL has no training templates in {folder}: install trl>=1.16,<2"
        )
    return tuple((name, trained[name], trained[f"{name}_training"]) for name in names)


# --- rendering ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rendering:
    """A conversation as a template prints it, with these variables.

    Attributes:
        marks: characters [start, end) of the text that the template marks.
    """

    template: ChatTemplate
    arguments: Mapping[str, Any]
    messages: _Messages
    text: str
    marks: list[tuple[int, int]]

    def of(self, messages: _Messages, *, prompt: bool = False) -> _Rendering:
        """Render other messages so, without the template's marks."""
        return _render(self.template, self.arguments, messages, prompt=prompt, marks=False)

    @cached_property
    def with_marks(self) -> _Marked:
        """Where its messages are; see `_render_marked`."""
        return _render_marked(self)


def _render(
    template: ChatTemplate,
    arguments: Mapping[str, Any],
    messages: _Messages,
    *,
    prompt: bool = False,
    marks: bool = True,
) -> _Rendering:
    """Render messages in the form that they have, and note what a template marks.

    Raises:
        ValueError: the template refuses them.
    """
    from jinja2 import TemplateSyntaxError
    from jinja2.exceptions import SecurityError
    from transformers.utils import chat_template_utils

    given = {"tools": None, "documents": None, "strftime_now": _TEMPLATE_DATE.strftime, **arguments}
    given |= {"messages": messages, "add_generation_prompt": prompt}
    hopeless = (SecurityError, TemplateSyntaxError, MemoryError, OverflowError, RecursionError)
    spans: list[tuple[int, int]] = []
    try:
        # Not `render_jinja_template`, which turns functions among the variables into text (5.24).
        compiled = chat_template_utils._compile_jinja_template(template.source)
        if marks and template.is_marked:
            text, spans = chat_template_utils._render_with_assistant_indices(compiled, **given)
        else:
            text = compiled.render(given)
    except hopeless as error:
        raise ChatFormatError(
            f"the chat template cannot be used ({str(error) or type(error).__name__}); take the "
            "one that belongs to the model"
        ) from error
    except Exception as error:  # whatever a template meets
        roles = ", ".join(str(message["role"]) for message in messages[:8])
        raise ValueError(
            f"the chat template cannot render this conversation ({error}); its roles are {roles}: "
            "mend the record, or the tokenizer's chat_template"
        ) from error
    return _Rendering(template, arguments, messages, text, spans)


def _rendered(
    template: ChatTemplate, arguments: Mapping[str, Any], messages: _Messages
) -> tuple[_Rendering, list[str]]:
    """Render in the form that the template takes: the first in which nothing is left out.

    Templates differ in what they want of tool calls (arguments as an object or its text, content
    missing, empty or null) and of content (text or parts); transformers' own form comes first.
    Returned is also what the template leaves out by itself.

    Raises:
        ValueError: the template refuses all, or leaves out what must not be.
    """
    found: list[tuple[list[tuple[str, bool]], _Rendering]] = []
    refusals: list[ValueError] = []
    for form in _forms(messages, template):
        try:
            rendering = _render(template, arguments, form)
        except ChatFormatError:
            raise
        except ValueError as error:
            refusals.append(error)
            continue
        if found and "[{'type': 't" in rendering.text:
            continue  # it prints Python's own form of what it does not know
        found.append((_left_out(rendering), rendering))
        if not found[-1][0]:
            break
    if not found:
        raise refusals[0]
    lost, rendering = min(found, key=lambda one: len(one[0]))
    if errors := [what for what, matters in lost if matters]:
        raise ValueError(
            f"the chat template does not print {errors[0]}: use a model whose template does, or "
            "leave the record out"
        )
    return rendering, [what for what, _ in lost]


def _forms(messages: _Messages, template: ChatTemplate) -> Iterator[_Messages]:
    options: list[dict[str, Any]] = [{}]
    if any("tool_calls" in message for message in messages):
        pairs = product((..., "", None), (False, True))
        options = [{"nothing": nothing, "as_text": as_text} for nothing, as_text in pairs]
    options += [{"parts": ("text",)}]
    if template.has_thinking_parts:
        options += [{"parts": ("thinking", "text")}]
    return ([_form(message, **chosen) for message in messages] for chosen in options)


def _form(
    message: dict[str, Any],
    *,
    nothing: Any = ...,
    as_text: bool = False,
    parts: Sequence[str] = (),
) -> dict[str, Any]:
    """Return a message in another form: what stands for no content beside a call, and so on."""
    form, content = dict(message), message.get("content")
    if "tool_calls" in message:
        form["tool_calls"] = []
        for call in message["tool_calls"]:
            function = dict(call["function"])
            given = function["arguments"]
            if as_text and not isinstance(given, str):
                function["arguments"] = json.dumps(given, ensure_ascii=False)
            elif isinstance(given, str) and not as_text:
                with contextlib.suppress(ValueError):
                    parsed = strict_json(given.encode())
                    function["arguments"] = parsed if isinstance(parsed, dict) else given
            form["tool_calls"].append({**call, "function": function})
        if nothing is not ... and not content:
            form["content"] = nothing
    if parts and isinstance(content, str):
        texts = {"text": content, "thinking": message.get("thinking")}
        form["content"] = [{"type": k, k: texts[k]} for k in parts if texts[k] is not None]
        if "thinking" in parts:
            form = {key: value for key, value in form.items() if key not in REASONING_KEYS}
    return form


def _left_out(rendering: _Rendering) -> list[tuple[str, bool]]:
    """Return what the text does not hold, in words, and whether that is an error.

    So it is in the last answer, and where a template that tells roles apart does not know one.
    """
    words, messages, text = rendering.template.words, rendering.messages, rendering.text
    lost: list[tuple[str, bool]] = []
    ends: dict[int, int] = {}
    try:
        runs, missing, _ = rendering.with_marks
        ends = {run.message: run.end for run in runs}
    except ValueError:  # the text depends on what is said: it is searched for in it
        missing = {
            (number, part)
            for number, message in enumerate(messages)
            for part, key in ((_SAID, "content"), (_THOUGHT, "reasoning_content"))
            if isinstance(said := message.get(key), str) and not _is_in(text, said.strip())
        }
    at = 0
    for number, message in enumerate(messages):
        role, is_last = message["role"], number == len(messages) - 1
        if (number, _SAID) in missing:
            is_unknown = "assistant" in words and role not in words
            is_answer = is_last and role == "assistant" and "tool_calls" not in message
            lost.append((f"the content of a message of the role {role}", is_unknown or is_answer))
        if (number, _THOUGHT) in missing:
            is_dropped = not is_last and not words.isdisjoint(REASONING_KEYS)
            lost.append(("the reasoning of some turns", not is_dropped))
        for call in message.get("tool_calls", ()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            is_repr = isinstance(arguments, Mapping) and arguments and repr(arguments) in text
            is_text = isinstance(arguments, str) and arguments.startswith("{")
            is_twice = is_text and json.dumps(arguments) in text
            is_whole = all(_is_in(text, leaf) for leaf in _leaves(arguments))
            if name not in text[at:] or not is_whole or is_repr or is_twice:
                lost.append((f"the tool call {name}", True))
        if role != "system":  # some print it in the last turn
            at = max(at, ends.get(number, 0))
    names = [tool["function"]["name"] for tool in rendering.arguments.get("tools") or ()]
    return lost + [(f"the tool {name}", True) for name in names if name not in text]


def _is_in(text: str, said: str) -> bool:
    """Whether a text holds another, as it is or as it stands in JSON."""
    forms = (json.dumps(said, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True))
    return said in text or any(form in text for form in forms)


def _leaves(value: Any) -> Iterator[str]:
    """Return the texts in the arguments of a tool call that is an object."""
    if isinstance(value, (Mapping, list)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from [one.strip()] if isinstance(one, str) else _leaves(one)


def _for_template(
    conversation: Conversation, template: ChatTemplate
) -> tuple[_Messages, list[dict[str, Any]] | None]:
    """Put what a template would leave out where it prints it.

    Tools, where the template does not mention `tools`: JSON lines at the end of the system message,
    or in one put before the first turn. Tool calls, where it does not mention `tool_calls`: JSON
    lines at the end of the assistant's text. The role `developer`: `system`.
    """
    messages: _Messages = []
    for given in conversation.messages:
        message = dict(given)
        if message["role"] == "developer" and "developer" not in template.words:
            message["role"] = "system"
        if "tool_calls" in message and "tool_calls" not in template.words:
            calls = _form(message)["tool_calls"]
            lines = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
            message["content"] = "\n".join(filter(None, [message.get("content"), *lines]))
            del message["tool_calls"]
        messages.append(message)
    tools = list(conversation.tools)
    if not tools or "tools" in template.words:
        return messages, tools or None
    listed = "\n".join(["# Tools", *(json.dumps(tool, ensure_ascii=False) for tool in tools)])
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": listed}, *messages], None
    content = f"{messages[0]['content']}\n\n{listed}"
    return [{**messages[0], "content": content}, *messages[1:]], None


# --- who says what ------------------------------------------------------------------------------
# A conversation is rendered once more with each string between two characters of the private plane
# that hold the number of its message, and what it is of it.

_FIRST = 0xF0000
_MARK = re.compile("[\U000f0000-\U000ffffd]")
_SAID, _THOUGHT, _CALLED = range(3)
_MAX_MESSAGES = 0xFFFE // 6


class _Run(NamedTuple):
    """Characters [start, end) of a text from a message's first string to its last."""

    message: int
    start: int
    end: int


class _Marked(NamedTuple):
    """What the marks of a conversation show.

    Attributes:
        runs: in the order of the text.
        missing: messages, and parts of them, of which not all strings were printed.
        repeated: those of which some were printed more than once.
    """

    runs: list[_Run]
    missing: set[tuple[int, int]]
    repeated: set[tuple[int, int]]


class _Frame(NamedTuple):
    """What a template puts around what the assistant says.

    Attributes:
        prompt: what it puts before every answer, of all that it puts before one that it asks for;
            empty where it asks for none.
        end, last_end: what ends a turn in the middle and at the end of a conversation.
        control: finds control tokens.
    """

    prompt: str
    end: str
    last_end: str
    control: re.Pattern[str]


def _pair(number: int, part: int) -> tuple[str, str]:
    first = _FIRST + 6 * number + 2 * part
    return chr(first), chr(first + 1)


def _place(mark: str) -> tuple[int, int]:
    """Return message and part of a mark."""
    number, rest = divmod(ord(mark) - _FIRST, 6)
    return number, rest // 2


class _Marker:
    """Puts marks around the strings of messages, inside white space, which templates trim.

    Args:
        tags: where a template may split a text; each piece gets marks.
        outer: whether tags at a text's edges are between its marks.
        depth: 1 to mark what calls hold too, 2 for their ids.

    Attributes:
        put: marks, by message and part.
        kept: those of them that no template takes off with a tag.
    """

    def __init__(self, tags: re.Pattern[str], *, outer: bool, depth: int) -> None:
        self._tags, self._outer, self._depth = tags, outer, depth
        self.put: Counter[tuple[int, int]] = Counter()
        self.kept: Counter[tuple[int, int]] = Counter()

    def message(self, message: dict[str, Any], number: int) -> dict[str, Any]:
        """Return a message with marks."""
        marked = dict(message)
        if "content" in message:
            marked["content"] = self._mark(message["content"], number, _SAID)
        if thoughts := [key for key in REASONING_KEYS if key in message]:
            marked |= dict.fromkeys(thoughts, self._mark(message[thoughts[0]], number, _THOUGHT))
        if self._depth and "tool_calls" in message:
            marked["tool_calls"] = [self._call(call, number) for call in message["tool_calls"]]
        return marked

    def _call(self, call: dict[str, Any], number: int) -> dict[str, Any]:
        given = call["function"]
        function = {**given, "arguments": self._mark(given["arguments"], number, _CALLED)}
        if function == given:  # no text; not always, since templates repeat the name
            function["name"] = self._mark(given["name"], number, _CALLED)
        found = {**call, "function": function}
        if self._depth > 1 and "id" in call:
            found["id"] = self._mark(call["id"], number, _CALLED)
        return found

    def _mark(self, value: Any, number: int, part: int) -> Any:
        if isinstance(value, Mapping):
            parts = {"thinking": _THOUGHT} if part == _SAID else {}
            return {
                key: one if key == "type" else self._mark(one, number, parts.get(key, part))
                for key, one in value.items()
            }
        if isinstance(value, list):
            return [self._mark(one, number, part) for one in value]
        core = value.strip() if isinstance(value, str) else ""
        if not core:
            return value
        opening, closing = _pair(number, part)
        at, marked = 0, ""
        for start, end in [*(tag.span() for tag in self._tags.finditer(core)), (len(core),) * 2]:
            piece = core[at:start]
            if inner := piece.strip():
                piece = piece.replace(inner, f"{opening}{inner}{closing}", 1)
            marked, at = marked + piece + core[start:end], end
        self.kept[number, part] += max(marked.count(opening), self._outer)
        if self._outer:
            marked = opening * (marked[0] != opening) + marked + closing * (marked[-1] != closing)
        self.put[number, part] += marked.count(opening)
        return value.replace(core, marked, 1)


def _render_marked(plain: _Rendering) -> _Marked:
    """Render with marks such that without them the text is the same.

    Raises:
        ValueError: the text depends on what a message says.
    """
    messages, tags = plain.messages, plain.template.tags
    if len(messages) > _MAX_MESSAGES or _MARK.search(plain.text):
        raise ValueError(
            f"the conversation has {len(messages)} messages, or characters of the private plane "
            "U+F0000 to U+FFFFD, by which its turns are told apart: split or clean the record"
        )
    called = [call for message in messages for call in message.get("tool_calls", ())]
    deepest = 2 if any("id" in call for call in called) else 1 if called else 0
    for depth, outer in product(range(deepest, -1, -1), (True, False)):
        marker = _Marker(tags, outer=outer, depth=depth)
        marked = [marker.message(message, number) for number, message in enumerate(messages)]
        try:
            text = plain.of(marked).text
        except ValueError:
            continue
        if _MARK.sub("", text) != plain.text:
            continue
        names = [call["function"]["name"] for m in marked for call in m.get("tool_calls", ())]
        for name, count in Counter(names).items():
            # Gemma's and gpt-oss's print a call's name once more before what the tool answers.
            *own, again = text.split(name, count)
            text = name.join([*own, again.replace(name, _MARK.sub("", name))])
        printed = Counter(_place(mark) for mark in _MARK.findall(text) if ord(mark) % 2 == 0)
        missing = {place for place, count in marker.kept.items() if printed[place] < count}
        repeated = {place for place, count in marker.put.items() if printed[place] > count}
        return _Marked(_runs(text), missing, repeated)
    raise ValueError(
        "the chat template prints other things around a message depending on its text, so the "
        f"assistant's tokens cannot be found for certain; {_MARK_IT}"
    )


def _runs(marked: str) -> list[_Run]:
    """Return whose strings are where in the text without marks, in its order.

    Raises:
        ValueError: a text was cut where it was not known that it might be.
    """
    runs: list[_Run] = []
    is_open = False
    for before, mark in enumerate(_MARK.finditer(marked)):
        (number, _), place = _place(mark[0]), mark.start() - before
        is_closing = ord(mark[0]) % 2 == 1
        if runs and runs[-1].message == number:
            runs[-1] = _Run(number, runs[-1].start, place)
        elif is_closing or is_open:
            break
        else:
            runs.append(_Run(number, place, place))
        is_open = not is_closing
    else:
        if not is_open:
            return runs
    raise ValueError(f"the chat template prints a part of a message's text alone; {_MARK_IT}")


def _owners(rendering: _Rendering, assistants: Sequence[int]) -> Sequence[int]:
    """Return the message that each span of a marked template belongs to."""
    marks, runs = rendering.marks, rendering.with_marks.runs
    found = [{one.message for one in runs if one.start < b and one.end > a} for a, b in marks]
    owners = [next(iter(own), -1) for own in found]
    is_clear = all(len(own) <= 1 for own in found)
    if is_clear and len(owners) == len(assistants):
        pairs = zip(owners, assistants, strict=True)
        if all(own in (-1, one) for own, one in pairs):
            return assistants
    if not is_clear or not set(assistants) <= set(owners):
        raise (ValueError if is_clear else ChatFormatError)(
            f"the chat template marks {len(marks)} spans that are not of one message each, so "
            "messages of different weight cannot be told apart; mark each message once"
        )
    for at in range(len(owners)):  # one without strings, such as a last end-of-text token
        if owners[at] < 0:
            begins_next = at + 1 < len(owners) and marks[at][1] == marks[at + 1][0]
            owners[at] = owners[at + 1] if begins_next or at == 0 else owners[at - 1]
    return owners


def _alike(one: str, other: str) -> int:
    """Return how many characters two texts share at their start."""
    return len(commonprefix([one, other]))  # noqa: RUF071


def _probe(
    template: ChatTemplate, arguments: Mapping[str, Any], control: re.Pattern[str]
) -> _Frame:
    """Look at what a template puts around the turns of a plain conversation."""
    turns = [("user", "Ask 0"), ("assistant", "Say 1"), ("user", "Ask 2"), ("assistant", "Say 3")]
    whole, _ = _rendered(
        template, arguments, [{"role": who, "content": what} for who, what in turns]
    )
    text, runs = whole.text, {run.message: run for run in whole.with_marks.runs}
    if set(runs) != {0, 1, 2, 3}:
        raise ValueError("the chat template does not print every message of a conversation")
    asked, plain = (whole.of(whole.messages[:3], prompt=prompt).text for prompt in (True, False))
    heads = [text[runs[i - 1].end : runs[i].start] for i in (1, 3)]
    prompt = asked[len(plain) :] if asked.startswith(plain) else ""
    while prompt and not all(prompt in head for head in heads):
        prompt = prompt[:-1]
    if (cut := prompt.rfind("<")) > prompt.rfind(">"):
        prompt = prompt[:cut]  # it had ended inside a control token
    middle, last = text[runs[1].end : runs[2].start], text[runs[3].end :]
    first_head = text[: runs[0].start]  # of the user, behind what begins a conversation
    own = middle[: len(middle) - _alike(middle[::-1], first_head[::-1])]  # the turn's own end
    common = middle[: _alike(middle, last)]
    if found := control.search(common):
        end = common[: found.end()]
        while (longer := _stop(common, len(end), control)) != end and (
            len(longer) <= len(own) or common[len(longer) :].strip() == last[len(common) :] == ""
        ):
            end = longer
        return _Frame(prompt, end, end, control)
    if last.strip() and heads[1].rstrip().endswith(last.strip()):
        raise ValueError("the chat template asks for an answer at the end of every conversation")
    ends = [control.search(one) for one in (middle, last)]
    end, last_end = (one.string[: one.end()] if one else "" for one in ends)
    if last_end and not own and end not in heads[1]:
        end = ""  # it is the next turn's beginning, and where a turn ends only the last one shows
    return _Frame(prompt, end, last_end, control)


def _found_turns(
    rendering: _Rendering, weights: Sequence[float], frame: _Frame, *, asks_tool: bool
) -> tuple[str, list[_Span]]:
    """Return the text and the turns of the assistant in it, where the template marks none.

    Where models stop with the next role's token, that is put behind a last turn: a tool's where the
    turn `asks_tool`.

    Raises:
        ValueError: the edges of one are not certain.
    """
    text, messages = rendering.text, rendering.messages
    runs, _, repeated = rendering.with_marks
    places = Counter(run.message for run in runs)
    for number, message in enumerate(messages):
        if weights[number] and not places[number] and _says(message):
            raise ValueError(
                f"what message {number + 1} says was not found in the rendered text; {_MARK_IT}"
            )
    spans = []
    for at, (number, start, end) in enumerate(runs):
        if not weights[number]:
            continue
        if places[number] > 1 or any(number == one for one, _ in repeated):
            raise ValueError(
                f"the chat template prints message {number + 1} in several places, so what is to "
                "be learnt is not certain"
            )
        before, after = _sides(text, runs, at)
        place = before.rfind(frame.prompt) if frame.prompt else -1
        if place >= 0:
            start += place + len(frame.prompt) - len(before)
        elif {"tool_calls", "reasoning_content"} & messages[number].keys():
            # The header ends as far as that of a turn which only says something is the same.
            plain = [*messages[:number], {"role": "assistant", "content": "Say"}]
            start += _alike(before, _around(rendering, plain, number)[0]) - len(before)
        ending = _ending(rendering, number, after, frame, asks_tool=asks_tool)
        if not after.startswith(ending):
            text = text[:end] + ending
        spans.append((start, end + len(ending), weights[number]))
    order = [run.message for run in runs if messages[run.message]["role"] != "system"]
    if order != sorted(order):
        raise ValueError(
            "the chat template prints messages in another order than that of the record, so what "
            f"ends a turn is not certain; {_MARK_IT}"
        )
    return text, spans


def _says(message: Mapping[str, Any]) -> bool:
    return "tool_calls" in message or bool(str(message.get("content") or "").strip())


def _ending(
    rendering: _Rendering, number: int, after: str, frame: _Frame, *, asks_tool: bool
) -> str:
    """Return what of the text between a message's last string and the next one ends its turn."""
    messages, message = rendering.messages, rendering.messages[number]
    is_last, is_call = number == len(messages) - 1, "tool_calls" in message
    is_plain = not is_call and bool(message.get("content"))
    # The end is there, and behind it another message's text: so the first one is its own.
    is_clear = is_plain or (
        is_call and not is_last and frame.end in after and _says(messages[number + 1])
    )
    alone = after  # as if nothing came behind it
    if not (is_last or is_plain or (is_clear and frame.last_end)):
        alone = after[: _alike(after, _around(rendering, messages[: number + 1], number)[1])]
    if frame.last_end:
        end = frame.last_end if is_last else frame.end
        place = alone.find(end) if is_clear else alone.rfind(end)
        return alone[: place + len(end)] if place >= 0 else alone.rstrip() if is_call else ""
    # The model stops with the next role's token.
    if not is_last:
        return _stop(after, len(alone) if is_call else 0, frame.control)
    if asks_tool and frame.end:
        answer = {"role": "tool", "content": "Done", "name": "f", "tool_call_id": "call00001"}
        calls = messages[-1].get("tool_calls", [{}])
        answers = [answer | {"tool_call_id": call.get("id", "call00001")} for call in calls]
        followed = _around(rendering, [*messages, *answers], number)[1]
        own = followed[: _alike(followed, after)]
        if (ending := _stop(followed, len(own), frame.control)) != own:
            return ending
    return after.rstrip() + frame.end


def _sides(text: str, runs: Sequence[_Run], at: int) -> tuple[str, str]:
    """Return what is printed between a message's strings and those before and behind them."""
    end = runs[at + 1].start if at + 1 < len(runs) else len(text)
    return text[runs[at - 1].end if at else 0 : runs[at].start], text[runs[at].end : end]


def _around(rendering: _Rendering, messages: _Messages, number: int) -> tuple[str, str]:
    """Return the sides of a message in another conversation."""
    try:
        other = rendering.of(messages)
        runs = other.with_marks.runs
        at = [run.message for run in runs].index(number)
    except ValueError as error:
        raise ValueError(
            f"where message {number + 1} begins and ends in the rendered text is not certain "
            f"({error})"
        ) from error
    return _sides(other.text, runs, at)


def _stop(after: str, at: int, control: re.Pattern[str]) -> str:
    """Return a text as far as the control token that stands at a place, or as that place."""
    rest = after[at:].lstrip()
    found = control.match(rest)
    return after[: len(after) - len(rest) + found.end()] if found else after[:at]
