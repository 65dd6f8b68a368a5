"""PPO against a plain NumPy implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.policy.losses import PPOLoss, TokenBatch

numbers = st.tuples(st.floats(-6, 0), st.floats(-6, 0), st.floats(-2, 2), st.floats(0, 1))


def batch(rows: list[tuple[float, float, float, float]]) -> TokenBatch:
    columns = torch.tensor(rows, dtype=torch.float32).T
    named = {"sampled_logprobs": columns[1], "advantages": columns[2], "weights": columns[3]}
    each = torch.arange(len(rows))
    return TokenBatch(columns[0].clone().requires_grad_(), named, call=each, rollout=each)


def ppo_in_numpy(rows: list[tuple[float, float, float, float]], low: float, high: float, dual: float | None) -> float:
    total = 0.0
    for logprob, sampled, advantage, weight in np.asarray(rows, dtype=np.float64):
        ratio = np.exp(logprob - sampled)
        objective = min(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)
        if dual is not None and advantage < 0:
            objective = max(objective, dual * advantage)
        total -= weight * objective
    return total


@given(st.lists(numbers, min_size=1, max_size=20), st.sampled_from([None, 2.0]))
def test_ppo_is_its_formula(rows: list[tuple[float, float, float, float]], dual: float | None) -> None:
    value = PPOLoss(dual_clip=dual)(batch(rows))
    assert value.loss.item() == pytest.approx(ppo_in_numpy(rows, 0.2, 0.28, dual), rel=1e-4, abs=1e-4)


def test_ppo_counts_clipped_tokens_and_their_ratio() -> None:
    rows = [(0.0, -1.0, 1.0, 1.0), (0.0, -1.0, -1.0, 1.0), (-1.0, 0.0, -1.0, 1.0), (-1.0, 0.0, 1.0, 1.0), (0, 0, 1, 1)]
    tokens = batch(rows)
    value = PPOLoss()(tokens)
    value.loss.backward()
    assert value.sums["clip_fraction"].item() == 2
    assert value.sums["ratio"].item() == pytest.approx(2 * np.e + 2 / np.e + 1)
    assert value.sums["approx_kl"].item() == pytest.approx(2 * (np.e - 2) + 2 * (1 / np.e))
    assert tokens.trained_logprobs.grad is not None
    assert (tokens.trained_logprobs.grad == 0).tolist() == [True, False, True, False, False], (
        "clipped tokens have no gradient"
    )


def test_the_loss_stays_finite_however_far_a_token_is_off() -> None:
    tokens = batch([(0.0, -500.0, -1.0, 1.0), (-500.0, 0.0, 1.0, 1.0)])
    value = PPOLoss()(tokens)
    value.loss.backward()
    assert torch.isfinite(value.loss)
    assert tokens.trained_logprobs.grad is not None
    assert torch.isfinite(tokens.trained_logprobs.grad).all()


def test_the_divergence_counts_more_and_less_likely_tokens_each_in_its_own_way() -> None:
    more, less = (PPOLoss()(batch([row])).sums["approx_kl"].item() for row in ((0, -1, 1, 1), (-1, 0, 1, 1)))
    assert (more, less) == pytest.approx((np.e - 2, 1 / np.e))
    assert PPOLoss()(batch([(-500.0, 0.0, 1.0, 1.0)])).sums["approx_kl"].item() == pytest.approx(19.0), "limited"
