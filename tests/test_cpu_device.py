"""The CPU device layer: refuses CUDA, works once, changes nothing on import, and what it changes.

`activate` changes torch for a whole process, so it runs in processes of its own here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from odb_megatron.testing import cpu_device
from odb_megatron.testing.cpu_device import REPLACEMENTS
from odb_megatron.testing.gloo import run_replicas

IDENTITIES = """
import torch
watched = [(torch.cuda, n) for n in dir(torch.cuda)] + [(torch, n) for n in dir(torch)]
watched += [(torch.Tensor, n) for n in ("type", "cuda", "pin_memory")]
def identities():
    return [id(getattr(owner, name)) for owner, name in watched]
before = identities()
kept = [getattr(owner, name) for owner, name in watched]
"""


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    found: dict[str, Any] = run_replicas(
        _measure, 1, timeout_s=60, device_layer=True, model_parallel={}
    )[0]
    return found


def test_refuses_where_cuda_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    original = torch.cuda.current_device
    with pytest.raises(RuntimeError, match=r"torch sees a CUDA device: drop --device cpu"):
        cpu_device.activate()
    assert torch.cuda.current_device is original
    assert not cpu_device.is_active()


def test_import_changes_nothing_and_activation_is_idempotent() -> None:
    done = _python(
        IDENTITIES
        + """
