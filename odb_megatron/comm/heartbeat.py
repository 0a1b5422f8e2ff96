"""Tells every rank which process is gone or silent, and what those that are late do.

`Heartbeat` knows; `Deadline` decides how long a rank waits for its peers.

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
import hashlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from odb_megatron.errors import setting_name

__all__ = ["ControlError", "Deadline", "Heartbeat", "PeerError", "numbered", "parent_of"]

_c10d: Any = dist.distributed_c10d  # its stubs lack what is used here
_made: Counter[str] = Counter()

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


class ControlError(RuntimeError):
    """An operation between ranks did not complete: one is gone, stuck, or sent something else."""


class PeerError(ControlError):
    """A peer is gone, or has not come before the deadline (see `Deadline`)."""


def numbered(name: str, ranks: Sequence[int]) -> str:
    """Return a name with the members, and a number that counts the calls for both in this process.

    A second run of one process finds the keys of the first in the store. Members must have called
    it equally often for the name and these very ranks.
    """
    members = hashlib.blake2b(repr(list(ranks)).encode(), digest_size=8).hexdigest()
    own_name = f"{name} of ranks {members}"
    _made[own_name] += 1
    return f"{own_name} {_made[own_name]}"


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


_ANSWER_S = 2.0
"""Seconds in which answers to a question, or news of a loss, come."""


class Deadline:
    """Deadline and warning of one loader's exchanges on one rank.

    A peer that evaluates, saves or computes for long holds up this rank's planner, but not its
    trainer, which waits in a collective or has finished steps left: no deadline runs then.

    Args:
        heartbeat: of the rank.
        timeout_s: seconds that the trainer waits for one exchange before it is an error.
        warn_s: seconds before those who are missing are named in a warning.
    """

    def __init__(self, heartbeat: Heartbeat, *, timeout_s: float, warn_s: float) -> None:
        self._heartbeat = heartbeat
        self._timeout_s, self._warn_s = timeout_s, warn_s
        self._trainer_since: float | None = None
        self._what, self._number, self._since = "", 0, 0.0
        self._asked: float | None = None
        self._has_warned = False

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The trainer waits for data within."""
        self._trainer_since = time.monotonic()
        try:
            yield
        finally:
            self._trainer_since = None

    def expect(self, what: str) -> None:
        """This rank will take part in exchanges called `what`; it has come to none yet."""
        self._heartbeat.note(what, -1)

    def begin(self, what: str, number: int) -> None:
        """This rank enters exchange `number` of `what`."""
        self._what, self._number, self._since = what, number, time.monotonic()
        self._asked, self._has_warned = None, False
        self._heartbeat.note(what, number)

    def check(self) -> None:
        """Go on waiting.

        Raises:
            PeerError: a peer is gone, or the deadline is over; names who is missing.
        """
        if self._heartbeat.gone:
            raise PeerError(f"{self._what} {self._number}: {self._heartbeat.diagnosis()}")
        trainer = self._trainer_since
        if trainer is None:
            return
        now = time.monotonic()
        waited_s = now - max(trainer, self._since)
        if waited_s > min(self._warn_s, max(0.0, self._timeout_s - _ANSWER_S)):
            self._warn(now)
        if waited_s > self._timeout_s:
            raise PeerError(
                f"{self._what} {self._number}: the trainer has waited {waited_s:.0f} s "
                f"({setting_name('odb_timeout_s')} {self._timeout_s:g}). {self._missing()}"
            )

    def explain(self) -> str:
        """Return who is missing after an exchange has failed; news may take a moment."""
        self._heartbeat.wait_for_loss(_ANSWER_S)
        return self._heartbeat.diagnosis(self._what)

    def _missing(self) -> str:
        return self._heartbeat.diagnosis(self._what) or "No rank says that it is late"

    def _warn(self, now: float) -> None:
        """Ask who is late; say what they have answered."""
        if self._asked is None:
            self._asked = now
            self._heartbeat.ask(self._what, self._number)
        elif not self._has_warned and now > self._asked + _ANSWER_S:
            self._has_warned = True
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - self._since)))
            print(
                f"odb: warning: {self._heartbeat.who}: the trainer waits for {self._what} "
                f"{self._number} since {since}. {self._missing()}. It is an error after "
                f"{self._timeout_s:g} s",
                file=sys.stderr,
                flush=True,
            )
