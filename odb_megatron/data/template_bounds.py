"""Chat templates, run within bounds: they come with a tokenizer and are not trusted.

Must not know conversations or tokens. What a template cannot reach is Jinja's sandbox's part (it
compiles in transformers' environment: no underscored attributes, nothing that changes an object,
`range` up to 100000); here lie the bounds on its size, its time and what it can build at once. A
text that is doubled again and again by `~` or by blocks is bounded by the time alone.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

__all__ = [
    "MAX_RENDERED_CHARS",
    "MAX_RENDER_S",
    "MAX_TEMPLATE_CHARS",
    "ChatTemplateError",
    "compiled",
    "limited_time",
    "rendered",
]

MAX_TEMPLATE_CHARS = 1 << 18
"""Longest template that is compiled; published ones have up to 20 thousand characters."""

MAX_RENDERED_CHARS = 64 << 20
"""Longest text that a template may make of a conversation, or by one multiplication."""

MAX_RENDER_S = 60.0
"""Time that rendering one conversation may take."""

_MOST_BITS = 1 << 12  # of a power's result
_TICK_S = 0.5
_WIDE = re.compile(r"%[^a-zA-Z%]*(?:\d{5}|\*)")  # a field of 10000 characters or of a given width
_WIDE_BRACES = re.compile(r":[^{}]*(?:\d{5}|\{)")
_PADDING = frozenset(("center", "expandtabs", "ljust", "rjust", "zfill"))


class ChatTemplateError(ValueError):
    """The chat template cannot be used, or does not show where the assistant's tokens are.

    No fault of the record, so the policy for bad records does not cover it.
    """


class _TooSlowError(ChatTemplateError):
    """Raised from outside, in the thread that renders; by its class, so without arguments."""

    def __init__(self, text: str = "") -> None:
        super().__init__(
            text
            or f"the chat template took longer than {MAX_RENDER_S:g} s for one conversation (an "
            "endless loop?); use the template that belongs to the model"
        )


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


@contextmanager
def limited_time() -> Iterator[None]:
    """Interrupt what this thread runs in Python after `MAX_RENDER_S`.

    Raises:
        ChatTemplateError: it was interrupted.
    """
    thread = threading.get_ident()
    _watch.begin(thread)
    try:
        yield
    finally:
        while True:
            try:
                _watch.end(thread)
                break
            except _TooSlowError:  # it came too late to matter
                continue


class _Watch:
    """A thread that interrupts others; it ends when there is nothing to watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[int, float] = {}
        self._thread: threading.Thread | None = None

    def begin(self, thread: int) -> None:
        with self._lock:
            self._since[thread] = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="odb-template-watch", daemon=True
                )
                self._thread.start()

    def end(self, thread: int) -> None:
        with self._lock:
            self._since.pop(thread, None)
            _interrupt(thread, None)  # one that is under way

    def _run(self) -> None:
        was_idle = False
        while True:
            time.sleep(_TICK_S)
            with self._lock:
                if was_idle and not self._since:
                    self._thread = None
                    return
                was_idle = not self._since
                for thread, since in self._since.items():
                    if time.monotonic() - since > MAX_RENDER_S:
                        _interrupt(thread, _TooSlowError)


def _interrupt(thread: int, error: type[BaseException] | None) -> None:
    value = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), value)


def _renew() -> None:
    global _watch  # noqa: PLW0603 (a process has one)
    _watch = _Watch()


_watch = _Watch()
os.register_at_fork(after_in_child=_renew)  # its thread, and perhaps its lock, stay behind


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
            elif isinstance(one, int) and one.bit_length() > _MOST_BITS:
                raise ChatTemplateError(_too_much("a number"))
        return multiply(left, right)

    return product


def _bounded_power(power: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(left: Any, right: Any) -> Any:
        if (
            isinstance(left, int)
            and isinstance(right, int)
            and left.bit_length() * max(right, 0) > _MOST_BITS
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
        f"{_MOST_BITS} bits are allowed); use the template that belongs to the model"
    )
