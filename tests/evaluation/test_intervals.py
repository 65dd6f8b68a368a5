"""Promises about how sure a result is."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.errors import ConfigError, RewardError
from agentlightning.evaluation.intervals import compare_tasks, mean_interval, paired_gain, student_quantile

Draw = Callable[[random.Random], float]


def changed(worse: float, better: float) -> Draw:
    """A pass-or-fail task whose result changes for the worse or the better with these probabilities."""

    def draw(rng: random.Random) -> float:
        chance = rng.random()
        return -1.0 if chance < worse else 1.0 if chance < worse + better else 0.0

    return draw


CASES: list[tuple[str, Draw, float]] = [
    ("nothing ever changes", changed(0, 0), 0.0),
    ("one in a hundred gets better", changed(0, 0.01), 0.01),
    ("one in fifty gets worse", changed(0.02, 0), -0.02),
    ("few change, both ways", changed(0.02, 0.02), 0.0),
    ("one in ten gets better", changed(0, 0.1), 0.1),
    ("half get better", changed(0.05, 0.5), 0.45),
    ("nearly all get better", changed(0, 0.98), 0.98),
    ("all but one in two hundred get better", changed(0, 0.995), 0.995),
    ("everything changes", changed(0.3, 0.7), 0.4),
    ("graded", lambda rng: rng.betavariate(5, 2) - rng.betavariate(2, 2), 5 / 7 - 1 / 2),
    ("graded, mostly at the ends", lambda rng: rng.betavariate(8, 0.2) - rng.betavariate(0.3, 0.3), 8 / 8.2 - 0.5),
    ("a steady gain and rare collapse", lambda rng: -1.0 if rng.random() < 0.03 else 0.8, 0.8 * 0.97 - 0.03),
]


@pytest.mark.parametrize("tasks", [16, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("draw", "truth"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_nineteen_times_in_twenty_the_interval_holds_the_truth(draw: Draw, truth: float, tasks: int) -> None:
    rng = random.Random(0)
    trials = 400 if len({draw(rng) for _ in range(8)}) < 8 else 40
    hits = 0
    for _ in range(trials):
        gains = [draw(rng) for _ in range(tasks)]
        low, high = paired_gain([max(0.0, -d) for d in gains], [max(0.0, d) for d in gains]).interval
        hits += low - 1e-9 <= truth <= high + 1e-9
    assert hits / trials >= (0.93 if trials == 400 else 0.875)


@pytest.mark.parametrize("rate", [0.003, 0.02, 0.1, 0.5, 0.9, 0.99])
def test_the_interval_of_a_success_rate_holds_the_truth(rate: float) -> None:
    rng = random.Random(1)
    trials = 600
    hits = 0
    for _ in range(trials):
        low, high = mean_interval([float(rng.random() < rate) for _ in range(64)])
        hits += low <= rate <= high
    assert hits / trials >= 0.93


def test_a_gain_says_what_was_before_and_after() -> None:
    gain = paired_gain([0.0] * 128, [1.0] * 122 + [0.0] * 6)
    assert (gain.before, gain.after, gain.gain, gain.tasks) == (0.0, 122 / 128, 122 / 128, 128)
    assert gain.interval[0] > 0.89
    assert gain.interval[1] < 0.99


def test_equal_gains_are_no_certainty_and_more_tasks_are_more() -> None:
    widths: list[float] = []
    for tasks in (8, 32, 128, 512):
        low, high = paired_gain([0.5] * tasks, [0.5] * tasks).interval
        assert low < 0 < high
        widths.append(high - low)
    assert widths == sorted(widths, reverse=True)
    assert 0.02 < widths[2] < 0.05


def test_an_improvement_of_all_tasks_ends_at_the_largest_gain_there_can_be() -> None:
    low, high = paired_gain([0.0] * 128, [1.0] * 128).interval
    assert 0.94 < low < 0.97
    assert high == 1.0


def test_pairing_is_sharper_than_two_separate_means() -> None:
    rng = random.Random(2)
    before = [rng.random() for _ in range(200)]
    after = [min(1.0, value + 0.05) for value in before]
    assert paired_gain(before, after).interval[0] > 0.02
    assert mean_interval(after)[0] < mean_interval(before)[1]


def test_rewards_on_another_scale_are_measured_on_that_scale() -> None:
    small = paired_gain([0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0])
    large = paired_gain([0.0, 100.0, 0.0, 100.0], [100.0, 100.0, 0.0, 100.0])
    assert large.interval == pytest.approx([100 * bound for bound in small.interval])
    assert mean_interval([-1.0] * 10)[0] == -1.0
    assert mean_interval([-1.0] * 10)[1] > -1.0


def test_known_bounds_are_used() -> None:
    assert mean_interval([0.5] * 20, bounds=(0.4, 0.6))[1] < mean_interval([0.5] * 20)[1]
    with pytest.raises(RewardError, match=r"rewards from 0.0 to 2.0 are out of the bounds \(0, 1\)"):
        mean_interval([0.0, 2.0], bounds=(0, 1))


def test_the_interval_is_its_formula() -> None:
    """The one in the module's docstring, with the two imaginary tasks written out."""
    for values, padded in (([0.5], [0.5, 0, 1]), ([0.25, 0.5, 0.75, 0.5], [0.25, 0.5, 0.75, 0.5, 0, 1])):
        center = sum(padded) / len(padded)
        variance = sum(value**2 for value in padded) / len(padded) - center**2
        half = student_quantile(0.75, max(1, len(values) - 1)) * math.sqrt(variance / len(padded))
        assert mean_interval(values, confidence=0.5) == pytest.approx((center - half, center + half))


