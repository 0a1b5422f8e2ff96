"""A source's own state as plain JSON values, and back: from a list of known kinds, nothing pickled.

Must not import a module or call anything that a state names: the few classes of Megatron-Energon
that may come back are listed here, and only their fields are set.
"""

from __future__ import annotations

import base64
import dataclasses
import importlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["decode", "encode"]

_KIND = "__kind__"

_ENERGON = {
    "SavableDataLoaderState": "megatron.energon.savable_loader",
    "SavableDatasetCheckpoint": "megatron.energon.savable_loader",
    "SavableDatasetState": "megatron.energon.savable_loader",
    "SliceState": "megatron.energon.flavors.webdataset.sample_loader",
    "SystemRngState": "megatron.energon.rng",
    "FlexState": "megatron.energon.state",
}
"""Classes of megatron-energon 7 that a loader's state consists of, and where they are."""

_MAX_DEPTH = 64


def encode(value: Any, *, owner: str) -> Any:
    """Return a state as JSON values; what it was is kept in objects with the key `__kind__`.

    Args:
        value: the state.
        owner: whose, for errors.

    Raises:
        ValueError: something in it is of no known kind.
    """
    return _encode(value, owner, depth=0)


def decode(value: Any) -> Any:
    """Inverse of `encode`; the value comes from a file and is not trusted.

    Raises:
        ValueError: it is not what `encode` returns, or megatron-energon is missing.
    """
    try:
        return _decode(value)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the source's state is damaged ({type(error).__name__}: {error}): restore the file, "
            "or start the data anew (--finetune)"
        ) from error


def _encode(value: Any, owner: str, *, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise _refused(owner, f"is nested deeper than {_MAX_DEPTH} levels")

    def inner(item: Any) -> Any:
        return _encode(item, owner, depth=depth + 1)

    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_KIND: "float", "text": repr(value)}
    if type(value) is list:
        return [inner(item) for item in value]
    if type(value) is tuple:
        return {_KIND: "tuple", "items": [inner(item) for item in value]}
    if isinstance(value, (bytes, bytearray)):
        return {_KIND: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return inner(value.item())
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {_KIND: "array", **_array(value)}
    if isinstance(value, torch.Tensor) and value.dtype is not torch.bfloat16:
        return {_KIND: "tensor", **_array(value.detach().cpu().numpy())}
    name = type(value).__name__
    if _ENERGON.get(name) == type(value).__module__:
        if isinstance(value, dict):
            return {_KIND: name, "items": [[inner(k), inner(v)] for k, v in value.items()]}
        names = [one.name for one in dataclasses.fields(value)]
        return {_KIND: name, "fields": {one: inner(getattr(value, one)) for one in names}}
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value) and _KIND not in value:
            return {key: inner(item) for key, item in value.items()}
        return {_KIND: "dict", "items": [[inner(k), inner(v)] for k, v in value.items()]}
    raise _refused(owner, f"holds a {type(value).__module__}.{type(value).__qualname__}")


def _refused(owner: str, what: str) -> ValueError:
    return ValueError(
        f"the state of {owner} {what}, which cannot be saved as plain values: return numbers, "
        "texts, bytes, arrays, lists and mappings of them from state_dict()"
    )


def _array(value: np.ndarray[Any, Any]) -> dict[str, Any]:
    data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {"dtype": value.dtype.str, "shape": list(value.shape), "base64": data}


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: _decode(item) for key, item in value.items()}
    kind = value[_KIND]
    if kind == "float":
        return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[value["text"]]
    if kind == "tuple":
        return tuple(_decode(item) for item in value["items"])
    if kind == "dict":
        return {_decode(k): _decode(v) for k, v in value["items"]}
    if kind == "bytes":
        return base64.b64decode(value["base64"], validate=True)
    if kind in ("array", "tensor"):
        dtype = np.dtype(value["dtype"])
        if dtype.kind not in "biuf":
            raise ValueError(f"the source's state holds an array of {dtype}: the file was changed")
        data = base64.b64decode(value["base64"], validate=True)
        array = np.frombuffer(data, dtype=dtype).reshape(value["shape"]).copy()
        return torch.from_numpy(array) if kind == "tensor" else array
    if kind not in _ENERGON:
        raise ValueError(
            f"the source's state holds a value of kind {str(kind)[:80]!r}, which is not known: it "
            "was written by another version of odb_megatron, or changed"
        )
    return _energon(kind, value)


def _energon(name: str, value: Mapping[str, Any]) -> Any:
    try:
        cls = getattr(importlib.import_module(_ENERGON[name]), name)
    except ImportError as error:
        raise ValueError(
            "the source's state is of a Megatron-Energon loader and megatron-energon is not "
            "installed: install it as it was when the state was saved"
        ) from error
    if "items" in value:
        return cls({_decode(k): _decode(v) for k, v in value["items"]})
    return cls(**{key: _decode(item) for key, item in value["fields"].items()})
