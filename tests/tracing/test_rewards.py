"""What is a reward, wherever it comes from."""

from __future__ import annotations

import math
import reprlib
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.errors import RewardError
from agentlightning.tracing.rewards import check_reward, looks_like_reward

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.integration

finite = st.floats(-1e12, 1e12) | st.integers(-(10**6), 10**6) | st.booleans()


@given(finite)
def test_any_finite_number_is_a_reward(value: float) -> None:
    assert check_reward(value, "it") == value


@given(st.dictionaries(st.text(), finite, min_size=1))
def test_finite_numbers_by_name_are_a_reward(values: dict[str, float]) -> None:
    assert check_reward(values, "it") == values


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, {"a": 1.0, "b": math.nan}, 10**400, -(10**400)], ids=reprlib.repr
)
def test_what_is_not_finite_is_an_error_and_never_zero(value: Any) -> None:
    with pytest.raises(RewardError, match=r"it.*gave -?(nan|inf), which cannot be learned from"):
        check_reward(value, "it")


@pytest.mark.parametrize("value", [None, "1.0", [1.0], {}, {"a": "x"}, {1: 1.0}, np.array([1.0, 2.0]), object()])
def test_what_is_no_number_is_an_error_and_never_zero(value: Any) -> None:
    assert not looks_like_reward(value)
    with pytest.raises(RewardError, match="which is not a reward"):
        check_reward(value, "it")


def test_numbers_of_any_kind_count() -> None:
    assert check_reward(Fraction(1, 4), "it") == 0.25


@pytest.mark.parametrize("value", [np.float32(0.5), np.array(0.5), torch.tensor(0.5)], ids=repr)
def test_scalars_of_numpy_and_torch_count(value: Any) -> None:
    assert check_reward(value, "it") == 0.5
    assert check_reward({"a": value, "b": np.array([1, 2]).any(), "c": torch.tensor(True)}, "it") == {
        "a": 0.5,
        "b": 1.0,
        "c": 1.0,
    }


@pytest.mark.parametrize("value", [np.array([0.5]), torch.tensor([0.5]), np.str_("1"), np.complex64(1)], ids=repr)
def test_arrays_and_scalars_of_other_kinds_do_not(value: Any) -> None:
    assert not looks_like_reward(value)


@pytest.mark.parametrize(
    "value", [np.array([0.5]), torch.tensor([[0.5]]), torch.tensor([0.5], requires_grad=True), Decimal("0.5")], ids=repr
)
def test_what_a_reward_model_gives_is_a_number_where_a_reward_is_given(value: Any) -> None:
    assert check_reward(value, "it") == 0.5
    assert check_reward({"a": value}, "it") == {"a": 0.5}


def test_what_has_the_shape_of_a_scalar_and_no_number_is_no_reward() -> None:
    assert not looks_like_reward(type("Dataset", (), {"shape": ()})())
