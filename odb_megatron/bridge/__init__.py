"""Online dynamic batching in Megatron-Bridge (NeMo): a dataset provider and config overrides.

`enable` switches it on in a recipe; `python -m odb_megatron.bridge.run_recipe` does
so from the command line. Importing this imports neither torch nor Bridge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from odb_megatron.bridge.activation import enable

__all__ = ["enable"]


def __getattr__(name: str) -> Any:
    if name == "enable":
        try:
            from odb_megatron.bridge.activation import enable
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("megatron"):
                raise
            raise ImportError(
                f"odb_megatron.bridge needs megatron-bridge 0.6 or newer, and there is no "
                f"{error.name}: pip install 'megatron-bridge>=0.6'"
            ) from error
        return enable
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
