"""Which attention runs packed samples, by `--transformer-impl` and `--attention-backend`.

Transformer Engine's layers keep Megatron's own `TEDotProductAttention`; Megatron's local layers
refuse packed samples, so theirs is replaced (`packed_attention`). Imports neither torch nor
Megatron before a choice is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Attention", "absent", "select"]

_HOPPER = (9, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """A choice.

    Attributes:
        name: `te`, `flash3`, `flash` or `torch`; other hosts have names of their own.
        reason: why, for the line that is printed at start-up.
    """

    name: str
    reason: str

    def install(self) -> Callable[[], None]:
        """Put it into the local layers that are built from here on; returns what undoes that.

        Raises:
            ValueError: this Megatron builds its local layers in another way.
        """
        if self.name not in ("flash3", "flash", "torch"):
            return lambda: None
        from odb_megatron.megatron import packed_attention
        from odb_megatron.megatron.hooks import REPLACED, Replacements

        core_attention, replaced = packed_attention.CLASSES[self.name], Replacements()

        def chosen(_provider: Any) -> type[Any]:
            return core_attention

        # All specs of GPT layers (dense, experts, multi-latent, prediction) ask this one method.
        replaced.replace(REPLACED["LocalSpecProvider.core_attention"], lambda _: chosen)
        return replaced.undo


def absent() -> dict[str, str]:
    """Return each kernel's name, and why it is not here; empty where it is."""
    packages = {
        "te": ("transformer_engine", "pip install 'transformer-engine[pytorch]'"),
        "flash3": ("flash_attn_interface", "hopper/ of flash-attn's repository"),
        "flash": ("flash_attn", "pip install flash-attn"),
    }
    return {
        name: "" if importlib.util.find_spec(module) else f"{module} is not installed ({hint})"
        for name, (module, hint) in packages.items()
    } | {"torch": ""}


def select(
    args: argparse.Namespace, *, device_type: str, capability: tuple[int, int] | None = None
) -> Attention:
    """Choose for validated arguments.

    Args:
        args: Megatron's; what is absent is at its default.
        device_type: `cuda` or `cpu`.
        capability: of the CUDA device.

    Raises:
        ValueError: what is asked for cannot run here.
    """
    backend = getattr(getattr(args, "attention_backend", None), "name", "auto")
    why_not = absent()
    if getattr(args, "transformer_impl", "local") == "transformer_engine":
        missing = why_not["te"] or ("" if device_type == "cuda" else "there is no CUDA device")
        if missing:
            raise ValueError(
                f"--transformer-impl transformer_engine cannot run here: {missing}. Mend that, or "
                "use --transformer-impl local"
            )
        return Attention(name="te", reason=f"Transformer Engine, --attention-backend {backend}")
    if backend == "fused":
        raise ValueError(
            "--attention-backend fused is Transformer Engine's: use --transformer-impl "
            "transformer_engine with it, or --attention-backend flash in local layers"
        )
    if backend == "unfused" or (backend != "flash" and device_type == "cpu"):
        said = "one call per sample; on a GPU each waits for the device"
        return Attention(name="torch", reason=f"torch scaled_dot_product_attention, {said}")
    asked = f"local layers, --attention-backend {backend}"
    unfit = _why_no_flash(args, device_type)
    if unfit:
        raise ValueError(
            f"flash-attn cannot run packed samples ({asked}): {unfit}. Mend that, or use "
            "--transformer-impl transformer_engine, or --attention-backend unfused (slow)"
        )
    has_dropout = bool(getattr(args, "attention_dropout", 0))
    if not why_not["flash3"] and capability == _HOPPER and not has_dropout:
        return Attention(name="flash3", reason=f"flash-attn 3 ({asked})")
    if why_not["flash"]:
        hint = " (flash-attn 3 has no --attention-dropout)" if not why_not["flash3"] else ""
        raise ValueError(
            f"no flash-attn for packed samples ({asked}): {why_not['flash']}{hint}. Or use "
            "--transformer-impl transformer_engine, or --attention-backend unfused (slow)"
        )
    return Attention(name="flash", reason=f"flash-attn 2 ({asked})")


def _why_no_flash(args: argparse.Namespace, device_type: str) -> str:
    if device_type != "cuda":
        return "there is no CUDA device"
    if not (getattr(args, "bf16", False) or getattr(args, "fp16", False)):
        return "it computes in half precision, and neither --bf16 nor --fp16 is given"
    if (getattr(args, "context_parallel_size", None) or 1) > 1:
        return "it has no --context-parallel-size above 1"
    return ""
