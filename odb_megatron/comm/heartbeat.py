"""Tells every rank which process is gone or silent, and what those that are late do.

A tree of TCP connections between all ranks, apart from every process group: gloo says that a peer
is missing, not which. The system closes a dead process's connections, whatever killed it; a stopped
process keeps them and no longer answers. Nothing is sent per step. Messages are lines of JSON:

| message | means |
|---|---|
| `hello` | first on a connection, from the rank further down |
| `ping` | somebody is there |
| `bye` | the sender ends as it should |
| `gone`, `failed`, `silent`, `back` | passed on to all: what became of a rank |
| `left` | passed on to all: a rank's script has ended, after so many steps |
| `where` | passed on to all: who has not come to this point? |
| `late` | passed on to all: an answer to it |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from odb_megatron.comm.gloo_group import numbered

__all__ = ["Heartbeat", "parent_of"]

_c10d: Any = dist.distributed_c10d  # its stubs lack what is used here

_Socket = socket.socket | None
_FAN_OUT = 64
"""Connections of a rank to those below it, at most: a rank is three hops from any of 8192."""

_PING_S = 2.0
_TICK_S = 0.25
_BYE_S = 1.0
_MAX_BYTES = 1 << 20
"""Of one message; more is no message of ours."""

_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds and tries after which the system takes the other host for dead."""


def parent_of(rank: int) -> int | None:
    """Return the rank that this one connects to; None for rank 0."""
    return None if rank == 0 else (rank - 1) // _FAN_OUT


@dataclass(slots=True)
class _Link:
    """A connection to a rank of the tree."""

    writer: asyncio.StreamWriter
    rank: int = -1  # not known before its hello
    who: str = ""
    heard: float = field(default_factory=time.monotonic)
    says_bye: bool = False


