"""An evaluation is a number that knows its uncertainty, and never takes missing for zero."""

import math

import pytest

from agentlightning.errors import RewardError
from agentlightning.evaluation.evaluation import Evaluation, compare, gain_of


def test_it_compares_like_its_mean():
    better, worse = Evaluation((1.0, 1.0, 0.5)), Evaluation((0.5, 0.5, 0.0))
    assert better > worse
    assert worse < 0.5
    assert better >= 0.8
    assert not worse < worse
    assert Evaluation((0.5,)) == 0.5
    assert Evaluation((0.5,)) != 0.4
    assert Evaluation((0.5,)) != "0.5"
    assert "0.833" in str(better)


def test_tasks_without_a_reward_are_counted_by_reason_and_shown():
    evaluation = Evaluation((1.0,) * 6 + (None,) * 4, reasons={"failed": 3, "missing_reward": 1})
    assert (evaluation.mean, evaluation.missing, evaluation.failed) == (1.0, 4, 3)
    assert "1.000 on 6 of 10 tasks, 3 failed, 1 missing reward; 0.600 with those at the lowest" in str(evaluation)
    low, high = evaluation.interval
    assert low < 0.6
    assert high == 1.0


def test_an_agent_that_crashes_never_beats_one_that_answers():
    crashes, answers = Evaluation((1.0,) * 6 + (None,) * 4), Evaluation((0.7,) * 10)
    assert crashes < answers
    assert not crashes > 0.9
    assert crashes == 0.6
    assert float(Evaluation((-5.0, 3.0, None))) == pytest.approx((-5.0 + 3.0 - 5.0) / 3)


def test_equal_evaluations_hash_equally():
    first, second = Evaluation((1.0, 0.0), seconds=1.0), Evaluation((0.5, 0.5), seconds=2.0)
    assert first == second
    assert len({first, second, 0.5}) == 1
    assert Evaluation((None,)) == Evaluation((None,))
    assert hash(Evaluation((None,))) == hash(Evaluation((None,)))


def test_no_reward_at_all_is_an_error():
    with pytest.raises(RewardError, match=r"none of 2 tasks has a reward \(2 failed\); return a number"):
        _ = Evaluation((None, None), reasons={"failed": 2}).mean


def test_only_tasks_with_both_rewards_are_compared_and_the_interval_covers_the_others():
    gain = compare(Evaluation((0.0, 0.0, None)), Evaluation((1.0, None, 1.0)))
    assert (gain.before, gain.after, gain.tasks) == (0.0, 1.0, 1)
    assert (gain.missing_before, gain.missing_after) == (1, 1)
    assert gain.interval[0] < 0 < gain.interval[1]
    failing = compare(Evaluation((0.5,) * 100), Evaluation((1.0,) * 60 + (None,) * 40))
    whole = compare(Evaluation((0.5,) * 60), Evaluation((1.0,) * 60))
    assert failing.gain == whole.gain == 0.5
    assert failing.interval[0] < 0.2 < whole.interval[0]
    hopeless = compare(Evaluation((0.5,) * 100), Evaluation((1.0,) * 40 + (None,) * 60))
    assert hopeless.interval[0] < 0
    with pytest.raises(RewardError, match="nothing can be compared"):
        compare(Evaluation((None,)), Evaluation((1.0,)))
    assert gain_of(Evaluation((0.0, None)), Evaluation((1.0, 1.0))) == compare(
        Evaluation((0.0, None)), Evaluation((1.0, 1.0))
    )


def test_a_gain_that_cannot_be_known_is_no_number():
    unknown = gain_of(Evaluation((None, None)), Evaluation((1.0, None)))
    assert all(map(math.isnan, (unknown.before, unknown.after, unknown.gain, *unknown.interval)))
    assert (unknown.tasks, unknown.missing_before, unknown.missing_after) == (0, 2, 1)