from odb_megatron.testing import cpu_device
from odb_megatron.testing.cpu_device import REPLACEMENTS
assert identities() == before and not cpu_device.is_active()
cpu_device.activate()
once = identities()
assert once != before and cpu_device.is_active()
cpu_device.activate()
assert identities() == once
pairs = zip(watched, zip(before, once))
changed = {f"{owner.__name__}.{name}" for (owner, name), (old, new) in pairs if old != new}
listed = {f"{r.module.replace('torch:Tensor', 'Tensor')}.{r.name}" for r in REPLACEMENTS}
assert changed <= listed, changed - listed
assert len(changed) > 10
print("checked")
"""
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines == [cpu_device._NOTICE, "checked"]


def test_every_replacement_has_a_reason() -> None:
    assert all(len(each.reason) > 10 for each in REPLACEMENTS)
    keys = [(each.module, each.name) for each in REPLACEMENTS]
    assert len(set(keys)) == len(keys)
    never = {"is_available", "get_device_properties"}
    assert never.isdisjoint(each.name for each in REPLACEMENTS)


def test_what_megatron_sees(measured: dict[str, Any]) -> None:
    assert [what for what, holds in measured.items() if holds is False] == []


def test_training_names_are_replaced_where_they_were_imported(measured: dict[str, Any]) -> None:
    if measured["training"] is None:
        pytest.skip("this megatron-core has no megatron.training")
    assert measured["training"] == {"initialize": True, "arch": 10, "helpers": True}


def test_unequal_parts_are_gathered_padded() -> None:
    import torch

    others = torch.tensor([[7.0], [8.0], [9.0]])

    def gloo(parts: list[torch.Tensor], own: torch.Tensor, **_options: object) -> str:
        assert all(part.shape == own.shape for part in parts)
        parts[0].copy_(own)
        parts[1].copy_(others[: len(own)])
        return "done"

    (made,) = (row.make(gloo) for row in REPLACEMENTS if row.name == "all_gather")
    whole = torch.zeros(4, 1)
    made(list(whole.split([1, 3])), torch.tensor([[5.0]]), group=None)
    assert whole.flatten().tolist() == [5, 7, 8, 9]
    equal = torch.zeros(2, 1)
    assert made(list(equal.split(1)), torch.tensor([[5.0]]), group=None) == "done"
    assert equal.flatten().tolist() == [5, 7]


def test_unequal_parts_are_reduced_together(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def all_reduce(tensor: torch.Tensor, **_options: object) -> None:
        tensor.mul_(2)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda _group: 1)
    (made,) = (row.make(lambda *_: "gloo") for row in REPLACEMENTS if row.name == "reduce_scatter")
    output = torch.zeros(3)
    made(output, list(torch.arange(4.0).split([1, 3])), group=None)
    assert output.tolist() == [2, 4, 6]
    assert made(output, list(torch.arange(6.0).split(3))) == "gloo"


# --- what runs in the process with the device layer -------------------------------------------


def _measure(rank: int) -> dict[str, Any]:
    import torch

    cuda: Any = torch.cuda
    float_type = torch.zeros(1, device="cuda").type()
    stream = cuda.Stream(device=cuda.current_device())
    with cuda.stream(stream) as inner:
        stream.wait_stream(cuda.current_stream())
        event = cuda.Event(enable_timing=True)
        event.record(stream)
        inner.wait_event(event)
    received = torch.zeros(2)
    torch.distributed.all_to_all_single(received, torch.ones(2), torch.tensor([2]), [2])
    names = ("get_rng_state", "set_rng_state", "synchronize", "set_device", "manual_seed")
    linear = torch.nn.Linear(2, 2)
    weight = linear.weight
    return {
        "cuda device is the cpu": cuda.current_device() == torch.device("cpu"),
        "tensors asked for on cuda are on the cpu": _all_on_cpu(),
        "types read as cuda types": float_type == "torch.cuda.FloatTensor",
        "type conversion works": _conversion_works(),
        "cuda seed makes the cpu generator repeat": _seed_repeats(),
        "fork restores the generator": _fork_restores(),
        "streams and events nest": event.query(),
        "all_to_all takes tensors as sizes": received.tolist() == [1.0, 1.0],
        "is_available is still false": not torch.cuda.is_available(),
        "torch.compile is the original": torch.compile.__module__ == "torch",
        "megatron is not compiled": _megatron_is_not_compiled(),
        "one function object per name": len({id(getattr(torch.cuda, n)) for n in names}) == 5,
        "module.cuda keeps parameters": linear.cuda(torch.cuda.current_device()).weight is weight,
        "training": _training(),
    }


def _all_on_cpu() -> bool:
    import torch

    made = [
        torch.tensor([1.0], device="cuda"),
        torch.tensor([1.0], device=torch.device("cuda", 0), pin_memory=True),
        torch.zeros(2, device="cuda:0"),
        torch.zeros(2, device=torch.cuda.current_device()).cuda().pin_memory(),
    ]
    return all(each.device.type == "cpu" for each in made)


def _conversion_works() -> bool:
    import torch

    half = torch.zeros(1).type("torch.cuda.HalfTensor")
    return half.dtype == torch.float16 and torch.zeros(1).type(torch.int32).dtype == torch.int32


def _seed_repeats() -> bool:
    import torch

    torch.cuda.manual_seed(7)
    first = torch.rand(3)
    torch.cuda.manual_seed(7)
    return torch.equal(first, torch.rand(3))


def _fork_restores() -> bool:
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    before = torch.get_rng_state()
    with get_cuda_rng_tracker().fork():
        inside = torch.rand(3)
    restored = torch.equal(before, torch.get_rng_state())
    with get_cuda_rng_tracker().fork():
        return restored and not torch.equal(inside, torch.rand(3))


def _megatron_is_not_compiled() -> bool:
    from megatron.core import jit
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu

    return jit.jit_fuser(bias_swiglu) is bias_swiglu and not hasattr(
        bias_swiglu, "_torchdynamo_orig_callable"
    )


def _training() -> dict[str, Any] | None:
    try:
        from megatron.training import arguments, initialize, training
    except ImportError:
        return None
    import inspect

    from megatron.core.datasets.utils import compile_helpers

    compile_helpers()
    return {
        "initialize": training.initialize_megatron is initialize.initialize_megatron
        and hasattr(training.initialize_megatron, "__wrapped__")
        and "allow_no_cuda" in inspect.signature(training.initialize_megatron).parameters,
        "arch": arguments.get_device_arch_version(),
        "helpers": True,
    }
