"""Chat records as token ids with a loss mask, through the tokenizer's own chat template.

Must not look for turns in the rendered text: where the loss lies comes from the structure of the
conversation, so text that imitates a turn cannot move it. No clock, no global state.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from odb_megatron.data.chat_messages import template_messages
from odb_megatron.data.chat_record import ChatRecord, Conversation, PlainText
from odb_megatron.data.template_bounds import (
    ChatTemplateError,
    compiled,
    rendered,
)

__all__ = [
    "CHATML_TEMPLATE",
    "MAX_TEXT_CHARS",
    "ChatRenderer",
    "ChatTemplateError",
    "TextTokenizer",
]

CHATML_TEMPLATE = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{% else %}
{{ message['content'] + '<|im_end|>' }}
{%- endif %}
{{ '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""Used where a tokenizer has no chat template; also what `train_bpe` writes."""

# Llama's templates print today's date, so that lengths would depend on the day of the run; this is
# the date they fall back to where no clock is offered.
_TEMPLATE_DATE = datetime(2024, 7, 26)
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_MAX_PREFIX_TURNS = 2_000_000  # messages rendered, over all prefixes of a conversation
_MAX_MARKED_CHARS = 1 << 32  # looked at, over all marks
_HEADER_CHARS = 20
_ADD_MARKERS = (
    "put {% generation %} and {% endgeneration %} around the assistant's text and end marker in "
    "the tokenizer's chat_template"
)

MAX_TEXT_CHARS = 8 << 20
"""Longest text that is tokenized: a fast tokenizer takes some 240 bytes per token meanwhile."""

_Span = tuple[int, int]
_Ids = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]


@runtime_checkable
class TextTokenizer(Protocol):
    """A tokenizer known only by its text-to-ids function (see `tokenizer.py`)."""

    @property
    def eos_id(self) -> int | None:
        """Id put after plain text, if there is one."""

    @property
    def chat_template(self) -> str | None:
        """Jinja chat template, or None for ChatML."""

    def encode(self, text: str) -> Sequence[int]:
        """Ids of a text."""