def test_a_missing_reward_may_be_anything_within_the_bounds() -> None:
    expected = mean_interval([1.0, 0.5, 0.0])[0], mean_interval([1.0, 0.5, 1.0])[1]
    assert mean_interval([1.0, 0.5, None]) == expected


def test_the_scale_of_rewards_is_0_to_1_or_else_what_was_seen() -> None:
    assert mean_interval([0.0] * 9) == mean_interval([0.0] * 9, bounds=(0, 1))
    assert mean_interval([0.0, 1.5] * 9) == mean_interval([0.0, 1.5] * 9, bounds=(0, 1.5))
    assert mean_interval([2.0, 3.0] * 9) == mean_interval([2.0, 3.0] * 9, bounds=(2, 3))
    assert mean_interval([2.0] * 9) == mean_interval([2.0] * 9, bounds=(0, 2))
    assert mean_interval([-2.0] * 9) == mean_interval([-2.0] * 9, bounds=(-2, 0))
    assert paired_gain([-1.0] * 9, [1.0] * 9).interval[1] == 2.0
    whole, narrow = (paired_gain([0.4] * 9, [0.6] * 9, bounds=bounds).interval for bounds in (None, (0.4, 0.6)))
    assert narrow[1] - narrow[0] < whole[1] - whole[0]


UNANIMOUS: list[tuple[str, list[float], list[float]]] = [
    ("sixteen of sixteen by the same", [0.2 + 0.035 * i for i in range(16)], [0.3 + 0.035 * i for i in range(16)]),
    ("forty of forty on another scale", [1.0 * i for i in range(40)], [i + 2 + 0.1 * (i % 5) for i in range(40)]),
    ("six of six", [0.0] * 6, [0.1] * 6),
    ("all that changed", [0.0] * 64, [1.0] * 8 + [0.0] * 56),
    ("by little on a large scale", [1000.0 * i for i in range(12)], [1000.0 * i + 1 + i % 3 for i in range(12)]),
    ("graded, all better", [0.05 * i for i in range(10)], [0.05 * i + 0.01 * (i + 1) for i in range(10)]),
]


@pytest.mark.parametrize(("before", "after"), [case[1:] for case in UNANIMOUS], ids=[case[0] for case in UNANIMOUS])
def test_what_all_tasks_say_is_shown(before: list[float], after: list[float]) -> None:
    gain, loss = paired_gain(before, after), paired_gain(after, before)
    assert gain.interval[0] > 0
    assert loss.interval[1] < 0


SCALES: dict[str, Draw] = {
    "right or wrong": lambda rng: float(rng.random() < 0.5),
    "graded": lambda rng: rng.random(),
    "in tenths": lambda rng: rng.randrange(11) / 10,
    "lognormal": lambda rng: rng.lognormvariate(0, 1),
    "t(2)": lambda rng: rng.gauss(0, 1) / math.sqrt(rng.expovariate(1)),
}


def compared(draw: Draw, rng: random.Random) -> bool:
    """Whether two measurements of one agent are told apart."""
    before, after = [draw(rng) for _ in range(40)], [draw(rng) for _ in range(40)]
    found = compare_tasks([(x,) for x in before], [(x,) for x in after])
    low, high = found.interval
    assert found.significant == (found.p_value < 0.05) == (not low <= 0 <= high)
    assert paired_gain(before, after).interval == found.interval
    return found.significant


@pytest.mark.parametrize("draw", SCALES.values(), ids=SCALES)
def test_interval_and_verdict_never_disagree(draw: Draw) -> None:
    rng = random.Random(3)
    assert sum(compared(draw, rng) for _ in range(12)) <= 4


