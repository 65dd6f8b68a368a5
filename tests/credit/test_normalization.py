"""What advantages are divided by, against the formulas written out; combinations that make no sense are refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.credit import Assignment, rejections
from agentlightning.credit.base import CreditContext
from agentlightning.errors import ConfigError
from agentlightning.trajectory import Trajectory, Transition


def rollout(name: str, reward: Any, agents: str = "aa", step: Any = None, **more: Any) -> Trajectory:
    """One call for each letter, of the agent of that name."""
    calls = tuple(
        Transition(name, "at", f"{name}-{k}", k, (1,), (7, 8), (-1.0, -1.0), agent=agent, reward=step)
        for k, agent in enumerate(agents)
    )
    return Trajectory(name, "at", calls, reward, **more)


def assign(
    groups: list[list[Trajectory]], rule: Any = "uniform", *settings: Any
) -> list[list[tuple[float, ...]] | None]:
    found = Assignment.of(rule, *settings).assign(groups, CreditContext())
    return [None if each.credit is None else [tuple(own) for own in each.credit.advantages] for each in found]


def group(*rewards: Any, agents: str = "aa", prefix: str = "r") -> list[Trajectory]:
    return [rollout(f"{prefix}{i}", reward, agents) for i, reward in enumerate(rewards)]


def std(weighted: list[tuple[float, float]]) -> float:
    """Of (weight, number); the weights sum to 1."""
    mean = sum(w * x for w, x in weighted)
    return math.sqrt(sum(w * (x - mean) ** 2 for w, x in weighted))


rewards = st.lists(st.integers(0, 3).map(float), min_size=2, max_size=5)


@given(st.lists(rewards, min_size=1, max_size=4))
def test_the_standard_deviation_of_a_group_makes_grpo_of_a_uniform_rule(batch: list[list[float]]) -> None:
    groups = [group(*values) for values in batch]
    for ours, theirs in zip(assign(groups, "uniform", "group"), assign(groups, "uniform"), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert [pytest.approx(own, abs=1e-9) for own in theirs] == ours


@given(st.lists(rewards, min_size=1, max_size=4), st.booleans())
def test_the_standard_deviation_of_a_batch_counts_rollouts_alike(batch: list[list[float]], center: bool) -> None:
    groups = [
        [rollout(f"{g}-{i}", reward, "a" * (1 + i)) for i, reward in enumerate(values)]
        for g, values in enumerate(batch)
    ]
    raw = assign(groups, "rloo", "none")
    flat = [own[0] for each in raw if each is not None for own in each]
    if not flat:
        return
    mean = sum(flat) / len(flat)
    scale = std([(1 / len(flat), x) for x in flat]) or 1.0
    found = assign(groups, "rloo", {"type": "batch", "center": center})
    expected = [
        None if each is None else [tuple((x - mean * center) / scale for x in own) for own in each] for each in raw
    ]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        for left, right in zip(ours or [], theirs or [], strict=True):
            assert left == pytest.approx(right, abs=1e-9)


def test_each_agent_is_divided_by_its_own_standard_deviation() -> None:
    groups = [[rollout("x", 4.0, "wwc", agent_rewards={"w": 100.0}), rollout("y", 0.0, "wc", agent_rewards={"w": 0.0})]]
    (found,) = assign(groups, "uniform", "agent", "own")
    assert found is not None
    assert found[0] == pytest.approx((1.0, 1.0, 1.0)), "rewards of 100 and 4 count alike"
    assert assign(groups, "uniform", "role", "own") == [found]
    (raw,) = assign(groups, "uniform", "none", "own")
    assert raw is not None
    assert raw[0] == (50.0, 50.0, 2.0)


def test_the_mean_reward_makes_max_rl() -> None:
    (found,) = assign([group(1.0, 0.0, 0.0, 0.0)], "uniform", "max_rl")
    assert found is not None
    assert [own[0] for own in found] == pytest.approx([(1 - 0.25) / 0.25, -1.0, -1.0, -1.0])
    rejected = rejections(group(1.0, -0.5), "uniform", normalization="max_rl")
    assert [(each.rollout_id, each.reason) for each in rejected] == [("r1", "bad_reward")]
    assert "needs rewards of 0 or more" in rejected[0].message


def test_each_dimension_is_divided_by_itself_and_then_added_up() -> None:
    given_ = [{"right": 1.0, "style": 30.0}, {"right": 0.0, "style": 10.0}, {"right": 1.0, "style": 20.0}]
    weights = {"right": 1.0, "style": 0.5}
    (found,) = assign([group(*given_)], "uniform", "gdpo", "shared", weights)
    right, style = np.array([1.0, 0.0, 1.0]), np.array([30.0, 10.0, 20.0])
    expected = (right - right.mean()) / right.std() + 0.5 * (style - style.mean()) / style.std()
    assert found is not None
    assert [own[0] for own in found] == pytest.approx(expected)
    equal = [{**each, "style": 1.0} for each in given_]
    (found,) = assign([group(*equal)], "uniform", "gdpo", "shared", weights)
    assert found is not None, "a dimension without spread adds nothing"
    assert [own[0] for own in found] == pytest.approx((right - right.mean()) / right.std())


def test_rewards_without_dimensions_cannot_be_normalised_by_dimension() -> None:
    found = rejections(group(1.0), "uniform", normalization="gdpo", reward_weights={"right": 1.0})
    assert "needs named dimensions" in found[0].message
    partly = [rollout("r", {"right": 1.0}, step=0.5)]
    found = rejections(partly, "discounted", normalization="gdpo", reward_weights={"right": 1.0})
    assert "reward 0.5 has no dimension 'right'" in found[0].message


def test_numbers_for_tokens_are_divided_like_numbers_for_calls() -> None:
    groups = [group(1.0, 0.0)]
    values = {(f"r{i}", f"r{i}-{k}"): np.zeros(2) for i in range(2) for k in range(2)}
    assignment = Assignment.of("value", {"type": "batch", "center": True})
    (found,) = assignment.assign(groups, CreditContext(columns={"values": values}))
    assert found.credit is not None
    flat = np.concatenate([own for each in found.credit.advantages for own in each])
    assert flat.mean() == pytest.approx(0.0)
    assert flat.std() == pytest.approx(1.0)
    assert found.credit.returns is not None
    assert found.credit.returns[0][0].tolist() == pytest.approx([0.95, 0.95]), "a critic learns what was not divided"


@pytest.mark.parametrize(
    ("rule", "settings", "message"),
    [
        ({"type": "uniform", "normalize_std": True}, ("batch",), 'normalize_std=true.*so does normalization="batch"'),
        ("uniform", ("std",), "choose rule, none, group, batch"),
        ("uniform", ("gdpo",), "name them in reward_weights"),
        ("value", ("gdpo", "shared", {"a": 1.0}), "use another normalization"),
        ("uniform", ({"type": "none", "center": True},), "no mean to subtract"),
    ],
)
def test_settings_that_make_no_sense_together_are_refused(rule: Any, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Assignment.of(rule, *settings)


@pytest.mark.parametrize("filtered", ["keep", "filter"])
@pytest.mark.parametrize(
    ("batch", "kind"),
    [
        ([[0.0], [1.0], [0.0], [1.0]], "batch"),
        ([[0.0, 0.0], [1.0, 1.0]], "batch"),
        ([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]], "batch"),
        ([[0.0, 0.0], [1.0, 1.0]], "agent"),
    ],
)
def test_reinforce_is_centred_on_all_groups_also_on_those_whose_rewards_are_all_zero(
    batch: list[list[float]], kind: str, filtered: str
) -> None:
    """REINFORCE++, arXiv:2501.03262, section 3.2: (R - mean(R)) / std(R) over the batch."""
    groups = [group(*values, prefix=f"{g}-") for g, values in enumerate(batch)]
    found = assign(groups, "reinforce", {"type": kind, "center": True}, "shared", None, filtered)
    rewards = [reward for values in batch for reward in values]
    mean, scale = sum(rewards) / len(rewards), std([(1 / len(rewards), reward) for reward in rewards])
    assert [[own[0] for own in each or []] for each in found] == [
        pytest.approx([(reward - mean) / scale for reward in values]) for values in batch
    ]


def test_a_mean_that_is_rounding_moves_no_advantage() -> None:
    groups = [group(0.1, 0.2, 0.4, prefix="a"), group(0.7, 0.7, prefix="b")]
    assert assign(groups, "uniform", {"type": "batch", "center": True})[1] == [(0.0, 0.0), (0.0, 0.0)]


@pytest.mark.parametrize("reward", [math.nan, math.inf, {"right": math.nan}])
def test_a_reward_that_is_not_finite_rejects_its_rollout_alone(reward: Any) -> None:
    weights = {"right": 1.0} if isinstance(reward, dict) else None
    found = rejections([*group(1.0, 0.0), rollout("bad", reward)], "uniform", reward_weights=weights)
    assert [(each.rollout_id, each.reason) for each in found] == [("bad", "bad_reward")]
    assert "not finite" in found[0].message
    steps = rejections([rollout("bad", 1.0, step=math.inf)], "discounted")
    assert [each.reason for each in steps] == ["bad_reward"]