class Heartbeat:
    """This rank's part of the tree. Every rank of the world must make one, in the same order.

    Args:
        who: this rank in words; host and process are added.
        timeout_s: most seconds to find the other ranks.
        silent_s: seconds without an answer after which a rank is reported as silent.
        tell: prints a line.
    """

    def __init__(
        self,
        who: str,
        *,
        timeout_s: float,
        silent_s: float,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._rank, size = dist.get_rank(), dist.get_world_size()
        self.who = f"rank {self._rank} ({who}, {socket.gethostname()}, process {os.getpid()})"
        self._silent_s = silent_s
        self._tell = tell or partial(print, file=sys.stderr, flush=True)
        self._news: dict[str, dict[int, str]] = {"silent": {}, "failed": {}, "gone": {}}
        self._late: dict[str, dict[int, str]] = {}
        self._points: dict[str, tuple[int, float]] = {}  # where this rank is
        self._asked: set[tuple[str, int]] = set()  # questions passed on
        self._steps = 0  # that the trainer has begun
        self._left: dict[str, Any] = {"steps": sys.maxsize}  # message of the rank that left first
        self._has_loss = threading.Event()
        self._links: list[_Link] = []
        self._token = secrets.token_hex(16)
        self._ticked = self._pinged = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None
        if size > 1:
            has_begun = threading.Event()
            main = self._main(*self._meet(size, timeout_s), has_begun.set)
            self._thread = threading.Thread(
                target=asyncio.run, args=(main,), name="the heartbeat", daemon=True
            )
            self._thread.start()
            has_begun.wait(timeout_s)

    # --- for other threads ---------------------------------------------------------------------

    @property
    def gone(self) -> dict[int, str]:
        """Ranks whose process is gone without a word, or that left the run early, in words."""
        return dict(self._news["gone"])

    def wait_for_loss(self, timeout_s: float) -> bool:
        """Wait until a rank is gone, or has said that it failed; return whether one is or has."""
        return self._has_loss.wait(timeout_s)

    def note(self, what: str, number: int) -> None:
        """Say where this rank is: it has come to number `number` of `what`."""
        self._points[what] = (number, time.time())

    def ask(self, what: str, number: int) -> None:
        """Ask all ranks that `note` the same thing, and have not come so far, for an answer."""
        self._order({"kind": "where", "what": what, "number": number})

    def begin_step(self) -> None:
        """The trainer begins a step, of training or evaluation, as those of all ranks have to."""
        self._steps += 1
        if self._steps > self._left["steps"]:
            self._order(self._left)

    def leave(self, *, within_step: bool) -> None:
        """This rank's script has ended: those that begin a step that it has not done miss it."""
        steps = self._steps - within_step
        self._order({"kind": "left", "rank": self._rank, "steps": steps, "text": self.who})

    def tell_failure(self, text: str) -> None:
        """Tell all ranks that this one ends with an error."""
        self._order({"kind": "failed", "rank": self._rank, "text": f"{self.who} failed: {text}"})

    def diagnosis(self, what: str = "") -> str:
        """Return in words which ranks are missing and why; empty for nothing known.

        Args:
            what: see `note`; ranks that are late for it are named too.
        """
        texts = dict(self._late.get(what, {}))
        for found in self._news.values():
            texts |= found
        return "; ".join(texts[rank] for rank in sorted(texts))

    def close(self) -> None:
        """Leave as one should: the others are told."""
        self._order({"kind": "end"})
        if self._loop is not None:
            self._thread.join(2.0)

    def _order(self, message: dict[str, Any]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the thread has ended
                self._loop.call_soon_threadsafe(self._handle, message, None)

    def _meet(self, size: int, timeout_s: float) -> tuple[_Socket, _Socket, dict[str, Any]]:
        """Return where ranks below connect to, the connection to the parent, and who that is."""
        store = _c10d.PrefixStore(
            f"odb_megatron/{numbered('heartbeat', range(size))}", _c10d._get_default_store()
        )
        listener, parent = None, parent_of(self._rank)
        if self._rank * _FAN_OUT + 1 < size:
            address = _own_address()
            listener = socket.create_server((address, 0), backlog=_FAN_OUT)
            port = listener.getsockname()[1]
            store.set(str(self._rank), json.dumps([address, port, self._token, self.who]))
        if parent is None:
            return listener, None, {}
        store.wait([str(parent)], timedelta(seconds=timeout_s))
        address, port, token, who = json.loads(store.get(str(parent)))
        try:
            sock = socket.create_connection((address, port), timeout=timeout_s)
        except OSError as error:
            raise RuntimeError(
                f"{self.who} cannot reach {who} at {address}:{port} ({error}): ranks need TCP "
                "connections to each other; see the firewall, and GLOO_SOCKET_IFNAME"
            ) from error
        return listener, sock, {"rank": parent, "who": who, "token": token}

    # --- the thread ----------------------------------------------------------------------------

    async def _main(
        self, listener: _Socket, sock: _Socket, parent: dict[str, Any], begun: Callable[[], None]
    ) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = None
        if listener is not None:
            server = await asyncio.start_server(self._read, sock=listener, limit=_MAX_BYTES)
        if sock is not None:
            reader, writer = await asyncio.open_connection(sock=sock, limit=_MAX_BYTES)
            token = parent.pop("token")
            hello = {"kind": "hello", "rank": self._rank, "who": self.who, "token": token}
            writer.write(json.dumps(hello).encode() + b"\n")
            self._reading = asyncio.create_task(self._read(reader, writer, **parent))
        begun()
        while not self._end.is_set():
            self._tick()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._end.wait(), _TICK_S)
        self._pass_on({"kind": "bye"}, None)
        if server is not None:
            server.close()
        # Closing with something unread would be a reset, which can overtake the bye.
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=_BYE_S)

    async def _read(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        rank: int = -1,
        who: str = "",
    ) -> None:
        """Read from a connection until its other end is closed."""
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        link = _Link(writer, rank, who)
        self._links.append(link)
        is_ours = True
        try:
            while not link.says_bye and (line := await reader.readline()).endswith(b"\n"):
                link.heard = time.monotonic()
                message = json.loads(line)
                if link.rank >= 0:
                    self._handle(message, link)
                elif secrets.compare_digest(str(message["token"]), self._token):
                    link.rank, link.who = int(message["rank"]), str(message["who"])
                else:
                    raise ValueError("not one of this run's ranks")
        except OSError:
            pass
        except (ValueError, KeyError, TypeError, RecursionError):
            is_ours = False
        finally:
            self._links.remove(link)
            writer.close()
        if is_ours and link.rank >= 0 and not link.says_bye and not self._end.is_set():
            store = " (it hosted the rendezvous store)" if link.rank == 0 else ""
            text = f"{link.who} is gone, noticed at {_clock(time.time())}{store}"
            self._handle({"kind": "gone", "rank": link.rank, "text": text}, None)

    def _handle(self, message: dict[str, Any], source: _Link | None) -> None:
        if source is None and message["kind"] == "end":
            self._end.set()
        elif source is not None and message["kind"] == "bye":
            source.says_bye = True
        elif message["kind"] != "ping" and self._take_in(message["kind"], message):
            self._pass_on(message, source)

    def _take_in(self, kind: str, message: dict[str, Any]) -> bool:
        """Note a message for all; return whether it was new."""
        if kind == "where":
            what, number = str(message["what"]), int(message["number"])
            if (what, number) in self._asked:
                return False
            self._asked.add((what, number))
            self._late[what] = {}
            point = self._points.get(what)
            if point is not None and point[0] < number:
                self._order({"kind": "late", "rank": self._rank, "what": what, "text": self._at()})
            return True
        rank, text = int(message["rank"]), str(message.get("text", ""))
        is_own = rank == self._rank
        if kind == "left":
            is_first: bool = message["steps"] < self._left["steps"]
            if is_first:
                self._left = message
            if self._steps > self._left["steps"]:
                text = f"{text} has left the run early: its script has ended, and others train on"
                self._handle({"kind": "gone", "rank": rank, "text": text}, None)
            return is_first
        if kind == "back":
            return self._news["silent"].pop(rank, None) is not None
        if kind == "late":
            self._late.setdefault(str(message["what"]), {})[rank] = text
            return True
        has_left = kind == "gone" and self._left.get("rank") == rank
        if rank in self._news[kind] or (is_own and not has_left):
            return is_own and kind == "failed"  # what this rank says of itself
        self._news[kind][rank] = text
        if kind != "silent":
            self._has_loss.set()
        return True

    def _at(self) -> str:
        points = (
            f"{what} {number} since {_clock(since)}" if number >= 0 else f"{what}: none yet"
            for what, (number, since) in list(self._points.items())
        )
        return f"{self.who} answers but is late; it has come to {', '.join(points)}"

    def _pass_on(self, message: dict[str, Any], source: _Link | None) -> None:
        for link in self._links:
            has_room = (
                link.writer.transport.get_write_buffer_size() < _MAX_BYTES
            )  # else it is stuck
            if link is not source and link.rank >= 0 and has_room:
                link.writer.write(json.dumps(message).encode() + b"\n")

    def _tick(self) -> None:
        now = time.monotonic()
        stood_still, self._ticked = now - self._ticked > _PING_S, now
        if now - self._pinged > _PING_S:
            self._pinged = now
            self._pass_on({"kind": "ping"}, None)
        for link in self._links:
            if stood_still:  # it was this process that did
                link.heard = now
            if link.rank < 0 or link.says_bye:
                continue
            away_s, is_silent = now - link.heard, link.rank in self._news["silent"]
            if away_s > self._silent_s + _PING_S and not is_silent:
                text = (
                    f"{link.who} has not answered since {_clock(time.time() - away_s)}: it is "
                    "stopped, or its host is not reachable"
                )
                self._tell(f"odb: warning: {text}")
                self._handle({"kind": "silent", "rank": link.rank, "text": text}, None)
            elif away_s < _PING_S and is_silent:
                self._tell(f"odb: {link.who} answers again")
                self._handle({"kind": "back", "rank": link.rank}, None)


def _own_address() -> str:
    """Return the address by which the other ranks reach this host."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    family, _, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        address: str = probe.getsockname()[0]
    return address


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
