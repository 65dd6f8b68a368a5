"""The clipped value loss against a literal transcription in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from agentlightning.policy.losses import TokenBatch, ValueLoss, token_losses

Rows = list[tuple[float, float, float, float]]
"""(value now, value before, return, weight) of each token."""
numbers = st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.floats(-2, 2), st.floats(0, 1))


def batch(rows: Rows) -> TokenBatch:
    now, before, returns, weights = torch.tensor(rows, dtype=torch.float64).T
    each = torch.arange(len(rows))
    columns = {"values": before, "returns": returns, "weights": weights}
    return TokenBatch(torch.zeros(len(rows)), columns, call=each, rollout=each, values=now.clone().requires_grad_())


def value_loss_in_numpy(rows: Rows, clip: float | None) -> tuple[float, NDArray[np.float64]]:
    """The loss, and its derivative by each value."""
    total, slopes = 0.0, []
    for now, before, returns, weight in np.asarray(rows, dtype=np.float64):
        free, slope = (now - returns) ** 2, 2 * (now - returns)
        if clip is not None:
            near = np.clip(now, before - clip, before + clip)
            if (near - returns) ** 2 > free:
                free, slope = (near - returns) ** 2, 0.0
        total += weight * free / 2
        slopes.append(weight * slope / 2)
    return total, np.array(slopes)


@given(st.lists(numbers, min_size=1, max_size=20), st.sampled_from([None, 0.2, 1.0]))
def test_the_value_loss_is_its_formula(rows: Rows, clip: float | None) -> None:
    tokens = batch(rows)
    found = ValueLoss(clip=clip)(tokens)
    found.loss.backward()
    expected, slopes = value_loss_in_numpy(rows, clip)
    assert found.loss.item() == pytest.approx(expected, abs=1e-9)
    assert tokens.values is not None
    assert tokens.values.grad is not None
    apart = [abs(now - before) for now, before, *_ in rows]
    if clip is None or all(abs(each - clip) > 1e-6 for each in apart):  # At the edge either slope is right.
        np.testing.assert_allclose(tokens.values.grad.numpy(), slopes, atol=1e-9)


def test_a_value_that_moved_far_towards_its_return_is_not_moved_further() -> None:
    tokens = batch([(0.5, 0.0, 1.0, 1.0), (0.1, 0.0, 1.0, 1.0), (0.5, 0.0, -1.0, 1.0)])
    found = ValueLoss(clip=0.2)(tokens)
    found.loss.backward()
    assert tokens.values is not None
    assert tokens.values.grad is not None
    assert [slope == 0 for slope in tokens.values.grad.tolist()] == [True, False, False]
    assert found.sums["value_clip_fraction"].item() == 1


@given(st.lists(numbers, min_size=2, max_size=20), st.integers(1, 19))
def test_explained_variance_is_that_of_all_tokens_however_they_are_divided(rows: Rows, at: int) -> None:
    before, returns = np.array(rows)[:, 1], np.array(rows)[:, 2]
    parts = [part for part in (rows[:at], rows[at:]) if part]
    sums = [ValueLoss()(batch(part)).sums for part in parts]
    means = {name: sum(float(each[name]) for each in sums) / len(rows) for name in sums[0]}
    found = ValueLoss().summary(means)
    if returns.var() < 1e-4:
        return
    assert found["explained_variance"] == pytest.approx(1 - (returns - before).var() / returns.var(), abs=1e-4)
    assert set(found) == {"value_loss", "value_clip_fraction", "return_mean", "explained_variance"}


def test_returns_that_are_all_equal_have_no_variance_to_explain() -> None:
    found = ValueLoss()(batch([(0.5, 0.0, 1.0, 1.0)] * 3))
    means = {name: float(each) / 3 for name, each in found.sums.items()}
    assert "explained_variance" not in ValueLoss().summary(means)


def test_it_is_found_by_name_and_adds_up_with_half_its_weight() -> None:
    (loss,) = token_losses({"type": "value", "clip": 0.5})
    assert (loss.coefficient, loss.model_dump()["clip"], loss.trains_zero_advantage) == (0.5, 0.5, True)