@pytest.mark.parametrize("seed", [13, 43, 61, 382])
def test_a_p_value_of_exactly_alpha_shows_nothing(seed: int) -> None:
    rng = random.Random(seed)
    before, after = ([(rng.random(),) for _ in range(24)] for _ in range(2))
    alpha = compare_tasks(before, after).p_value
    found = compare_tasks(before, after, alpha=alpha)
    assert not found.significant
    assert found.interval[0] <= 0 <= found.interval[1]


@pytest.mark.slow
@pytest.mark.parametrize("draw", SCALES.values(), ids=SCALES)
def test_an_agent_beats_itself_or_loses_one_time_in_twenty(draw: Draw) -> None:
    rng = random.Random(3)
    trials = 600
    shown = sum(compared(draw, rng) for _ in range(trials)) / trials
    assert 0.02 <= shown <= 0.07


def test_a_tolerated_loss_is_judged_like_none() -> None:
    worse = paired_gain([0.5] * 16, [0.35] * 16, null=-0.1)
    assert worse.interval[1] < -0.1
    assert paired_gain([0.5] * 16, [0.41] * 16, null=-0.1).interval[1] >= -0.1
    few = paired_gain([1.0] * 16, [0.0] * 9 + [1.0] * 7, null=-0.1)
    assert few.interval[1] < -0.1


def test_a_reward_that_is_missing_lets_only_what_holds_for_any_be_shown() -> None:
    before = [(0.2,)] * 12
    surely = compare_tasks([*before, (0.1,)], [(0.9,)] * 12 + [(None,)])
    perhaps = compare_tasks([*before, *[(0.8,)] * 4], [(0.4,)] * 12 + [(None,)] * 4)
    for found in (surely, perhaps):
        assert found.significant == (not found.interval[0] <= 0 <= found.interval[1])
    assert surely.significant
    assert not perhaps.significant


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=50), st.floats(0.5, 0.99))
def test_the_interval_holds_possible_gains_only_and_turns_around_with_the_question(
    pairs: list[tuple[float, float]], confidence: float
) -> None:
    before, after = [b for b, _ in pairs], [a for _, a in pairs]
    gain, loss = paired_gain(before, after, confidence), paired_gain(after, before, confidence)
    low, high = gain.interval
    assert -1 <= low <= high <= 1
    assert loss.interval == pytest.approx((-high, -low), abs=1e-9)
    wide = paired_gain(before, after, 0.995).interval
    assert wide[0] <= low + 1e-9
    assert wide[1] >= high - 1e-9


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60))
def test_the_interval_holds_the_mean_that_was_seen(values: list[float]) -> None:
    low, high = mean_interval(values)
    assert low - 1e-9 <= math.fsum(values) / len(values) <= high + 1e-9


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ([], [], "no task has a reward both before and after"),
        ([1.0], [1.0, 2.0], "1 rewards before and 2 after"),
        ([math.nan], [1.0], "a reward of nan"),
        ([0.0], [math.inf], "a reward of inf"),
    ],
)
def test_what_cannot_be_compared_is_refused(before: list[float], after: list[float], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        paired_gain(before, after)


def test_a_mean_of_nothing_is_refused() -> None:
    with pytest.raises(RewardError, match="no reward was measured"):
        mean_interval([None])


@pytest.mark.parametrize("confidence", [0.0, 1.0])
def test_certainty_and_none_at_all_are_refused(confidence: float) -> None:
    with pytest.raises(ConfigError, match=rf"confidence={confidence}"):
        mean_interval([0.5], confidence=confidence)


@pytest.mark.parametrize(
    ("degrees", "table"), [(1, 12.70620), (2, 4.302653), (3, 3.182446), (4, 2.776445), (30, 2.042272), (31, 2.039513)]
)
def test_quantiles_of_few_degrees_are_exact(degrees: int, table: float) -> None:
    assert student_quantile(0.975, degrees) == pytest.approx(table, rel=1e-6)
    assert student_quantile(0.025, degrees) == pytest.approx(-table, rel=1e-6)


@pytest.mark.parametrize(("degrees", "table"), [(4, 2.776), (10, 2.228), (30, 2.042), (127, 1.979), (10**6, 1.960)])
def test_quantiles_agree_with_the_tables(degrees: int, table: float) -> None:
    assert student_quantile(0.975, degrees) == pytest.approx(table, rel=1e-3)


@pytest.mark.parametrize(("degrees", "table"), [(10, 2.228139), (30, 2.042272), (60, 2.000298), (120, 1.979930)])
def test_quantiles_of_many_degrees_agree_to_the_fifth_digit(degrees: int, table: float) -> None:
    assert student_quantile(0.975, degrees) == pytest.approx(table, rel=5e-6)
