"""What a batch of rollouts shows: why groups have no spread, what outputs look like, which reward came from where."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.assemble import SEEDED_CALLS
from agentlightning.training.health.step_record import batch_metrics, repeated_ngrams
from agentlightning.trajectory import Reward, Trajectory, Transition

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def rollout(
    name: str,
    reward: Reward | None,
    tokens: tuple[int, ...] = (1, 2),
    *,
    group: str = "g",
    logprob: float = -0.5,
    end: str = "stop",
    step_reward: Reward | None = None,
    seeded: int = 0,
) -> Trajectory:
    call = Transition(
        name, "a", f"{name}-s", 1, (0,), tokens, (logprob,) * len(tokens), finish_reason=end, reward=step_reward
    )
    return Trajectory(name, "a", (call,), reward, group=group, metadata={SEEDED_CALLS: seeded} if seeded else {})


def causes(*groups: list[Trajectory]) -> dict[str, float]:
    metrics = batch_metrics([each for group in groups for each in group])
    return {name.removeprefix("groups_"): n for name, n in metrics.items() if name.startswith("groups_") and n}


def group_of(rewards: list[float], group: str, *, same: bool = False, logprob: float = -0.5) -> list[Trajectory]:
    return [
        rollout(f"{group}{i}", reward, (7, 7) if same else (i, 1), group=group, logprob=logprob)
        for i, reward in enumerate(rewards)
    ]


def test_each_group_without_spread_has_a_cause():
    mixed = group_of([0.0, 1.0, 0.5], "mixed")
    assert causes(mixed) == {}
    assert causes(mixed, group_of([0.0] * 3, "low")) == {"failed": 1}
    assert causes(mixed, group_of([1.0] * 3, "high")) == {"solved": 1}
    assert causes(mixed, group_of([0.5] * 3, "half")) == {"constant": 1}
    assert causes(group_of([0.0] * 3, "a"), group_of([0.0] * 3, "b")) == {"constant": 2}, "no other reward is known"
    assert causes([rollout("alone", 0.0)]) == {}


def test_identical_outputs_are_chance_only_if_they_are_probable():
    """Six outputs of probability e^-8 each agree once in e^40 groups; those of probability 0.98 nearly always do."""
    assert causes(group_of([0.0] * 6, "g", same=True, logprob=-4.0)) == {"repeated": 1}
    assert causes(group_of([0.0] * 6, "g", same=True, logprob=-0.01)) == {"certain": 1}
    assert causes(group_of([0.0, 1.0] * 3, "g", same=True, logprob=-4.0)) == {"repeated": 1}, "whatever the reward says"


def test_calls_with_a_seed_are_counted():
    assert batch_metrics([rollout("a", 0.0, seeded=2), rollout("b", 0.0, seeded=1)])["calls_seeded"] == 3


def test_rewards_are_summed_up_by_group_and_by_dimension():
    named = [
        rollout("a", {"right": 1.0, "format": 0.0}, group="1", step_reward={"tool": 0.5, "parsed": 0.25}),
        rollout("b", {"right": 0.0, "format": 0.0}, group="1"),
        rollout("c", {"right": 1.0, "format": 1.0}, group="2"),
        rollout("d", {"right": 1.0, "format": 1.0}, group="2"),
    ]
    weights = {"right": 1.0, "format": 0.5}
    metrics = batch_metrics([replace(each, weights=weights) for each in named])
    assert metrics["reward_of_right"] == 0.75
    assert metrics["reward_of_format"] == 0.5
    assert metrics["intermediate_reward"] == pytest.approx(0.75 / 4)
    assert (metrics["reward_lowest"], metrics["reward_highest"]) == (0.0, 1.5)
    assert metrics["reward_std"] == pytest.approx((0.5 + 0.0) / 2)


def test_rewards_that_cannot_be_used_leave_their_numbers_out():
    metrics = batch_metrics([rollout("a", {"x": 1.0}), rollout("b", None), rollout("c", math.nan)])
    assert "reward_std" not in metrics
    assert "reward_lowest" not in metrics
    assert metrics["reward_of_x"] == 1.0
    assert batch_metrics([]) == {}


def test_outputs_are_measured_in_tokens():
    batch = [
        rollout("a", 0.0, (1, 2), group="1", end="length"),
        rollout("b", 0.0, (5, 6, 7, 8), group="1", logprob=-1.5),
        rollout("c", 0.0, (1, 2), group="2"),
        rollout("d", 0.0, (9, 9), group="3"),
    ]
    metrics = batch_metrics(batch)
    assert metrics["response_tokens"] == 2.5
    assert metrics["truncated"] == 0.25
    assert metrics["sampling_entropy"] == pytest.approx((6 * 0.5 + 4 * 1.5) / 10)
    assert metrics["common_output"] == pytest.approx(2 / 3), "(1, 2) is an output of two tasks in three"
    assert "repeated_ngrams" not in metrics, "all are too short"
    assert batch_metrics([rollout("a", 0.0, (3,) * 30), rollout("b", 0.0, tuple(range(30)))])["repeated_ngrams"] > 0.4


@given(TOKENS)
def test_the_share_of_repeated_ngrams_is_that_of_a_count_by_hand(tokens):
    seen: set[tuple[int, ...]] = set()
    repeats = 0
    places = range(len(tokens) - 3)
    for i in places:
        repeats += tuple(tokens[i : i + 4]) in seen
        seen.add(tuple(tokens[i : i + 4]))
    assert repeated_ngrams(tokens) == pytest.approx(repeats / len(places) if len(places) else 0.0)


@given(st.lists(st.tuples(st.floats(-5, 5) | st.none(), TOKENS, st.integers(0, 3)), max_size=12))
def test_any_batch_has_finite_metrics_and_a_cause_for_no_more_groups_than_it_has(batch):
    trajectories = [rollout(str(i), r, tuple(tokens), group=str(g)) for i, (r, tokens, g) in enumerate(batch)]
    metrics = batch_metrics(trajectories)
    assert all(math.isfinite(value) for value in metrics.values())
    named = sum(value for name, value in metrics.items() if name.startswith("groups_"))
    assert named <= len({each.group for each in trajectories})
