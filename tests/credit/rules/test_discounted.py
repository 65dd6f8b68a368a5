"""Discounted returns, worked out by hand."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from agentlightning.credit import training_samples
from agentlightning.credit.base import CreditContext, credit_rule
from agentlightning.credit.rules import DiscountedCredit
from agentlightning.errors import ConfigError, RewardError
from agentlightning.trajectory import Trajectory, Transition


def rollout(name: str, final: float, *steps: float | None) -> Trajectory:
    """One call for each intermediate reward."""
    calls = tuple(
        Transition(name, "at", f"{name}-{i}", i, (1, i), (2, 3), (-1.0, -1.0), reward=step)
        for i, step in enumerate(steps, 1)
    )
    return Trajectory(name, "at", calls, final)


def test_a_call_has_the_discounted_rewards_that_follow_it_against_the_groups_mean() -> None:
    rule = credit_rule({"type": "discounted", "gamma": 0.5, "normalize_std": False})
    group = [rollout("a", 8.0, None, 2.0, None), rollout("b", 0.0, 1.0)]
    returns = [0 + 0.5 * (2 + 0.5 * 8), 2 + 0.5 * 8, 8.0, 1.0]
    mean = statistics.fmean(returns)
    (credit,) = rule.assign([group], CreditContext())
    assert credit is not None
    assert credit.advantages == [tuple(value - mean for value in returns[:3]), (returns[3] - mean,)]
    scaled = DiscountedCredit(gamma=0.5).advantages(group)
    assert scaled is not None
    assert scaled[1][0] == pytest.approx((1.0 - mean) / statistics.pstdev(returns))


def test_without_discount_and_intermediate_rewards_it_is_group_relative() -> None:
    group = [rollout("a", 1.0, None, None), rollout("b", 0.0, None, None)]
    assert DiscountedCredit(gamma=1.0).advantages(group) == credit_rule("grpo").advantages(group)
    assert DiscountedCredit(gamma=0.0).advantages([rollout("a", 1.0, None), rollout("b", 1.0, None)]) is None


def test_one_rollout_alone_and_rollouts_without_calls_teach_nothing() -> None:
    assert DiscountedCredit().assign([[rollout("a", 1.0, 0.5, None)]], CreditContext()) == [None]
    assert DiscountedCredit().advantages([rollout("a", 1.0), rollout("b", 0.0)]) is None


def test_intermediate_rewards_with_named_dimensions_are_weighed_like_the_final_one() -> None:
    named = [
        replace(each, transitions=tuple(replace(t, reward={"right": 1.0, "short": 2.0}) for t in each.transitions))
        for each in (rollout("a", 1.0, None), rollout("b", 0.0, None, None))
    ]
    plain = [rollout("a", 1.0, 2.0), rollout("b", 0.0, 2.0, 2.0)]
    rule = DiscountedCredit(normalize_std=False)
    (sample,), _ = training_samples([named], rule, reward_weights={"right": 1.0, "short": 0.5})
    found = {
        str(node.call): float(values[0])
        for node, values in zip(sample.tree.nodes, sample.advantages, strict=True)
        if node.sampled
    }
    (of_a,), of_b = rule.advantages(plain) or ((), ())
    assert found == pytest.approx({"a-1": of_a, "b-1": of_b[0], "b-2": of_b[1]})
    with pytest.raises(RewardError, match=r"call a-1 has reward .*credit needs one number"):
        rule.advantages(named)


@pytest.mark.parametrize("gamma", [-0.1, 1.1])
def test_a_discount_is_between_0_and_1(gamma: float) -> None:
    with pytest.raises(ConfigError, match="gamma"):
        credit_rule({"type": "discounted", "gamma": gamma})


def test_calls_of_one_rollout_learn_differently() -> None:
    samples, _ = training_samples([[rollout("a", 1.0, None, None), rollout("b", 0.0, None)]], "discounted")
    (sample,) = samples
    found = {
        node.call: values.tolist()
        for node, values in zip(sample.tree.nodes, sample.advantages, strict=True)
        if node.sampled
    }
    assert found["a-2"][0] > found["a-1"][0] > found["b-1"][0]
