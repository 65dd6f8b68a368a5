"""An evaluation is a number that knows its uncertainty, and never takes missing for zero."""

import pytest

import agentlightning as agl
from agentlightning.errors import RewardError
from agentlightning.evaluation import Evaluation, compare


def test_it_compares_like_its_mean():
    better, worse = Evaluation((1.0, 1.0, 0.5)), Evaluation((0.5, 0.5, 0.0))
    assert better > worse
    assert worse < 0.5
    assert better >= 0.8
    assert Evaluation((0.5,)) == 0.5
    assert "0.833" in str(better)


def test_missing_rewards_are_left_out_and_counted():
    evaluation = Evaluation((1.0, None, 0.0))
    assert evaluation.mean == 0.5
    assert evaluation.missing == 1
    assert "1 missing" in str(evaluation)


def test_no_reward_at_all_is_an_error():
    with pytest.raises(RewardError, match="none of 2 tasks"):
        _ = Evaluation((None, None)).mean


def test_only_tasks_with_both_rewards_are_compared():
    gain = compare(Evaluation((0.0, 0.0, None)), Evaluation((1.0, None, 1.0)))
    assert (gain.before, gain.after, gain.tasks) == (0.0, 1.0, 1)
    with pytest.raises(RewardError, match="nothing can be compared"):
        compare(Evaluation((None,)), Evaluation((1.0,)))


def test_an_agent_without_a_model_is_measured():
    def agent(task):
        return 1.0 if task["n"] % 2 else 0.0

    evaluation = agl.evaluate(agent, [{"n": n} for n in range(4)])
    assert evaluation == 0.5
    assert evaluation.rewards == (0.0, 1.0, 0.0, 1.0)
