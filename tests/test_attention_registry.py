"""Choice of an attention backend: what `auto` takes, and the text of every refusal."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from odb_megatron.megatron.attention import registry
from odb_megatron.megatron.attention.needs import Feature, Limits, Need, why_unfit
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
        (
            "slow",
            "cpu",
            r"'slow' runs on cuda, and this is cpu: pass --odb-attention auto, or start",
        ),
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
        r"installed\), anywhere \(not for cuda unless asked for by name\)\. Hint: ask for "
        r"anywhere by name \(--odb-attention\)",
    ):
        select("auto", device_type="cuda", backends=without_slow)
    with pytest.raises(ValueError, match=r"Hint: mend one of these"):
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


HALF_ONLY = Limits(dtypes=("float16", "bfloat16"), max_head_size=128, head_multiple=8)


@pytest.mark.parametrize(
    ("limits", "need", "why"),
    [
        (Limits(), Need(), None),
        (HALF_ONLY, Need(), None),
        (HALF_ONLY, Need(dtype="bfloat16", head_size=128, capability=(9, 0)), None),
        (HALF_ONLY, Need(dtype="float32"), "computes in float16 or bfloat16, not float32"),
        (HALF_ONLY, Need(head_size=192), "has head sizes up to 128, not 192"),
        (HALF_ONLY, Need(head_size=100), "has head sizes in multiples of 8, not 100"),
        (Limits(), Need(layers="transformer_engine"), "needs --transformer-impl local"),
        (
            Limits(layers="transformer_engine"),
            Need(),
            "needs --transformer-impl transformer_engine",
        ),
        (
            Limits(min_capability=(8, 0)),
            Need(capability=(7, 5)),
            "needs compute capability 8.0, not 7.5",
        ),
        (
            Limits(min_capability=(9, 0), max_capability=(9, 0)),
            Need(capability=(10, 0)),
            "needs compute capability 9.0 to 9.0, not 10.0",
        ),
        (
            Limits(features=frozenset({Feature.WINDOW})),
            Need(features=frozenset({Feature.WINDOW, Feature.DROPOUT, Feature.CONTEXT_PARALLEL})),
            "does not have --attention-dropout above 0, --context-parallel-size above 1",
        ),
    ],
)
def test_why_a_backend_is_unfit(limits: Limits, need: Need, why: str | None) -> None:
    assert why_unfit(limits, need) == why


def _installed(*names: str) -> dict[str, AttentionBackend]:
    """The real backends, as on a machine with these."""
    return {
        name: replace(
            backend, why_unavailable=lambda name=name: None if name in names else "not installed"
        )
        for name, backend in BACKENDS.items()
    }


BF16 = Need(dtype="bfloat16", head_size=128, capability=(9, 0))
EVERYTHING = tuple(BACKENDS)


@pytest.mark.parametrize(
    ("device_type", "need", "installed", "chosen"),
    [
        ("cuda", replace(BF16, layers="transformer_engine"), EVERYTHING, "te"),
        ("cuda", BF16, EVERYTHING, "flash3"),
        ("cuda", BF16, ("flash", "torch", "torch_flex", "cpu"), "flash"),
        ("cuda", BF16, ("torch", "torch_flex", "cpu"), "torch"),
        ("cuda", replace(BF16, capability=(10, 0)), EVERYTHING, "flash4"),
        ("cuda", replace(BF16, capability=(8, 0)), EVERYTHING, "flash"),
        ("cuda", replace(BF16, dtype="float32"), EVERYTHING, "torch_flex"),
        ("cuda", replace(BF16, head_size=512), EVERYTHING, "torch_flex"),
        ("cuda", replace(BF16, features=frozenset({Feature.DROPOUT})), EVERYTHING, "flash"),
        ("cpu", Need(dtype="float32", head_size=16), EVERYTHING, "cpu"),
        (
            "cpu",
            Need(features=frozenset({Feature.WINDOW, Feature.CONTEXT_PARALLEL})),
            EVERYTHING,
            "cpu",
        ),
    ],
)
def test_what_auto_chooses(
    device_type: str, need: Need, installed: tuple[str, ...], chosen: str
) -> None:
    backend = select("auto", device_type=device_type, need=need, backends=_installed(*installed))
    assert backend.name == chosen
    passed_over = list(BACKENDS)[: list(BACKENDS).index(chosen)]
    assert all(f"{name} (" in backend.reason for name in passed_over)


@pytest.mark.parametrize(
    ("name", "device_type", "need", "text"),
    [
        (
            "auto",
            "cuda",
            replace(BF16, layers="transformer_engine"),
            r"te \(not installed\), flash3 \(needs --transformer-impl local\)",
        ),
        ("te", "cuda", BF16, "'te' cannot run on cuda: needs --transformer-impl transformer_eng"),
        (
            "torch",
            "cuda",
            replace(BF16, features=frozenset({Feature.CONTEXT_PARALLEL})),
            "'torch' cannot run on cuda: does not have --context-parallel-size above 1",
        ),
        ("cpu", "cpu", Need(features=frozenset({Feature.SINK})), "does not have --softmax-type"),
    ],
)
def test_needs_are_refused_by_name(name: str, device_type: str, need: Need, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        select(name, device_type=device_type, need=need, backends=_installed("torch", "cpu"))


@pytest.mark.parametrize(
    ("modules", "versions", "name", "why"),
    [
        ((), {}, "te", "transformer-engine is not installed"),
        (("transformer_engine",), {"transformer-engine": "2.8.0"}, "te", "2.8.0 is too old: 2.9 o"),
        (("transformer_engine",), {"transformer_engine": "2.9.0+cu12"}, "te", None),
        (("flash_attn",), {"flash-attn": "2.5.8"}, "flash", "flash-attn 2.5.8 is too old"),
        (("flash_attn",), {"flash_attn": "2.8.3.post1"}, "flash", None),
        ((), {}, "flash", "flash-attn is not installed"),
        ((), {}, "flash3", "flash-attn 3 is not installed"),
        (("flash_attn_interface",), {}, "flash3", None),
        (("flash_attn",), {}, "flash4", "flash-attn 4 is not installed"),
        (("flash_attn", "flash_attn.cute"), {}, "flash4", None),
        ((), {"torch": "2.10.0"}, "torch", "torch 2.10.0 has no torch.nn.attention.varlen"),
        ((), {"torch": "2.13.0+cu130"}, "torch", None),
        ((), {}, "torch", "no torch has no"),
        ((), {"torch": "2.5.1"}, "torch_flex", "torch 2.6 or later"),
        ((), {"torch": "2.13.0"}, "torch_flex", None),
    ],
)
def test_packages_that_are_there(
    monkeypatch: pytest.MonkeyPatch,
    modules: tuple[str, ...],
    versions: dict[str, str],
    name: str,
    why: str | None,
) -> None:
    def version(distribution: str) -> str:
        if distribution not in versions:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return versions[distribution]

    monkeypatch.setattr(registry, "_has", lambda module: module in (*modules, "megatron.core"))
    monkeypatch.setattr(registry.importlib.metadata, "version", version)
    found = BACKENDS[name].available()
    assert found is None if why is None else why in str(found)


def test_every_backend_loads_or_says_what_is_missing() -> None:
    pytest.importorskip("megatron.core")
    assert list(BACKENDS) == ["te", "flash3", "flash4", "flash", "torch", "torch_flex", "cpu"]
    for name, backend in BACKENDS.items():
        if name != "te":  # its class is a subclass of Transformer Engine's
            assert backend.load().__name__.endswith("CoreAttention")
