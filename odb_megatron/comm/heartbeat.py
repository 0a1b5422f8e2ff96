"""Tells every rank which process is gone, which is silent, and what those that are late do.

A tree of TCP connections between all ranks, apart from every process group: gloo says that a peer
is missing, not which. The system closes a dead process's connections, whatever killed it; a stopped
process keeps them and no longer answers. Nothing is sent per step. Must not know data or Megatron;
messages are lines of JSON.

| message | means |
|---|---|
| `hello` | first on a connection, from the rank further down |
| `ping` | somebody is there |
| `bye` | the sender ends as it should |
| `gone`, `failed`, `silent`, `back` | passed on to all: what became of a rank |
| `where` | passed on to all: who has not come to this point? |
| `late` | passed on to all: an answer to it |
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from odb_megatron.comm.gloo_group import numbered

__all__ = ["Heartbeat", "parent_of"]

_FAN_OUT = 64
"""Connections of a rank to those below it, at most: a rank is three hops from any of 8192."""

_PING_S = 2.0
_TICK_S = 0.25
_MOST_BYTES = 1 << 20
"""Of one message; more is no message of ours."""

_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds and tries after which the system takes the other host for dead."""


def parent_of(rank: int) -> int | None:
    """Return the rank that this one connects to; None for rank 0."""
    return None if rank == 0 else (rank - 1) // _FAN_OUT


