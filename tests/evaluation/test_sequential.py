"""The sequential test: it may stop at any pair, and two equal agents are still told apart at most alpha of the time."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.errors import ConfigError, RewardError
from agentlightning.evaluation.sequential import PairedSequentialTest, fewest_pairs

VALUES = st.sampled_from([-1.0, -0.75, -0.3, 0.0, 0.1, 0.2, 0.5, 1.0])


def run(test: PairedSequentialTest, differences: list[float]) -> PairedSequentialTest:
    for each in differences:
        if test.update(each) != "continue":
            break
    return test


def test_a_clear_gain_is_found_early_and_a_clear_loss_is_its_mirror() -> None:
    better = run(PairedSequentialTest(max_pairs=60), [1.0] * 60)
    worse = run(PairedSequentialTest(max_pairs=60), [-1.0] * 60)
    assert (better.decision, better.pairs) == ("better", 11)
    assert (worse.decision, worse.pairs) == ("worse", 11)
    assert better.p_value == worse.p_value < 0.05
    assert 0 < better.interval[0] < better.mean <= better.interval[1] <= 1
    assert worse.interval == (-better.interval[1], -better.interval[0])


def test_equal_rewards_exhaust_the_pairs() -> None:
    test = run(PairedSequentialTest(max_pairs=10), [0.0] * 10)
    assert (test.decision, test.pairs, test.p_value, test.mean) == ("exhausted", 10, 1.0, 0.0)


def test_without_a_maximum_the_test_goes_on_until_it_decides() -> None:
    assert run(PairedSequentialTest(), [0.5, -0.5] * 40).decision == "continue"
    assert run(PairedSequentialTest(), [0.5] * 80).decision == "better"


@given(st.lists(st.sampled_from([0.0, 0.25, 0.3, 1.0]), min_size=8, max_size=9), st.sampled_from([0.05, 0.2]))
@settings(max_examples=10, deadline=None)
def test_over_all_flips_of_the_differences_at_most_alpha_decide(sizes: list[float], alpha: float) -> None:
    flips = itertools.product((-1, 1), repeat=len(sizes))
    tests = [
        run(PairedSequentialTest(alpha, max_pairs=len(sizes)), [s * d for s, d in zip(signs, sizes, strict=True)])
        for signs in flips
    ]
    assert sum(test.decision != "exhausted" for test in tests) <= alpha * len(tests)
    for level in (0.01, alpha, 0.3):
        assert sum(test.p_value <= level for test in tests) <= level * len(tests)


@given(st.lists(VALUES, min_size=6, max_size=20))
@settings(max_examples=5, deadline=None)
def test_interval_p_value_and_decision_agree(differences: list[float]) -> None:
    test = run(PairedSequentialTest(max_pairs=20), differences)
    low, high = test.interval
    assert -1 <= low <= test.mean <= high <= 1
    assert (test.p_value < 0.05) == (test.decision in ("better", "worse"))
    assert (low > 0) == (test.decision == "better")
    assert (high < 0) == (test.decision == "worse")


def test_many_different_values_stay_within_the_level_and_do_not_depend_on_the_unit() -> None:
    rng = random.Random(0)
    differences = [rng.gauss(0.1, 0.2) for _ in range(60)]
    one = run(PairedSequentialTest(max_pairs=60), differences)
    scaled = run(PairedSequentialTest(bounds=(-100, 100), max_pairs=60), [100 * each for each in differences])
    assert (one.decision, one.pairs) == (scaled.decision, scaled.pairs) == ("better", one.pairs)
    assert math.isclose(one.p_value, scaled.p_value, rel_tol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [40, 100])
def test_an_agent_compared_with_itself_is_told_apart_in_2_to_8_percent(tasks: int) -> None:
    rng = random.Random(tasks)
    decided = 0
    for _ in range(200):
        solve = [rng.random() for _ in range(tasks)]
        differences = [float(rng.random() < p) - float(rng.random() < p) for p in solve]
        decided += run(PairedSequentialTest(max_pairs=tasks), differences).p_value < 0.05
    assert 0.02 * 200 <= decided <= 0.08 * 200


def test_a_test_that_has_ended_takes_no_more_pairs() -> None:
    test = run(PairedSequentialTest(max_pairs=60), [1.0] * 60)
    with pytest.raises(ConfigError, match="ended as 'better' after 11 pairs"):
        test.update(0.0)


@pytest.mark.parametrize("difference", [1.5, -1.01, math.nan, math.inf])
def test_differences_out_of_bounds_are_refused(difference: float) -> None:
    with pytest.raises(RewardError, match="out of the bounds"):
        PairedSequentialTest().update(difference)


def test_settings_that_can_show_nothing_are_refused() -> None:
    assert fewest_pairs(0.05) == 6
    assert run(PairedSequentialTest(max_pairs=6), [1.0] * 6).decision == "better"
    with pytest.raises(ConfigError, match=r"max_pairs=5 can show no difference at alpha=0.05.*at least 6"):
        PairedSequentialTest(max_pairs=5)
    with pytest.raises(ConfigError, match="alpha=1 is not between"):
        PairedSequentialTest(alpha=1)
    with pytest.raises(ConfigError, match="bounds="):
        PairedSequentialTest(bounds=(0.0, 1.0))
