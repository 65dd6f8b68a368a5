"""GSPO against the paper's formula, written down call by call in plain Python."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from agentlightning.policy.losses import GSPOLoss


def objective(calls: list[list[tuple[float, float]]], advantages: list[float], low: float, high: float) -> float:
    """arXiv:2507.18071, equations 5 and 7: the mean over responses of min(s A, clip(s) A)."""
    total = 0.0
    for tokens, advantage in zip(calls, advantages, strict=True):
        likelihood = math.prod(math.exp(now) for now, _ in tokens)
        s = (likelihood / math.prod(math.exp(old) for _, old in tokens)) ** (1 / len(tokens))
        total += min(s * advantage, max(min(s, 1 + high), 1 - low) * advantage)
    return total / len(calls)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("order", ["together", "interleaved"])
def test_gspo_is_its_formula(batch: Callable[..., Any], seed: int, order: str) -> None:
    draw = random.Random(seed)
    calls = [[(draw.uniform(-3, -1), draw.uniform(-3, -1)) for _ in range(draw.randint(1, 6))] for _ in range(4)]
    advantages = [draw.uniform(-2, 2) for _ in calls]
    rows = [
        ((now, old, advantages[c], 1 / len(calls) / len(tokens)), c)
        for c, tokens in enumerate(calls)
        for now, old in tokens
    ]
    if order == "interleaved":
        draw.shuffle(rows)
    tokens = batch([row for row, _ in rows], [c for _, c in rows])
    value = GSPOLoss(clip_low=0.2, clip_high=0.3)(tokens)
    assert value.loss.item() == pytest.approx(-objective(calls, advantages, 0.2, 0.3), rel=1e-5)


def test_a_call_is_clipped_as_a_whole_and_else_every_token_has_the_same_gradient(batch: Callable[..., Any]) -> None:
    clipped, kept = [(-1.0, -1.5, 1.0, 0.25)] * 2, [(-1.0, -3.0, -1.0, 0.25), (-2.0, 0.0, -1.0, 0.25)]
    tokens = batch([*clipped, *kept, kept[0]], [0, 0, 1, 1, 2])
    value = GSPOLoss(clip_low=0.1, clip_high=0.1)(tokens)
    value.loss.backward()
    gradient = tokens.trained_logprobs.grad.tolist()
    assert gradient == pytest.approx([0.0, 0.0, 0.25, 0.25, 0.25 * math.exp(2)]), "ratios e^0.5, clipped, 1 and e^2"
    assert value.sums["clip_fraction"].item() == 2


def test_gspo_learns(probability_of_rewarded_answer: Callable[[str], tuple[float, float]]) -> None:
    before, after = probability_of_rewarded_answer("gspo")
    assert before < 0.7 < 0.9 < after