@dataclass(slots=True)
class _Link:
    """A connection to a rank of the tree."""

    sock: socket.socket
    rank: int = -1  # not known before its hello
    who: str = ""
    received: bytes = b""
    heard: float = field(default_factory=time.monotonic)
    says_bye: bool = False
    is_mute: bool = False  # its buffer is full: it does not read


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
        self._tell = tell or _print
        self._gone: dict[int, str] = {}
        self._failed: dict[int, str] = {}
        self._silent: dict[int, str] = {}
        self._late: dict[str, dict[int, str]] = {}
        self._points: dict[str, tuple[int, float]] = {}  # where this rank is
        self._seen: set[tuple[str, int]] = set()  # questions passed on
        self._links: list[_Link] = []
        self._has_loss = threading.Event()
        self._is_closing = False
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._wake, woken = socket.socketpair()
        woken.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(woken, selectors.EVENT_READ, None)
        self._woken = woken
        self._listener: socket.socket | None = None
        self._token = ""
        self._ticked = self._pinged = time.monotonic()
        self._connect(size, timeout_s)
        self._thread = threading.Thread(target=self._run, name="the heartbeat", daemon=True)
        self._thread.start()

    # --- for other threads ---------------------------------------------------------------------

    @property
    def gone(self) -> dict[int, str]:
        """Ranks whose process is gone without a word, in words."""
        return dict(self._gone)

    @property
    def has_loss(self) -> bool:
        """Whether a rank is gone, or said that it failed."""
        return self._has_loss.is_set()

    def wait_for_loss(self, timeout_s: float) -> bool:
        """Wait until `has_loss`; return it."""
        return self._has_loss.wait(timeout_s)

    def note(self, what: str, number: int) -> None:
        """Say where this rank is: it has come to number `number` of `what`."""
        self._points[what] = (number, time.time())

    def ask(self, what: str, number: int) -> None:
        """Ask all ranks that `note` the same thing, and have not come so far, for an answer."""
        self._order({"kind": "where", "what": what, "number": number})

    def tell_failure(self, text: str) -> None:
        """Tell all ranks that this one ends with an error."""
        self._order({"kind": "failed", "rank": self._rank, "text": f"{self.who} failed: {text}"})

    def diagnosis(self, what: str = "") -> str:
        """Return in words which ranks are missing and why; empty for nothing known.

        Args:
            what: see `note`; ranks that are late for it are named too.
        """
        texts = {**self._late.get(what, {}), **self._silent, **self._failed, **self._gone}
        return "; ".join(texts[rank] for rank in sorted(texts))

    def close(self) -> None:
        """Leave as one should: the others are told."""
        if not self._is_closing:
            self._is_closing = True
            self._order({"kind": "bye"})
            self._thread.join(2.0)

    # --- the thread ----------------------------------------------------------------------------

    def _connect(self, size: int, timeout_s: float) -> None:
        c10d: Any = dist
        prefix = f"odb_megatron/{numbered('heartbeat', range(size))}"
        store = c10d.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        if self._rank * _FAN_OUT + 1 < size:
            address = _own_address()
            self._listener = socket.create_server((address, 0), backlog=_FAN_OUT)
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ, None)
            self._token = secrets.token_hex(16)
            port = self._listener.getsockname()[1]
            store.set(str(self._rank), json.dumps([address, port, self._token, self.who]))
        parent = parent_of(self._rank)
        if parent is None:
            return
        store.wait([str(parent)], timedelta(seconds=timeout_s))
        address, port, token, who = json.loads(store.get(str(parent)))
        try:
            sock = socket.create_connection((address, port), timeout=timeout_s)
        except OSError as error:
            raise RuntimeError(
                f"{self.who} cannot reach {who} at {address}:{port} ({error}): ranks need TCP "
                "connections to each other; see the firewall, and GLOO_SOCKET_IFNAME"
            ) from error
        link = self._add(sock)
        link.rank, link.who = parent, who
        hello = {"kind": "hello", "rank": self._rank, "who": self.who, "token": token}
        self._send(link, hello)

    def _order(self, message: dict[str, Any]) -> None:
        self._orders.put(message)
        with contextlib.suppress(OSError):
            self._wake.send(b".")

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(_TICK_S):
                if key.fileobj is self._listener and self._listener is not None:
                    with contextlib.suppress(OSError):
                        self._add(self._listener.accept()[0])
                elif key.fileobj is self._woken:
                    with contextlib.suppress(OSError):
                        self._woken.recv(4096)
                else:
                    self._receive(key.data)
            while not self._orders.empty():
                message = self._orders.get()
                if message["kind"] == "bye":
                    self._leave()
                    return
                self._handle(message, source=None)
            self._tick()

    def _add(self, sock: socket.socket) -> _Link:
        sock.settimeout(0.5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        link = _Link(sock)
        self._links.append(link)
        self._selector.register(sock, selectors.EVENT_READ, link)
        return link

    def _receive(self, link: _Link) -> None:
        try:
            data = link.sock.recv(1 << 16)
        except TimeoutError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(link)
            return
        link.heard = time.monotonic()
        *lines, link.received = (link.received + data).split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
                if link.rank < 0:
                    self._greet(link, message)
                else:
                    self._handle(message, source=link)
            except (ValueError, KeyError, TypeError, RecursionError):
                self._forget(link)  # none of ours
                return
        if len(link.received) > _MOST_BYTES:
            self._forget(link)

    def _greet(self, link: _Link, message: dict[str, Any]) -> None:
        is_ours = secrets.compare_digest(str(message["token"]), self._token)
        if message["kind"] != "hello" or not is_ours:
            raise ValueError("not one of this run's ranks")
        link.rank, link.who = int(message["rank"]), str(message["who"])

    def _handle(self, message: dict[str, Any], *, source: _Link | None) -> None:
        kind = message["kind"]
        if kind == "ping":
            return
        if kind == "bye" and source is not None:
            source.says_bye = True
            return
        if self._take_in(kind, message):
            self._pass_on(message, source)

    def _take_in(self, kind: str, message: dict[str, Any]) -> bool:
        """Note a message for all; return whether it was new."""
        if kind == "where":
            what, number = str(message["what"]), int(message["number"])
            if (what, number) in self._seen:
                return False
            self._seen.add((what, number))
            self._late[what] = {}
            point = self._points.get(what)
            if point is not None and point[0] < number:
                self._order({"kind": "late", "rank": self._rank, "what": what, "text": self._at()})
            return True
        rank, text = int(message["rank"]), str(message.get("text", ""))
        if rank == self._rank:
            return kind in ("failed", "late")  # what this rank says of itself
        if kind == "back":
            return self._silent.pop(rank, None) is not None
        if kind == "late":
            self._late.setdefault(str(message["what"]), {})[rank] = text
            return True
        found = {"gone": self._gone, "failed": self._failed, "silent": self._silent}[kind]
        if rank in found:
            return False
        found[rank] = text
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
        for link in list(self._links):
            if link is not source and link.rank >= 0:
                self._send(link, message)

    def _send(self, link: _Link, message: dict[str, Any]) -> None:
        if link.is_mute:
            return
        try:
            link.sock.sendall(json.dumps(message).encode() + b"\n")
        except TimeoutError:
            link.is_mute = True
        except OSError:
            pass  # reading from it will say so

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._ticked > _PING_S:  # it was this process that stood still
            for link in self._links:
                link.heard = now
        self._ticked = now
        if now - self._pinged > _PING_S:
            self._pinged = now
            self._pass_on({"kind": "ping"}, None)
        for link in self._links:
            if link.rank < 0 or link.says_bye:
                continue
            away_s = now - link.heard
            if away_s > self._silent_s + _PING_S and link.rank not in self._silent:
                text = (
                    f"{link.who} has not answered since {_clock(time.time() - away_s)}: it is "
                    "stopped, or its host is not reachable"
                )
                self._tell(f"odb: warning: {text}")
                self._handle({"kind": "silent", "rank": link.rank, "text": text}, source=None)
            elif away_s < _PING_S and link.rank in self._silent:
                self._tell(f"odb: {link.who} answers again")
                self._handle({"kind": "back", "rank": link.rank}, source=None)

    def _drop(self, link: _Link) -> None:
        """Its end of the connection is closed."""
        self._forget(link)
        if link.rank >= 0 and not link.says_bye:
            text = f"{link.who} is gone, noticed at {_clock(time.time())}"
            if link.rank == 0:
                text += " (it hosted the rendezvous store)"
            self._handle({"kind": "gone", "rank": link.rank, "text": text}, source=None)

    def _forget(self, link: _Link) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.sock)
        link.sock.close()
        if link in self._links:
            self._links.remove(link)

    def _leave(self) -> None:
        self._pass_on({"kind": "bye"}, None)
        for link in list(self._links):
            self._forget(link)
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
        self._woken.close()
        self._wake.close()


def _own_address() -> str:
    """Return the address by which the other ranks reach this host."""
    master = os.environ.get("MASTER_ADDR")
    if not master:
        return "127.0.0.1"
    family, _, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        address: str = probe.getsockname()[0]
    return address


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
