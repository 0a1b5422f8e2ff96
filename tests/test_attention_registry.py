"""Choice of an attention backend: what `auto` takes, and the text of every refusal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from odb_megatron.megatron.attention.registry import BACKENDS, AttentionBackend, select


def _backend(
    name: str,
    *,
    auto: tuple[str, ...] = ("cuda",),
    named: tuple[str, ...] = ("cuda",),
    why_not: Callable[[], str | None] = lambda: None,
) -> AttentionBackend:
    return AttentionBackend(
        name=name,
        core_attention="collections:OrderedDict",
        auto_devices=auto,
        named_devices=named,
        why_unavailable=why_not,
        description=f"kernel of {name}",
    )


FAST = _backend("fast", why_not=lambda: "flash-attn is not installed")
SLOW = _backend("slow")
ANYWHERE = _backend("anywhere", auto=("cpu",), named=("cpu", "cuda"))
THREE = {backend.name: backend for backend in (FAST, SLOW, ANYWHERE)}


@pytest.mark.parametrize(
    ("device_type", "chosen", "reason"),
    [
        (
            "cuda",
            "slow",
            "first available on cuda: kernel of slow; "
            "passed over fast (flash-attn is not installed)",
        ),
        (
            "cpu",
            "anywhere",
            "first available on cpu: kernel of anywhere; "
            "passed over fast (not for cpu), slow (not for cpu)",
        ),
    ],
)
def test_auto_takes_the_first_available(device_type: str, chosen: str, reason: str) -> None:
    backend = select("auto", device_type=device_type, backends=THREE)
    assert (backend.name, backend.reason) == (chosen, reason)


def test_a_named_backend_is_taken() -> None:
    backend = select("anywhere", device_type="cuda", backends=THREE)
    assert backend.reason == "asked for by name: kernel of anywhere"
    assert THREE["anywhere"].reason == ""


@pytest.mark.parametrize(
    ("name", "device_type", "text"),
    [
        ("flahs", "cuda", r"'flahs' is unknown: choose auto or one of fast, slow, anywhere"),
        ("fast", "cuda", r"'fast' cannot run on cuda: flash-attn is not installed. Mend that, or"),
        ("slow", "cpu", r"'slow' cannot run on cpu: not for cpu. Mend that, or pass .* auto"),
    ],
)
def test_refusals(name: str, device_type: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        select(name, device_type=device_type, backends=THREE)


def test_auto_without_a_backend_names_all_and_a_way_out() -> None:
    without_slow = {name: THREE[name] for name in ("fast", "anywhere")}
    with pytest.raises(
        ValueError,
        match=r"no attention backend for packed samples on cuda: fast \(flash-attn is not "
        r"installed\), anywhere \(not for cuda unless asked for by name\)\. Way out: ask for "
        r"anywhere by name \(--odb-attention\)",
    ):
        select("auto", device_type="cuda", backends=without_slow)
    with pytest.raises(ValueError, match=r"Way out: mend one of these"):
        select("auto", device_type="cuda", backends={"fast": FAST})


def test_the_cpu_backend_is_for_the_cpu_unless_named() -> None:
    if BACKENDS["cpu"].available() is not None:
        pytest.skip("megatron-core is not installed")
    assert select("auto", device_type="cpu").name == "cpu"
    assert select("cpu", device_type="cuda").name == "cpu"
    assert "cuda" not in BACKENDS["cpu"].auto_devices


@pytest.mark.parametrize(
    ("name", "core_attention"), [("auto", "module:Class"), ("x", "module.Class"), ("x", "a:b:c")]
)
def test_a_backend_must_be_well_formed(name: str, core_attention: str) -> None:
    with pytest.raises(ValueError, match="must not be 'auto' and core_attention"):
        AttentionBackend(
            name=name,
            core_attention=core_attention,
            auto_devices=(),
            named_devices=(),
            why_unavailable=lambda: None,
            description="",
        )


def test_load_imports_the_class() -> None:
    from collections import OrderedDict

    assert SLOW.load() is OrderedDict


def test_registry_imports_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, odb_megatron.megatron.attention.registry as r; r.BACKENDS['cpu'].available();"
        "print([m for m in sys.modules if m == 'torch' or m.startswith('megatron.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
