"""Interpolated proximal log-probabilities: decoupled PPO as a literal float64 transcription reads, to 1e-9."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.policy.losses import TokenBatch, token_losses
from agentlightning.policy.mismatch import corrections
from agentlightning.policy.update.updater import corrected_tokens, interpolated, sum_of_losses


def literal(now: float, sampled: float, behind: int, advantage: float, mismatch: str) -> tuple[float, float]:
    """The weight and the loss of a token that was sampled `behind` versions before the one the update starts from."""
    v_theta, v_behave = behind + 1, 0
    a = (v_theta - 1 - v_behave) / (v_theta - v_behave)
    proximal = sampled + a * (now - sampled)
    weight = math.exp(proximal - sampled)
    if mismatch == "truncate":
        weight = min(weight, 2.0)
    elif mismatch == "icepop":
        weight = weight if 0.5 <= weight <= 2.0 else 0.0
    else:
        weight = 1.0
    ratio = math.exp(now - proximal)
    objective = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
    return weight, -weight * (max(objective, 1.5 * advantage) if advantage < 0 else objective)


@pytest.mark.parametrize("mismatch", ["truncate", "icepop", "off"])
@given(seed=st.integers(0, 10_000))
def test_the_loss_and_its_weights_are_the_formula(mismatch: str, seed: int) -> None:
    draw = random.Random(seed)
    found: list[Any] = [
        (draw.uniform(-3, -0.1), draw.uniform(-3, -0.1), draw.randint(0, 4), draw.uniform(-2, 2)) for _ in range(12)
    ]
    now, sampled, behind, advantages = (torch.tensor(each, dtype=torch.float64) for each in zip(*found, strict=True))
    tokens = TokenBatch(
        now.requires_grad_(),
        {
            "sampled_logprobs": sampled,
            "advantages": advantages,
            "weights": torch.ones(12, dtype=torch.float64),
            "interpolation": behind / (behind + 1),
        },
        call=torch.zeros(12, dtype=torch.int64),
        rollout=torch.zeros(12, dtype=torch.int64),
    )
    made, sums, count = corrected_tokens(interpolated(tokens), corrections(mismatch))
    loss = sum_of_losses(token_losses({"type": "ppo", "dual_clip": 1.5}), made)[0]
    expected = [literal(*each, mismatch) for each in found]
    assert loss.item() == pytest.approx(sum(each for _, each in expected), rel=1e-9, abs=1e-9)
    assert count == 12
    assert sums["mismatch_weight"] == pytest.approx(sum(weight for weight, _ in expected), rel=1e-9)
    assert sums["proximal_differs"] == sum(each[2] > 0 for each in found)
    assert not made.columns["proximal_logprobs"].requires_grad
