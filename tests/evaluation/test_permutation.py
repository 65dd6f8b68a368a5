"""The sign-flip p-value is the share of all sign flips that are as extreme as what was seen."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.evaluation import intervals
from agentlightning.evaluation.intervals import sign_flip_p_value


def by_hand(differences: list[float]) -> float:
    sums = [
        math.fsum(s * d for s, d in zip(signs, differences, strict=True))
        for signs in itertools.product((-1, 1), repeat=len(differences))
    ]
    return sum(abs(each) >= abs(math.fsum(differences)) - 1e-9 for each in sums) / len(sums)


@given(st.lists(st.sampled_from([-1.0, -0.3, 0.0, 0.1, 0.2, 0.7]), min_size=1, max_size=9))
@settings(max_examples=60, deadline=None)
def test_few_tasks_are_exact(differences: list[float]) -> None:
    assert sign_flip_p_value(differences) == pytest.approx(by_hand(differences))


def test_a_thousand_tasks_that_are_solved_or_not_are_exact() -> None:
    differences = [1.0] * 60 + [-1.0] * 40 + [0.0] * 900
    binomial = sum(math.comb(100, k) for k in range(60, 101)) / 2**100
    assert sign_flip_p_value(differences) == pytest.approx(2 * binomial)


def test_no_difference_is_no_evidence() -> None:
    assert sign_flip_p_value([]) == sign_flip_p_value([0.0, 0.0]) == 1.0


def test_many_values_are_drawn_and_agree_with_all_flips(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    differences = [rng.gauss(0.3, 1.0) for _ in range(12)]
    exact = sign_flip_p_value(differences)
    monkeypatch.setattr(intervals, "MOST_SUMS", 8)
    drawn = sign_flip_p_value(differences)
    assert drawn != exact
    assert drawn == pytest.approx(exact, abs=0.015)
    assert sign_flip_p_value([rng.gauss(1.0, 0.1) for _ in range(100)]) == 1 / 10_000


@pytest.mark.slow
@pytest.mark.parametrize(("tasks", "repeats"), [(50, 4), (200, 1)])
def test_an_agent_seems_different_from_itself_in_2_to_8_percent(tasks: int, repeats: int) -> None:
    rng = random.Random(tasks)
    low = 0
    for _ in range(200):
        solve = [rng.random() for _ in range(tasks)]
        once, twice = ([sum(rng.random() < p for _ in range(repeats)) / repeats for p in solve] for _ in range(2))
        low += sign_flip_p_value([b - a for a, b in zip(once, twice, strict=True)]) < 0.05
    assert 0.02 * 200 <= low <= 0.08 * 200
