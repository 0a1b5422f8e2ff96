"""Network interfaces, and which of them gloo and NCCL are told to use.

Must not send anything; of the environment it reads two variables, when facts are gathered.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from odb_megatron.doctor.finding import Finding, failure, fine, not_applicable, warning

__all__ = ["Interface", "NetworkFacts", "check_network", "gather_network"]

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"

_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915  # linux/sockios.h
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface.

    Attributes:
        name: as the system has it.
        address: IPv4; empty where it has none.
        is_loopback: whether it leads to this machine only.
    """

    name: str
    address: str = ""
    is_loopback: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts:
    """The network of this machine.

    Attributes:
        interfaces: those that are up.
        host: its name.
        resolved: the address that the name stands for, which gloo takes; empty for none.
        gloo: value of GLOO_SOCKET_IFNAME.
        nccl: value of NCCL_SOCKET_IFNAME.
    """

    interfaces: tuple[Interface, ...]
    host: str
    resolved: str = ""
    gloo: str = ""
    nccl: str = ""


def gather_network(environment: Mapping[str, str]) -> NetworkFacts:
    """Look at this machine.

    Args:
        environment: of the run.
    """
    host = socket.gethostname()
    try:
        resolved = socket.gethostbyname(host)
    except OSError:
        resolved = ""
    return NetworkFacts(
        interfaces=tuple(_interfaces()),
        host=host,
        resolved=resolved,
        gloo=environment.get(GLOO, ""),
        nccl=environment.get(NCCL, ""),
    )


def check_network(facts: NetworkFacts, *, num_nodes: int | None) -> list[Finding]:
    """Check which interfaces are used.

    Args:
        facts: the machine's.
        num_nodes: of the run; None where it is not known.
    """
    outside = [one for one in facts.interfaces if not one.is_loopback and one.address]
    named = ", ".join(f"{one.name} {one.address}" for one in outside) or "none but loopback"
    return [
        fine("interfaces", f"{named}; {facts.host} is {facts.resolved or 'not resolved'}"),
        _gloo(facts, outside, num_nodes=num_nodes),
        _nccl(facts, outside),
    ]


def _gloo(facts: NetworkFacts, outside: list[Interface], *, num_nodes: int | None) -> Finding:
    names = {one.name for one in facts.interfaces}
    if facts.gloo:
        missing = [name for name in facts.gloo.split(",") if name not in names]
        if missing:
            return failure(
                GLOO,
                f"{facts.gloo}; {', '.join(missing)} is not an interface that is up here",
                expected=f"one of {', '.join(sorted(names))}",
                way_out=f"export {GLOO} with a name that every node has, or unset it",
            )
        return fine(GLOO, facts.gloo)
    if num_nodes == 1:
        return fine(GLOO, "not set; one node needs no other than loopback")
    way_out = (
        f"export {GLOO}={outside[0].name if outside else 'NAME'} (the network all nodes share)"
    )
    taken = next((one for one in facts.interfaces if one.address == facts.resolved), None)
    if taken is not None and not taken.is_loopback and len(outside) == 1:
        return fine(GLOO, f"not set; gloo takes {taken.name}, which {facts.host} resolves to")
    leads_nowhere = not facts.resolved or facts.resolved.startswith("127.")
    resolves = f"{facts.host} resolves to {facts.resolved or 'nothing'}, where gloo then listens"
    seen = f"not set, {len(outside)} interfaces; {resolves}"
    expected = "the interface of the network that all nodes share"
    if num_nodes is not None and leads_nowhere:
        expected += ": other nodes cannot reach this address"
        return failure(GLOO, seen, expected=expected, way_out=way_out)
    if len(outside) < 2 and num_nodes is None:
        return fine(GLOO, f"{seen}; for one node that is enough")
    return warning(GLOO, seen, expected=expected, way_out=way_out)


def _nccl(facts: NetworkFacts, outside: list[Interface]) -> Finding:
    if not facts.nccl:
        if len(outside) < 2:
            return not_applicable(NCCL, "not set; there is one interface at most")
        return fine(NCCL, "not set; NCCL takes ib* first, then what is not docker* or lo")
    chosen = [one.name for one in facts.interfaces if _nccl_takes(facts.nccl, one.name)]
    if chosen:
        return fine(NCCL, f"{facts.nccl}: {', '.join(chosen)}")
    return failure(
        NCCL,
        f"{facts.nccl} fits no interface that is up here",
        expected=f"a prefix of {', '.join(one.name for one in outside) or 'an interface'}",
        way_out=f"export {NCCL} with what every node has (=name exactly, ^name all but), or unset",
    )


def _nccl_takes(rule: str, name: str) -> bool:
    """Whether NCCL's rule holds: prefixes with commas; `^` turns it round, `=` wants all of it."""
    is_turned, rule = rule.startswith("^"), rule.removeprefix("^")
    is_exact, rule = rule.startswith("="), rule.removeprefix("=")
    parts = [part.partition(":")[0] for part in rule.split(",")]
    fits = any(name == part if is_exact else name.startswith(part) for part in parts)
    return fits != is_turned


def _interfaces() -> list[Interface]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(channel.fileno(), _SIOCGIFFLAGS, request)
            except OSError:
                continue
            (flags,) = struct.unpack("H", reply[16:18])
            if not flags & _IFF_UP:
                continue
            try:
                reply = fcntl.ioctl(channel.fileno(), _SIOCGIFADDR, request)
                address = socket.inet_ntoa(reply[20:24])
            except OSError:
                address = ""
            is_loopback = bool(flags & _IFF_LOOPBACK)
            found.append(Interface(name=name, address=address, is_loopback=is_loopback))
    return found
