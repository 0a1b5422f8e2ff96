"""`odb_megatron.data.plain_state`: states as JSON, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odb_megatron.data.plain_state import decode, encode

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.integers() | st.text() | st.tuples(st.integers(), st.text())
values = st.recursive(
    scalars | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner)
        | st.dictionaries(st.sampled_from(["__kind__", "a"]), inner)
    ),
    max_leaves=12,
)


def _there_and_back(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value, owner="the source"), allow_nan=False)))


@given(values)
def test_values_come_back_with_their_types(value: Any) -> None:
    found = _there_and_back(value)
    assert found == value
    assert repr(found) == repr(value)


def test_arrays_tensors_and_not_a_number() -> None:
    state = torch.Generator().manual_seed(3).get_state()
    assert torch.equal(_there_and_back(state), state)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    found = _there_and_back({"array": array, "one": array[0, 1]})
    assert found["array"].dtype == array.dtype
    assert found["array"].tolist() == array.tolist()
    assert found["one"] == 1.0
    assert math.isnan(_there_and_back(math.nan))


@dataclass
class FlexState:
    """Named as a class of Megatron-Energon's, and none of it."""

    at: int


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "the state of the source holds a builtins.object, which cannot be saved"),
        ({"a": [FlexState(1)]}, r"holds a test_plain_state\.FlexState"),
        (lambda: 0, "holds a builtins.function"),
    ],
)
def test_other_kinds_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode(value, owner="the source")


def test_a_deep_state_is_refused() -> None:
    value: Any = []
    for _ in range(100):
        value = [value]
    with pytest.raises(ValueError, match="nested deeper than 64 levels"):
        encode(value, owner="the source")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"__kind__": "os.system"}, "a value of kind 'os.system', which is not known"),
        ({"__kind__": ["x"]}, "damaged"),
        ({"__kind__": "tuple"}, r"damaged \(KeyError: 'items'\)"),
        ({"__kind__": "array", "dtype": "O", "shape": [1], "base64": ""}, "holds an array of"),
        ({"__kind__": "float", "text": "1e3"}, "damaged"),
    ],
)
def test_a_changed_state_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(value)
