"""CISPO against the paper's formula and its gradient, in plain Python."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from agentlightning.policy.losses import CISPOLoss


@pytest.mark.parametrize("low", [None, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_cispo_is_its_formula_and_the_weight_has_no_gradient(
    batch: Callable[..., Any], seed: int, low: float | None
) -> None:
    """arXiv:2506.13585, equations 4 and 5."""
    draw = random.Random(seed)
    rows = [(draw.uniform(-3, 0), draw.uniform(-3, 0), draw.uniform(-2, 2), draw.random()) for _ in range(12)]
    weights = [max(min(math.exp(now - old), 1.5), 0 if low is None else 1 - low) for now, old, _, _ in rows]
    tokens = batch(rows)
    value = CISPOLoss(clip_low=low, clip_high=0.5)(tokens)
    value.loss.backward()
    gradient = [-share * w * advantage for w, (_, _, advantage, share) in zip(weights, rows, strict=True)]
    assert value.loss.item() == pytest.approx(sum(g * row[0] for g, row in zip(gradient, rows, strict=True)), rel=1e-4)
    assert tokens.trained_logprobs.grad.tolist() == pytest.approx(gradient, rel=1e-5)


def test_a_token_beyond_the_bound_still_learns(batch: Callable[..., Any]) -> None:
    tokens = batch([(0.0, -9.0, 1.0, 1.0)])
    value = CISPOLoss(clip_high=4.0)(tokens)
    value.loss.backward()
    assert tokens.trained_logprobs.grad.tolist() == [-5.0]
    assert value.sums["clip_fraction"].item() == 1


def test_cispo_learns(probability_of_rewarded_answer: Callable[[str], tuple[float, float]]) -> None:
    before, after = probability_of_rewarded_answer("cispo")
    assert before < 0.7 < 0.9 < after
