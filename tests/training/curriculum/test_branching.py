"""Rollouts branch where the policy is unsure after a tool's result."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import pytest

from agentlightning.algorithms.lightning_rl import LightningRLConfig
from agentlightning.algorithms.training import BranchPoint, Collected, RolloutRequest, Want
from agentlightning.config import Branching, CurriculumConfig, TrainConfig
from agentlightning.errors import ConfigError
from agentlightning.trainer import Trainer
from agentlightning.training.sources.stream import branch_wants, collect_branched
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


def points(group: Sequence[Trajectory], count: int, config: Branching = ANY) -> list[tuple[str, int]]:
    calls = Counter(want.branch.call for want in branch_wants(group, count, config) if want.branch is not None)
    return list(calls.items())


def test_a_point_is_where_uncertainty_rises_over_that_of_the_first_call() -> None:
    unsure = rollout("a", [-0.1, -0.1], [-0.5, -0.5], [-1.1, -0.9, 0, 0])
    assert points([unsure], 2) == [("a-2", 2)], "by the first two tokens"


def test_the_largest_rises_come_first_and_are_taken_in_turn() -> None:
    group = [rollout("a", [0, 0], [-1, -1]), rollout("b", [0, 0], [-2, -2])]
    assert points(group, 3) == [("b-1", 2), ("a-1", 1)]


def test_rollouts_without_a_point_are_independent() -> None:
    assert points([Trajectory("b", "at", ()), rollout("a", [-1, -1], [-1, -1])], 2) == [("a-0", 2)]
    assert points([Trajectory("b", "at", ())], 2) == []


def test_only_calls_after_a_tool_count_unless_all_do() -> None:
    other = rollout("a", [0, 0], [-1, -1], role="user")
    assert points([other], 1, Branching(threshold=0.5)) == [("a-0", 1)]
    assert points([other], 1) == [("a-1", 1)]
    assert points([rollout("a", [0, 0], [-1, -1])], 1, Branching(threshold=0.5)) == [("a-1", 1)]


@pytest.mark.parametrize(("share", "first"), [(0.5, 4), (0.25, 6), (0.9, 1)])
async def test_a_share_of_the_group_is_kept_for_branches(share: float, first: int) -> None:
    asked: list[list[int]] = []

    async def collect(request: RolloutRequest) -> Collected:
        asked.append([want.n for want in request.wants])
        return Collected((rollout("a", [0, 0], [-1, -1]),))

    await collect_branched(collect, RolloutRequest([Want(n=8)]), ANY.model_copy(update={"share": share}))
    assert [sum(each) for each in asked] == [first, 8 - first]


async def test_a_request_that_branches_itself_or_has_wants_of_several_sizes_is_left_as_it_is() -> None:
    asked: list[RolloutRequest] = []

    async def collect(request: RolloutRequest) -> Collected:
        asked.append(request)
        return Collected(())

    own = [
        RolloutRequest([Want(n=8), Want(n=4)]),
        RolloutRequest([Want(branch=BranchPoint("a", "a-1"), n=8)]),
        RolloutRequest([Want()]),
    ]
    for request in own:
        await collect_branched(collect, request, ANY)
    assert asked == own
