"""A reward that was emitted for one agent reaches the calls of that agent."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.credit import Assignment, rejections, training_samples
from agentlightning.credit.base import CreditContext, CreditMemory
from agentlightning.trajectory import Trajectory, Transition


def rollout(name: str, reward: Any, **agent_rewards: Any) -> Trajectory:
    """A call of the writer, one of the critic."""
    calls = tuple(
        Transition(name, "at", f"{name}-{agent}", k, (1, k), (7,), (-1.0,), agent=agent)
        for k, agent in enumerate(("writer", "critic"))
    )
    return Trajectory(name, "at", calls, reward, "g", agent_rewards=agent_rewards)


def assign(group: list[Trajectory], mode: Any, rule: Any = "uniform", **more: Any) -> Any:
    (found,) = Assignment.of(rule, "none", mode, **more).assign([group], CreditContext())
    return found


def test_shared_rewards_are_those_of_the_rollout_or_else_of_all_its_agents() -> None:
    both = assign([rollout("a", 1.0, writer=5.0), rollout("b", 0.0)], "shared").credit
    assert both.advantages == [[0.5, 0.5], [-0.5, -0.5]]
    summed = assign([rollout("a", None, writer=2.0, critic=1.0), rollout("b", 1.0)], "shared").credit
    assert summed.advantages == [[1.0, 1.0], [-1.0, -1.0]]


def test_own_rewards_reach_the_calls_of_their_agent_and_no_others() -> None:
    found = assign([rollout("a", 1.0, writer=0.0), rollout("b", 0.0, writer=4.0)], "own").credit
    assert found.advantages == [[-2.0, 0.5], [2.0, -0.5]]
    assert found.weights == [[1.0, 1.0], [1.0, 1.0]]


def test_an_agent_without_any_reward_is_context() -> None:
    found = assign([rollout("a", None, writer=0.0), rollout("b", None, writer=4.0)], "own")
    assert found.credit.advantages == [[-2.0, 0.0], [2.0, 0.0]]
    assert found.credit.weights == [[1.0, 0.0], [1.0, 0.0]]
    samples, report = training_samples(
        [[rollout("a", None, writer=0.0), rollout("b", None, writer=4.0)]], "uniform", agent_rewards="own"
    )
    weights = {n.call: float(w[0]) for n, w in zip(samples[0].tree.nodes, samples[0].weights, strict=True) if n.sampled}
    assert weights["a-critic"] == 0.0 != weights["a-writer"]
    assert report.rewards_missing == 0


def test_a_difference_reward_is_what_the_agent_added() -> None:
    found = assign([rollout("a", 1.0, writer=0.75), rollout("b", 1.0, writer=0.25)], "difference").credit
    assert found.advantages == [[-0.25, 0.0], [0.25, 0.0]]
    (rejected,) = rejections([rollout("a", None, writer=1.0)], "uniform", agent_rewards="difference")
    assert "emit one without agent=" in rejected.message


def test_named_dimensions_belong_to_agents_as_well() -> None:
    group = [rollout("a", {"x": 1.0, "y": 0.0}, writer={"x": 0.0, "y": 2.0}), rollout("b", {"x": 0.0, "y": 0.0})]
    weights = {"x": 1.0, "y": 1.0}
    assert assign(group, "own", reward_weights=weights).credit.advantages == [[1.0, 0.5], [-1.0, -0.5]]
    assert assign(group, "difference", reward_weights=weights).credit.advantages == [[-0.5, 0.5], [0.5, -0.5]]
    (rejected, *_) = rejections([rollout("a", 1.0, writer={"x": 1.0})], agent_rewards="difference")
    assert "same form" in rejected.message
    mixed = rollout("a", None, writer={"x": 1.0}, critic=1.0)
    assert "same form" in rejections([mixed], reward_weights={"x": 1.0})[0].message


@pytest.mark.parametrize("mode", ["shared", "own"])
def test_a_reward_for_an_agent_that_never_spoke_is_named_with_those_that_did(mode: Any) -> None:
    (found,) = rejections([rollout("a", 1.0, writr=1.0), rollout("b", 1.0, writer=1.0)], agent_rewards=mode)
    assert (found.rollout_id, found.reason) == ("a", "bad_reward")
    assert "a reward for agent 'writr', which made no call; there are 'critic', 'writer'" in found.message


def test_what_is_remembered_of_one_agent_is_not_taken_for_another() -> None:
    memory = CreditMemory()
    group = [rollout("a", None, writer=4.0, critic=0.0), rollout("b", None, writer=2.0, critic=1.0)]
    Assignment.of("state_value", agent_rewards="own").assign([group], CreditContext(memory))
    assert len(memory.state_dict()["tables"]) == 2
