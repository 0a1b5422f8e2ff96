"""Lets Megatron-Bridge 0.6 run on a CPU with gloo, for tests: what stands in for hardware packages.

It comes on top of `cpu_device`: packages that Bridge imports and that need a GPU to be built get
modules with the names it asks for, as far as they are not installed; none of them does any work
in the runs tested. What cannot be stood in for (Transformer Engine's kernels, FP8, NVRx) is not
there.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from odb_megatron.testing import cpu_device

__all__ = ["activate", "local_layers"]

_LORA = "megatron.bridge.peft.lora_layers"
"""The one module that imports Transformer Engine unconditionally."""


def activate() -> None:
    """Make Bridge importable, and runnable with `dist.distributed_backend="gloo"`, in this process.

    A second call does nothing. Call it before anything of Bridge is imported.

    Raises:
        RuntimeError: see `cpu_device.activate`.
    """
    if any(isinstance(finder, _LoraFinder) for finder in sys.meta_path):
        return
    for package, modules in _PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            sys.modules.update(_made(modules))
    sys.meta_path.insert(0, _LoraFinder())
    cpu_device.activate()
    from megatron.core import utils

    utils.tex = SimpleNamespace(thd_get_partitioned_indices=_partitioned_indices)
    _mend_initialisation()


def local_layers(config: Any) -> Any:
    """Layer spec for `cfg.model.transformer_layer_spec`: Megatron's local layers, packed attention.

    Bridge's own needs Transformer Engine.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from odb_megatron.megatron.attention import Attention

    undo = Attention(name="torch", reason="the only one for a CPU").install()
    try:
        return get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm, normalization=config.normalization
        )
    finally:
        undo()


def _mend_initialisation() -> None:
    """For the reasons of `cpu_device.REPLACEMENTS`: Bridge has functions of its own."""
    from megatron.bridge.training import initialize, setup

    original = initialize.initialize_megatron

    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "allow_no_cuda": True})

    def no_fusion(*_args: object, **_kwargs: object) -> None:
        return None

    def no_compilation() -> None:
        return None

    setup.initialize_megatron = initialize_megatron
    setup.set_jit_fusion_options = no_fusion
    initialize.compile_helpers = no_compilation


def _partitioned_indices(cu_seqlens: Any, total: int, size: int, rank: int) -> Any:
    """As Transformer Engine's `thd_get_partitioned_indices`."""
    import torch

    from odb_megatron.data.thd import chunk_indices

    assert int(cu_seqlens[-1]) == total
    return torch.from_numpy(chunk_indices(cu_seqlens.numpy(), size=size, rank=rank))


def _absent(name: str) -> type[Any]:
    def refuse(self: Any, *_args: object, **_kwargs: object) -> None:
        raise RuntimeError(f"{name} is a stand-in for a package that needs a GPU")

    return type(name, (), {"__init__": refuse})


def _nothing(*_args: object, **_kwargs: object) -> None:
    return None


def _made(modules: Mapping[str, Mapping[str, Any]]) -> dict[str, ModuleType]:
    """Modules by name, each an attribute of its parent."""
    made = {}
    for name, values in modules.items():
        module = ModuleType(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        vars(module).update(values)
        made[name] = module
        parent, _, child = name.rpartition(".")
        if parent in made:
            setattr(made[parent], child, module)
    return made


_PACKAGES: dict[str, dict[str, dict[str, Any]]] = {
    "nvidia_resiliency_ext": {
        "nvidia_resiliency_ext": {"__version__": "0"},
        "nvidia_resiliency_ext.inprocess": {"CallWrapper": _absent("CallWrapper")},
    },
    "modelopt": {
        "modelopt": {"__version__": "0"},
        "modelopt.torch": {},
        "modelopt.torch.distill": {"DistillationModel": _absent("DistillationModel")},
        "modelopt.torch.distill.plugins": {},
        "modelopt.torch.distill.plugins.megatron": {
            "DistillationConfig": _absent("DistillationConfig"),
            "get_tensor_shapes_adjust_fn_for_distillation": _nothing,
        },
        "modelopt.torch.opt": {
            "ModeloptStateManager": SimpleNamespace(is_converted=lambda _model: False)
        },
        "modelopt.torch.opt.plugins": {
            "restore_modelopt_state": _nothing,
            "save_modelopt_state": _nothing,
            "save_sharded_modelopt_state": _nothing,
        },
        "modelopt.torch.opt.plugins.mcore_dist_checkpointing": {
            "_load_extra_state_from_sharded_checkpoint": _nothing
        },
    },
}

_TRANSFORMER_ENGINE: dict[str, dict[str, Any]] = {
    "transformer_engine": {},
    "transformer_engine.pytorch": {
        "Linear": _absent("Linear"),
        "LayerNormLinear": _absent("LayerNormLinear"),
        "ops": SimpleNamespace(Sequential=_absent("Sequential")),
    },
}


class _LoraFinder(importlib.abc.MetaPathFinder):
    """Shows Transformer Engine to Bridge's LoRA layers alone.

    Megatron takes other paths, which fail, as soon as it can import it.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _LORA:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                made = _made(_TRANSFORMER_ENGINE)
                sys.modules.update(made)
                try:
                    load(module)
                finally:
                    for name in made:
                        sys.modules.pop(name, None)

            setattr(spec.loader, "exec_module", exec_module)  # noqa: B010
        return spec
