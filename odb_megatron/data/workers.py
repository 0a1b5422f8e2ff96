"""How data-loader workers start, and what is sent to them.

A process that holds process groups, threads or a CUDA context is never forked: workers come from a
server that was started afresh (`forkserver`).
"""

from __future__ import annotations

import contextlib
import copy
import errno
import multiprocessing
import multiprocessing.context
import pickle
import pickletools
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any

__all__ = ["Packed", "Workers", "recorded", "starting"]

_PRELOADED = ("odb_megatron.data.replica_stream",)
_starting = threading.Lock()

_MAX_SEARCHED = 16 << 20
"""Bytes in which names of modules are looked for, at most: it takes about a second per 16 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Worker processes of one loader.

    Attributes:
        num: how many; 0 fetches in the calling thread.
        timeout_s: seconds that a sample may take; 0 for any time.
    """

    num: int = 0
    timeout_s: float = 0.0


class Packed:
    """An object as it is sent to workers: pickled once, unpickled by each when it is first used.

    Args:
        value: the object.

    Raises:
        ValueError: it cannot be pickled.
    """

    def __init__(self, value: Any) -> None:
        try:
            self._data = pickle.dumps(value, protocol=5)
        except Exception as error:  # pickle raises what it likes
            raise ValueError(
                f"the data cannot be sent to worker processes ({type(error).__name__}: {error}): "
                "define its classes and functions at the top level of a module and open files when "
                "they are first read, or pass --num-workers 0"
            ) from error

    def unpack(self) -> Any:
        """Return the object; made from this process's own data."""
        return pickle.loads(self._data)

    @property
    def needs_main(self) -> bool:
        """Whether the main script must be imported to unpack it."""
        return b"__main__" in self._data

    def modules(self) -> list[str]:
        """Return modules that unpacking it imports; those of a very large object are not known."""
        if len(self._data) > _MAX_SEARCHED:
            return []
        texts = {text for _, text, _ in pickletools.genops(self._data) if isinstance(text, str)}
        return sorted(name for name in texts if name in sys.modules and name != "__main__")

    def context(self) -> BaseContext:
        """Return what starts processes afresh that unpack this object, and imports no more.

        Python imports the main script in every process it starts afresh. A training script imports
        Megatron, which takes each of them seconds and its memory.
        """
        multiprocessing.set_forkserver_preload([*_PRELOADED, *self.modules()])
        return multiprocessing.get_context("forkserver") if self.needs_main else _ForkServer()


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Start worker processes within: an error says what they lack.

    Raises:
        RuntimeError: shared memory, which their queues need, is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        free = shutil.disk_usage("/dev/shm").free
        raise RuntimeError(
            f"worker processes cannot be started ({error}): /dev/shm has {free >> 10} KiB free; "
            "make it larger (--shm-size of a container), or pass --num-workers 0"
        ) from error


def recorded(context: BaseContext) -> tuple[BaseContext, Callable[[], list[int]]]:
    """Return a context like this one, and what tells which of the processes it made are gone."""
    made: list[Any] = []
    own: Any = copy.copy(context)
    make: Callable[..., Any] = own.Process

    def process(*args: Any, **named: Any) -> Any:
        made.append(make(*args, **named))
        return made[-1]

    own.Process = process
    return own, lambda: [one.pid for one in made if one.pid is not None and not one.is_alive()]


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main script's place from `multiprocessing.spawn.get_preparation_data`."""
    main: Any = sys.modules["__main__"]
    names = ("__spec__", "__file__")
    with _starting:
        values = {name: getattr(main, name) for name in names if hasattr(main, name)}
        for name in values:
            setattr(main, name, None)
        try:
            yield
        finally:
            for name, value in values.items():
                setattr(main, name, value)


class _ForkServerProcess(multiprocessing.context.ForkServerProcess):
    def start(self) -> None:
        with _without_main():
            super().start()


class _ForkServer(multiprocessing.context.ForkServerContext):
    Process = _ForkServerProcess