class ChatRenderer:
    """Turns records into ids and a loss mask of equal length.

    Loss lies on the assistant's text and its end-of-turn marker, not on the header before them or
    the line break after. Where the chat template holds `{% generation %}`, its marks are taken as
    they are. Otherwise an assistant's span runs from the end of the messages before it, rendered
    with `add_generation_prompt`, to the end of the messages up to it; both must be prefixes of the
    whole text. The whole text is tokenized once, without added special tokens; a token carries
    loss if it starts inside a span. A tokenizer without offsets (a slow one, or a
    `TextTokenizer`) tokenizes the text piece by piece, cut at the edges of the spans, so its ids
    may differ from those of the whole text near the edges.

    HF templates insert a message's text as it is: the string `<|im_end|>` in it becomes that
    token. It can so imitate a turn for the model, as at inference, but not for the loss mask.

    Tools, tool calls and the role `developer` are put where a template that does not mention them
    still prints them (see `template_messages`). `strftime_now` always answers 26 July 2024.

    Plain text is tokenized as the tokenizer does by itself (a BOS only if its post-processor adds
    one), EOS is appended if there is one and the text does not end with it, and all carries loss.

    Safe to share between threads and across forks: it holds a copy of a fast tokenizer's backend,
    so truncation or padding set on the original later has no effect.

    Args:
        tokenizer: a HF tokenizer or a `TextTokenizer`.
        template_arguments: further variables of the chat template, such as `enable_thinking`.
        add_special_tokens: whether plain text gets the post-processor's tokens.

    Raises:
        ValueError: the tokenizer is of neither kind, or has a chat format of its own.
    """

    def __init__(
        self,
        tokenizer: object,
        *,
        template_arguments: Mapping[str, object] | None = None,
        add_special_tokens: bool = True,
    ) -> None:
        self._arguments = (tokenizer, dict(template_arguments or {}), add_special_tokens)
        self._tokenizer = cast(Any, tokenizer)
        self._add_special_tokens = add_special_tokens
        self._is_hf = hasattr(tokenizer, "special_tokens_map")
        self._backend: Any = None
        variables: Mapping[str, object] = {}
        if self._is_hf:
            _check_own_format(tokenizer)
            variables = self._tokenizer.special_tokens_map
            if getattr(tokenizer, "is_fast", False):
                self._backend = _own_backend(self._tokenizer)
            named = {*self._tokenizer.get_added_vocab(), *self._tokenizer.all_special_tokens}
            self._control_tokens: tuple[str, ...] = tuple(sorted(named))
            self._eos_id: int | None = self._tokenizer.eos_token_id
        elif isinstance(tokenizer, TextTokenizer):
            self._control_tokens, self._eos_id = (), tokenizer.eos_id
        else:
            raise ValueError(
                f"cannot tokenize with a {type(tokenizer).__name__}; expected a HF tokenizer or a "
                "TextTokenizer: pass Megatron's tokenizer through usable_tokenizer()"
            )
        self._variables = {
            **variables,
            "strftime_now": _TEMPLATE_DATE.strftime,
            **(template_arguments or {}),
        }

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild from the tokenizer: its backend is copied once, not twice."""
        return _renderer, self._arguments

    def render(self, record: ChatRecord) -> tuple[_Ids, _Mask]:
        """Ids (int64 [L]) and loss mask (bool [L]) of a record.

        Raises:
            ChatTemplateError: the template does not show where the assistant's tokens are, or goes
                beyond its bounds.
            ValueError: the template refuses the record, or it has too many turns.
        """
        if isinstance(record, PlainText):
            _check_text(record.text)
            ids = np.asarray(self._plain_ids(record.text), dtype=np.int64)
            return ids, np.ones(ids.size, dtype=np.bool_)
        text, spans = self._spans(record)
        _check_text(text)
        ids, loss = self._encode(text, spans)
        if not loss.any():
            raise ChatTemplateError(
                "no token of the rendered conversation carries loss; check that the chat template "
                f"prints the assistant's text, and {_ADD_MARKERS}"
            )
        return ids, loss

    def token_id(self, token: str) -> int:
        """Return the id of a text that is one token.

        Raises:
            ValueError: it is several.
        """
        ids = list(self._encode(token, ())[0])
        if len(ids) != 1:
            raise ValueError(
                f"the tokenizer has no token {token!r} (it makes {len(ids)} of the text): use the "
                "tokenizer that belongs to the model, or add the token to it"
            )
        return int(ids[0])

    def _plain_ids(self, text: str) -> list[int]:
        if self._backend is not None:
            ids = list(self._backend.encode(text, add_special_tokens=self._add_special_tokens).ids)
        elif self._is_hf:
            ids = self._tokenizer.encode(text, add_special_tokens=self._add_special_tokens)
        else:
            ids = list(self._tokenizer.encode(text))
        if self._eos_id is not None and ids[-1:] != [self._eos_id]:
            ids.append(self._eos_id)
        return ids

    def _spans(self, conversation: Conversation) -> tuple[str, list[_Span]]:
        """Rendered text and the character spans that carry loss."""
        source = self._template_source(has_tools=bool(conversation.tools))
        messages, tools = template_messages(conversation, source)
        template = _Template(source=source, variables={**self._variables, "tools": tools})
        learn = [m.learn for m in conversation.messages if m.role == "assistant"]
        _check_turns(conversation, is_marked=bool(_GENERATION.search(source)))
        if not _GENERATION.search(source):
            return _prefix_spans(template, messages, conversation, self._control_tokens)
        text, spans = template.render_marked(messages)
        if all(learn):
            return text, spans
        if len(spans) != len(learn):
            raise ChatTemplateError(
                f"the chat template marks {len(spans)} spans for {len(learn)} assistant messages, "
                "so those of weight 0 cannot be told apart; mark each message once"
            )
        return text, [span for span, wanted in zip(spans, learn, strict=True) if wanted]

    def _template_source(self, *, has_tools: bool) -> str:
        if not self._tokenizer.chat_template:
            return CHATML_TEMPLATE
        if self._is_hf:
            return str(self._tokenizer.get_chat_template(None, [{}] if has_tools else None))
        return str(self._tokenizer.chat_template)

    def _encode(self, text: str, spans: Sequence[_Span]) -> tuple[_Ids, _Mask]:
        if self._backend is None:
            return _encode_pieces(self._encode_piece, text, spans)
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids = np.asarray(encoding.ids, dtype=np.int64)
        offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        starts = np.maximum.accumulate(offsets[:, 0])
        loss = np.zeros(ids.size, dtype=np.bool_)
        for span in spans:
            first, last = (self._first_token(edge, text, ids, starts, offsets) for edge in span)
            loss[first:last] = True
        return ids, loss

    def _first_token(self, edge: int, text: str, ids: _Ids, starts: _Ids, offsets: _Ids) -> int:
        """Index of the first token that starts at character `edge` or later.

        ByteLevel's `trim_offsets` (Llama 3, RoBERTa) leaves a token's spaces out of its offsets:
        count them back in, so that a token which begins in the header stays there.
        """
        k = int(np.searchsorted(starts, edge))
        if k == starts.size:
            return k
        token = str(self._backend.id_to_token(int(ids[k])))
        num_spaces = len(token) - len(token.lstrip("\u0120"))
        start, lowest = int(starts[k]), int(offsets[k - 1, 1]) if k else 0
        while num_spaces and start > lowest and text[start - 1] == " ":
            start, num_spaces = start - 1, num_spaces - 1
        return k + 1 if start < edge else k

    def _encode_piece(self, text: str) -> Sequence[int]:
        if self._is_hf:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
            return ids
        return list(self._tokenizer.encode(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Template:
    """A chat template with its variables."""

    source: str
    variables: Mapping[str, object]

    def render(self, messages: list[dict[str, object]], *, prompt: bool = False) -> str:
        text, _ = self._run(messages, prompt=prompt)
        return text

    def render_marked(self, messages: list[dict[str, object]]) -> tuple[str, list[_Span]]:
        return self._run(messages, marked=True)

    def _run(
        self, messages: list[dict[str, object]], *, prompt: bool = False, marked: bool = False
    ) -> tuple[str, list[_Span]]:
        # Rendered here and not by apply_chat_template, which hides the spans and marks a token that
        # only ends in one.
        from jinja2 import TemplateError
        from jinja2.exceptions import SecurityError

        variables = {
            "documents": None,
            **self.variables,
            "messages": messages,
            "add_generation_prompt": prompt,
        }
        blocks: list[str] = []
        spans: list[_Span] = []
        template = compiled(self.source)
        try:
            if not marked:
                rendered(template.generate(**variables), blocks)
            else:
                with template.environment.activate_tracker(blocks, spans):
                    rendered(template.generate(**variables), blocks)  # it reads `blocks` meanwhile
        except (SecurityError, OverflowError, MemoryError, RecursionError) as error:
            reason = str(error) or type(error).__name__
            raise ChatTemplateError(
                f"the chat template does what it must not ({reason}); use the template that "
                "belongs to the model"
            ) from error
        except (TemplateError, TypeError) as error:
            raise ValueError(
                f"the chat template cannot render this conversation ({error}); its roles are "
                f"{', '.join(str(m['role']) for m in messages[:8]) or 'none'}: mend the record, or "
                "the tokenizer's chat_template"
            ) from error
        return "".join(blocks), spans


def _renderer(
    tokenizer: object, template_arguments: Mapping[str, object], add_special_tokens: bool
) -> ChatRenderer:
    return ChatRenderer(
        tokenizer, template_arguments=template_arguments, add_special_tokens=add_special_tokens
    )


def _check_text(text: str) -> None:
    if len(text) > MAX_TEXT_CHARS:
        raise ValueError(
            f"the text has {len(text)} characters; up to {MAX_TEXT_CHARS} are tokenized: split the "
            "record"
        )


def _check_turns(conversation: Conversation, *, is_marked: bool) -> None:
    """Refuse a conversation that would take minutes: the work grows with the square of its turns.

    With marks, transformers' tracker looks at all the text before each mark; without, a prefix is
    rendered twice per assistant turn.
    """
    messages = conversation.messages
    places = [at for at, m in enumerate(messages) if m.role == "assistant" and m.learn]
    if is_marked:
        num_chars = sum(len(m.content) + _HEADER_CHARS for m in messages)
        is_too_much = num_chars * len(places) > _MAX_MARKED_CHARS
    else:
        is_too_much = 2 * sum(places) > _MAX_PREFIX_TURNS
    if is_too_much:
        raise ValueError(
            f"the conversation has {len(messages)} messages, {len(places)} of the assistant to "
            "learn; finding its text among so many would take minutes: split the record"
            + ("" if is_marked else f", or {_ADD_MARKERS}")
        )


def _check_own_format(tokenizer: object) -> None:
    from transformers import PreTrainedTokenizerBase

    own = getattr(type(tokenizer), "apply_chat_template", None)
    if own not in (None, PreTrainedTokenizerBase.apply_chat_template):
        raise ValueError(
            f"{type(tokenizer).__name__} formats chats by its own code, which does not tell where "
            "the assistant's text is; use the model's tokenizer.json with a Jinja chat_template"
        )


def _own_backend(tokenizer: Any) -> Any:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))
    return backend


def _prefix_spans(
    template: _Template,
    messages: list[dict[str, object]],
    conversation: Conversation,
    control_tokens: Iterable[str],
) -> tuple[str, list[_Span]]:
    """Spans from prefixes of the conversation; `messages` may have a leading system turn more."""
    shift = len(messages) - len(conversation.messages)
    text = template.render(messages)
    spans = []
    for i, message in enumerate(conversation.messages):
        if message.role != "assistant" or not message.learn:
            continue
        head = template.render(messages[: i + shift], prompt=True)
        whole = template.render(messages[: i + shift + 1])
        if not (text.startswith(whole) and whole.startswith(head)):
            raise ChatTemplateError(
                f"the chat template does not render messages[:{i + 1}] as the start of the whole "
                f"conversation ({_difference(text, whole if whole.startswith(head) else head)}), "
                f"so the assistant's tokens cannot be found; {_ADD_MARKERS}"
            )
        spans.append((len(head), _without_break(whole, len(head), control_tokens)))
    return text, spans


def _without_break(text: str, start: int, control_tokens: Iterable[str]) -> int:
    """End of the text, without the white space that follows an end-of-turn marker."""
    stripped = text[start:].rstrip()
    return start + len(stripped) if stripped.endswith(tuple(control_tokens)) else len(text)


def _difference(text: str, prefix: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(text, prefix, strict=False)) if a != b), len(text))
    return f"{prefix[at : at + 20]!r} against {text[at : at + 20]!r} at character {at}"


def _encode_pieces(encode: Any, text: str, spans: Sequence[_Span]) -> tuple[_Ids, _Mask]:
    """Tokenize the pieces between the edges of the spans one by one."""
    edges = sorted({0, len(text), *(edge for span in spans for edge in span)})
    ids: list[int] = []
    loss: list[bool] = []
    for start, end in pairwise(edges):
        piece = encode(text[start:end])
        ids += piece
        loss += [any(a <= start < b for a, b in spans)] * len(piece)
    return np.asarray(ids, dtype=np.int64), np.asarray(loss, dtype=np.bool_)
