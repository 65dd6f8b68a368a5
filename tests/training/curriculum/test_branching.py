"""Rollouts branch where the policy is unsure after a tool's result."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from agentlightning.algorithms.lightning_rl import LightningRLConfig
from agentlightning.config import Branching, CurriculumConfig, TrainConfig
from agentlightning.errors import ConfigError
from agentlightning.trainer import Trainer
from agentlightning.training.curriculum import BranchPoint, branch_points, choose_points, first_rollouts
from agentlightning.trajectory import Trajectory, Transition
from agentlightning.util.settings import load_settings

ANY = Branching(after="any", threshold=0.5, tokens=2)


@pytest.mark.parametrize(("share", "size"), [(0.1, 4), (0.9, 4), (0.5, 1)])
def test_a_share_that_is_no_rollout_or_all_is_refused(share: float, size: int) -> None:
    branching, algorithm = {"share": share}, LightningRLConfig(credit="reinforce", group_size=size)
    config = TrainConfig(algorithm=algorithm)
    with pytest.raises(ConfigError, match=rf"share={share:g} of algorithm.group_size={size} is"):
        Trainer(config.model_copy(update={"curriculum": CurriculumConfig.model_validate({"branching": branching})}))
    with pytest.raises(ConfigError, match="some must branch"):
        load_settings(
            TrainConfig,
            overrides=[
                "algorithm.credit=reinforce",
                f"algorithm.group_size={size}",
                f"curriculum.branching.share={share}",
            ],
        )


def rollout(name: str, *logprobs: Sequence[float], role: str = "tool") -> Trajectory:
    """A call for each answer; before all but the first comes a message of `role`."""
    calls: list[Transition] = []
    for i, own in enumerate(logprobs):
        messages = [{"role": "user"}] if not i else [{"role": "assistant"}, {"role": role, "parts": [i]}]
        ids = tuple(range(len(own)))
        text = json.dumps(messages)
        calls.append(Transition(name, "at", f"{name}-{i}", i, (1,), ids, tuple(own), input_messages=text))
    return Trajectory(name, "at", tuple(calls))


def test_a_point_is_where_uncertainty_rises_over_that_of_the_first_call() -> None:
    found = branch_points([rollout("a", [-0.1, -0.1], [-0.5, -0.5], [-1.1, -0.9, 0, 0])], ANY)
    assert found == [BranchPoint("a", ("a-0", "a-1"), pytest.approx(0.9))], "by the first two tokens"


def test_the_largest_rises_come_first_and_are_taken_in_turn() -> None:
    points = branch_points([rollout("a", [0, 0], [-1, -1]), rollout("b", [0, 0], [-2, -2])], ANY)
    assert [point.rollout_id for point in points] == ["b", "a"]
    assert [point and point.rollout_id for point in choose_points(points, 3)] == ["b", "a", "b"]


def test_rollouts_without_a_point_are_independent() -> None:
    assert branch_points([rollout("a", [-1, -1], [-1, -1]), Trajectory("b", "at", ())], ANY) == []
    assert choose_points([], 2) == [None, None]


def test_only_calls_after_a_tool_count_unless_all_do() -> None:
    told = rollout("a", [0, 0], [-1, -1], role="user")
    assert branch_points([told], Branching(threshold=0.5)) == []
    assert len(branch_points([told], ANY)) == 1
    assert len(branch_points([rollout("a", [0, 0], [-1, -1])], Branching(threshold=0.5))) == 1


@pytest.mark.parametrize(("share", "first"), [(0.5, 4), (0.25, 6), (0.9, 1)])
def test_a_share_of_the_group_is_kept_for_branches(share: float, first: int) -> None:
    assert first_rollouts(8, Branching(share=share)) == first
    assert first_rollouts(8, None) == 8
