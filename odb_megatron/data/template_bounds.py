"""Chat templates, run within bounds: they come with a tokenizer and are not trusted.

Must not know conversations or tokens. What a template cannot reach is Jinja's sandbox's part (it
compiles in transformers' environment: no underscored attributes, nothing that changes an object,
`range` up to 100000); here lie the bounds on its size and on what it can build at once. Its time is
bounded by that of a sample in a worker (`fetch_limit`), and by nothing in the trainer's process.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

__all__ = [
    "MAX_RENDERED_CHARS",
    "MAX_TEMPLATE_CHARS",
    "ChatTemplateError",
    "compiled",
    "rendered",
]

MAX_TEMPLATE_CHARS = 1 << 18
"""Longest template that is compiled; published ones have up to 20 thousand characters."""

MAX_RENDERED_CHARS = 64 << 20
"""Longest text that a template may make of a conversation, or by one multiplication."""

_MAX_BITS = 1 << 12  # of a power's result
_WIDE = re.compile(r"%[^a-zA-Z%]*(?:\d{5}|\*)")  # a field of 10000 characters or of a given width
_WIDE_BRACES = re.compile(r":[^{}]*(?:\d{5}|\{)")
_PADDING = frozenset(("center", "expandtabs", "ljust", "rjust", "zfill"))


class ChatTemplateError(ValueError):
    """The chat template cannot be used, or does not show where the assistant's tokens are.

    No fault of the record, so the policy for bad records does not cover it.
    """


@lru_cache(maxsize=16)
def compiled(source: str) -> Any:
    """Return the template, compiled once per process.

    Raises:
        ChatTemplateError: it is too long, or no Jinja template.
    """
    # transformers' environment (extensions, filters), as Megatron's own tokenizers use it too
    # (chat_template.py, megatron-core 0.19.2).
    from transformers.utils.chat_template_utils import _compile_jinja_template

    if len(source) > MAX_TEMPLATE_CHARS:
        raise ChatTemplateError(
            f"the chat template has {len(source)} characters; up to {MAX_TEMPLATE_CHARS} are "
            "taken: use the template that belongs to the model"
        )
    environment = _compile_jinja_template("").environment.overlay()
    for extension in environment.extensions.values():  # the overlay's own, which see its templates
        if hasattr(extension, "activate_tracker"):  # transformers 5.20 has that of the original
            environment.activate_tracker = extension.activate_tracker
    _bound(environment)
    try:
        return environment.from_string(source)
    except Exception as error:  # jinja2's own, and what Python says of the code that it makes
        reason = str(error) or type(error).__name__
        raise ChatTemplateError(
            f"the chat template is no Jinja template ({reason}); mend the tokenizer's chat_template"
        ) from error


def rendered(blocks: Iterator[str], into: list[str]) -> None:
    """Collect what a template makes, piece by piece, up to `MAX_RENDERED_CHARS`.

    Raises:
        ChatTemplateError: it makes more.
    """
    num_chars = 0
    for block in blocks:
        num_chars += len(block)
        if num_chars > MAX_RENDERED_CHARS:
            raise ChatTemplateError(_too_much("a text"))
        into.append(block)


def _bound(environment: Any) -> None:
    """Bound what operators, filters and methods of strings build at once."""
    environment.intercepted_binops = frozenset(("*", "**", "%"))
    table, filters = environment.binop_table, environment.filters
    environment.binop_table = {
        **table,
        "*": _bounded_product(table["*"]),
        "**": _bounded_power(table["**"]),
        "%": _bounded_format(table["%"]),
    }
    environment.filters = {
        **filters,
        "format": _bounded_format(filters["format"]),
        **{name: _bounded_width(filters[name]) for name in ("center", "indent", "batch", "slice")},
    }
    is_safe, wrap = environment.is_safe_attribute, environment.wrap_str_format

    def is_safe_attribute(obj: Any, attr: str, value: Any) -> bool:
        return attr not in _PADDING and bool(is_safe(obj, attr, value))

    def wrap_str_format(value: Any) -> Any:
        inner = wrap(value)
        if inner is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            if _WIDE_BRACES.search(value.__self__):
                raise ChatTemplateError(_too_much("a padded text"))
            return str(inner(*args, **kwargs))

        return bounded

    environment.is_safe_attribute = is_safe_attribute
    environment.wrap_str_format = wrap_str_format


def _bounded_product(multiply: Callable[..., Any]) -> Callable[..., Any]:
    def product(left: Any, right: Any) -> Any:
        for one, other in ((left, right), (right, left)):
            if isinstance(one, (str, list, tuple)) and isinstance(other, int):
                if len(one) * other > MAX_RENDERED_CHARS:
                    raise ChatTemplateError(_too_much("a text"))
            elif isinstance(one, int) and one.bit_length() > _MAX_BITS:
                raise ChatTemplateError(_too_much("a number"))
        return multiply(left, right)

    return product


def _bounded_power(power: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(left: Any, right: Any) -> Any:
        if (
            isinstance(left, int)
            and isinstance(right, int)
            and left.bit_length() * max(right, 0) > _MAX_BITS
        ):
            raise ChatTemplateError(_too_much("a number"))
        return power(left, right)

    return bounded


def _bounded_format(fill: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, str) and _WIDE.search(value):
            raise ChatTemplateError(_too_much("a padded text"))
        return fill(value, *args, **kwargs)

    return bounded


def _bounded_width(pad: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(pad)  # with what tells Jinja to pass it a context
    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, int) and arg > 10_000 for arg in (*args, *kwargs.values())):
            raise ChatTemplateError(_too_much("a padded text"))
        return pad(value, *args, **kwargs)

    return bounded


def _too_much(what: str) -> str:
    return (
        f"the chat template builds {what} without bounds ({MAX_RENDERED_CHARS} characters and "
        f"{_MAX_BITS} bits are allowed); use the template that belongs to the model"
    )
