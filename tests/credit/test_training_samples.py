"""Groups of rollouts become training samples; who is left out is counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.credit import (
    ConstantNormalizer,
    CreditReport,
    CreditRule,
    group_trajectories,
    is_target,
    rejections,
    training_samples,
)
from agentlightning.credit.base import Credit, CreditContext, Group
from agentlightning.errors import ExtensionError, RewardError, UnfaithfulSampleError
from agentlightning.trajectory import TrainingSample, Trajectory, Transition
from agentlightning.util.kept_sets import KeptSets


def rollout(name: str, reward: Any, *answers: int, group: str = "g", **more: Any) -> Trajectory:
    """One call for each number of sampled tokens, each continuing the one before."""
    history, made = (1, 2), []
    for i, length in enumerate(answers or (2,)):
        sampled = tuple(range(10, 10 + length))
        made.append(Transition(name, "at", f"{name}-{i}", i + 1, history, sampled, (-1.0,) * length, **more))
        history += (*sampled, 3)
    return Trajectory(name, "at", tuple(made), reward, group)


def by_rollout(samples: list[TrainingSample]) -> dict[str, list[tuple[float, float]]]:
    """(advantage, weight) of each sampled token."""
    found: dict[str, list[tuple[float, float]]] = {}
    for sample in samples:
        for node, advantages, weights in zip(sample.tree.nodes, sample.advantages, sample.weights, strict=True):
            if node.sampled:
                pairs = zip(advantages.tolist(), weights.tolist(), strict=True)
                found.setdefault(str(node.rollout_id), []).extend(pairs)
            else:
                assert len(advantages) == len(weights) == 0
    return found


def test_every_rollout_has_the_same_share_however_much_it_said() -> None:
    samples, report = training_samples([[rollout("a", 1.0, 2, 6), rollout("b", 0.0, 1)]])
    tokens = by_rollout(samples)
    assert [len(tokens[name]) for name in "ab"] == [8, 1]
    assert [sum(w for _, w in tokens[name]) for name in "ab"] == pytest.approx([0.5, 0.5])
    assert {a for a, _ in tokens["a"]} == {1.0}
    assert {a for a, _ in tokens["b"]} == {-1.0}
    assert (report.groups_trained, report.rollouts_trained, report.tokens_trained) == (1, 2, 9)


def test_every_token_has_the_same_share_where_asked() -> None:
    samples, _ = training_samples([[rollout("a", 1.0, 2, 6), rollout("b", 0.0, 1)]], aggregate="token")
    assert {w for tokens in by_rollout(samples).values() for _, w in tokens} == {float(np.float32(1 / 9))}


def test_a_missing_reward_is_left_out_and_never_zero() -> None:
    group = [rollout("a", 1.0), rollout("b", 3.0), rollout("c", None)]
    samples, report = training_samples([group])
    tokens = by_rollout(samples)
    assert {name: tokens[name][0][0] for name in tokens} == {"a": -1.0, "b": 1.0}
    assert report.rewards_missing == 1


def test_groups_that_teach_nothing_are_skipped_each_under_its_own_count() -> None:
    groups = [
        [rollout("a", 1.0), rollout("b", 1.0)],
        [rollout("c", 1.0), rollout("d", None)],
        [rollout("e", 1.0), rollout("f", 0.0)],
        [Trajectory("h", "at", (), 1.0), Trajectory("i", "at", (), 0.0)],
        [Trajectory("j", "at", (), 1.0), Trajectory("k", "at", (), 0.0)],
    ]
    samples, report = training_samples(groups, equal_groups="filter")
    assert set(by_rollout(samples)) == {"e", "f"}
    assert training_samples(groups)[1] == report, "whether it is kept or not"
    assert report == CreditReport(
        groups=5,
        rollouts=10,
        groups_trained=1,
        groups_without_spread=1,
        groups_too_small=1,
        groups_without_tokens=2,
        rewards_missing=1,
        rollouts_trained=2,
        tokens_trained=4,
    )
    assert report.metrics()["groups_without_spread"] == 1.0


@pytest.mark.parametrize("aggregate", ["rollout", "token", {"type": "constant", "length": 10}])
@pytest.mark.parametrize(
    "rule", ["group_relative", "rloo", "discounted", "intermediate", "state_value", "hierarchical"]
)
@pytest.mark.parametrize("flat", [0, 1, 3])
def test_groups_whose_rewards_are_equal_count_in_what_the_loss_is_divided_by(
    flat: int, rule: str, aggregate: Any
) -> None:
    groups = [[rollout("a", 1.0), rollout("b", 0.0)]]
    groups += [[rollout(f"{g}x", 0.5), rollout(f"{g}y", 0.5)] for g in range(flat)]
    (alone, _), (samples, report) = (training_samples(each, rule, aggregate=aggregate) for each in (groups[:1], groups))
    before, after = by_rollout(alone), by_rollout(samples)
    assert [weight * (1 + flat) for _, weight in after["a"]] == pytest.approx([weight for _, weight in before["a"]])
    assert {advantage for name in after if name not in "ab" for advantage, _ in after[name]} <= {0.0}
    assert (report.groups_trained, report.groups_without_spread, report.rollouts_trained) == (1, flat, 2)
    filtered, _ = training_samples(groups, rule, aggregate=aggregate, equal_groups="filter")
    assert by_rollout(filtered) == before


@pytest.mark.parametrize(
    ("reward", "more", "settings"),
    [
        (math.nan, {}, {}),
        (math.inf, {}, {"rule": "reinforce"}),
        (1.0, {"step": -math.inf}, {"rule": "discounted"}),
        ({"right": math.nan, "short": 1.0}, {}, {"reward_weights": {"right": 0.0, "short": 1.0}}),
        ({"right": math.inf, "short": 1.0}, {}, {"normalization": "gdpo", "reward_weights": {"right": 1, "short": 1}}),
    ],
)
def test_a_reward_that_is_not_finite_is_named(reward: Any, more: Any, settings: Any) -> None:
    good = {"right": 1.0, "short": 0.0} if isinstance(reward, dict) else 0.0
    wrong = rollout("wrong", reward)
    if "step" in more:
        wrong = replace(wrong, transitions=(replace(wrong.transitions[0], reward=more["step"]),))
    group = [rollout("a", good), wrong]
    with pytest.raises(RewardError, match=r"rollout wrong has reward .*(nan|inf).*, which is not finite; emit a num"):
        training_samples([group], **settings)


def test_a_reward_of_one_agent_that_is_not_finite_is_named() -> None:
    group = [rollout(name, 1.0, agent="w") for name in "ab"]
    group[1] = replace(group[1], agent_rewards={"w": math.nan})
    with pytest.raises(RewardError, match="rollout b has reward nan"):
        training_samples([group], agent_rewards="own")


def test_only_the_target_agent_learns_and_rollouts_without_it_take_no_share() -> None:
    writer, critic = rollout("a", 1.0, agent="writer"), rollout("b", 0.0, agent="critic")
    other = rollout("c", 0.5, agent="writer")
    samples, report = training_samples([[writer, critic, other]], target_agent="writer")
    tokens = by_rollout(samples)
    assert {w for _, w in tokens["b"]} == {0.0}
    assert sum(w for name in "ac" for _, w in tokens[name]) == pytest.approx(1.0)
    assert report.rollouts_trained == 2
    assert training_samples([[writer, critic]], target_agent="nobody")[1].groups_without_tokens == 1


def test_named_rewards_need_weights() -> None:
    group = [rollout("a", {"right": 1.0, "short": 0.0}), rollout("b", {"right": 0.0, "short": 1.0})]
    samples, _ = training_samples([group], reward_weights={"right": 0.9, "short": 0.1})
    assert by_rollout(samples)["a"][0][0] == pytest.approx(1.0)
    with pytest.raises(RewardError, match=r"\['right', 'short'\].*reward_weights"):
        training_samples([group])


@pytest.mark.parametrize(("setting", "value"), [("top_p", 0.9), ("top_k", 1), ("top_k", 20), ("temperature", 0.0)])
def test_samples_of_a_cut_distribution_are_refused_by_name(setting: str, value: float) -> None:
    group = [rollout("a", 1.0), rollout("b", 0.0, **{setting: value})]
    with pytest.raises(UnfaithfulSampleError, match=f"call b-0 of rollout b was sampled with {setting}={value:g}"):
        training_samples([group])


def test_samples_of_a_cut_distribution_are_trained_if_its_sets_were_recorded() -> None:
    calls = [rollout("a", 1.0), rollout("b", 0.0, top_p=0.9, top_k=3)]
    with pytest.raises(UnfaithfulSampleError, match=r"top_p=0.9, top_k=3; .*raise that or lower top_k"):
        training_samples([calls])
    tokens = len(calls[1].transitions[0].response_token_ids)
    kept = rollout("b", 0.0, top_p=0.9, top_k=3, kept_sets=KeptSets.of([(1, 2, 3)] * tokens))
    (sample,), _ = training_samples([[calls[0], kept]])
    assert [node.kept_sets is not None for node in sample.tree.nodes if node.sampled] == [False, True]
    cold = rollout("b", 0.0, top_p=0.9, temperature=0.0, kept_sets=KeptSets.of([(1, 2, 3)] * tokens))
    with pytest.raises(UnfaithfulSampleError, match="with temperature=0; no loss"):
        training_samples([[calls[0], cold]])


def test_samples_of_a_reshaped_distribution_are_refused_by_what_reshaped_it() -> None:
    group = [rollout("a", 1.0), rollout("b", 0.0, reshaped=("presence_penalty", "logit_bias"))]
    with pytest.raises(UnfaithfulSampleError, match="rollout b was sampled with presence_penalty, logit_bias; no loss"):
        training_samples([group])


def test_an_agent_that_is_not_trained_may_sample_as_it_likes() -> None:
    group = [rollout("a", 1.0, agent="w"), rollout("b", 0.0, agent="w"), rollout("c", 0.0, agent="judge", top_p=0.5)]
    assert len(training_samples([group], target_agent="w")[0]) == 1


class LaterGroupsMatter(CreditRule):
    """Sees all groups at once: the first token of each call counts, the more the later its group comes."""

    type: str = "later"

    def assign(self, groups: Sequence[Group], context: CreditContext) -> list[Credit | None]:
        found: list[Credit | None] = [
            Credit([[float(number)] * len(t.transitions) for t in group], [[np.array([1.0, 0.0])]] * len(group))
            for number, group in enumerate(groups)
        ]
        return [None, *found[1:]]


def test_a_rule_sees_all_groups_and_weighs_tokens() -> None:
    groups = [[rollout(f"{g}{i}", 1.0) for i in range(2)] for g in "xyz"]
    samples, report = training_samples(groups, LaterGroupsMatter())
    tokens = by_rollout(samples)
    assert (report.groups_trained, report.groups_without_spread) == (2, 1)
    share = float(np.float32(1 / 12))
    assert tokens["x0"] == [(0.0, share), (0.0, share)]
    assert tokens["y0"] == [(1.0, share), (1.0, 0.0)]
    assert tokens["z1"] == [(2.0, share), (2.0, 0.0)]


class NumberedTokens(CreditRule):
    """The advantage of each token is its place in the call, its weight the square of that."""

    type: str = "numbered"

    def assign(self, groups: Sequence[Group], context: CreditContext) -> list[Credit | None]:
        places = [
            [[np.arange(len(call.response_token_ids)) for call in each.transitions] for each in group]
            for group in groups
        ]
        return [Credit(group, [[call**2 for call in each] for each in group]) for group in places]


def test_numbers_for_tokens_follow_the_tokens_of_a_call_that_later_prompts_split() -> None:
    def made(number: int, prompt: tuple[int, ...], sampled: tuple[int, ...]) -> Transition:
        return Transition("a", "at", f"a-{number}", number, prompt, sampled, (-1.0,) * len(sampled))

    calls = made(1, (1,), (5, 6, 7, 8, 9)), made(2, (1, 5, 6, 2), (3, 4)), made(3, (1, 5, 6, 7, 8, 2), (3,))
    (sample,), _ = training_samples(
        [[Trajectory("a", "at", calls, 1.0), rollout("b", 0.0)]], NumberedTokens(), aggregate="token"
    )
    found: dict[str, list[float]] = {}
    for node, advantages, weights in zip(sample.tree.nodes, sample.advantages, sample.weights, strict=True):
        found.setdefault(str(node.call), []).extend(advantages.tolist())
        assert (weights * 10).tolist() == pytest.approx((advantages**2).tolist())
    assert [found[f"a-{number}"] for number in (1, 2, 3)] == [[0, 1, 2, 3, 4], [0, 1], [0]]
    assert sum(node.call == "a-1" for node in sample.tree.nodes) == 3


@pytest.mark.parametrize(
    "credits",
    [[], [Credit([[1.0]])], [Credit([[1.0], [1.0, 2.0]])], [Credit([[1.0], [1.0]], [[1.0]])]],
    ids=["a group", "a rollout", "a call", "a weight"],
)
def test_a_rule_that_leaves_something_out_or_adds_something_is_an_error(credits: list[Credit | None]) -> None:
    class Careless(CreditRule):
        type: str = "careless"

        def assign(self, groups: Sequence[Group], context: CreditContext) -> list[Credit | None]:
            return credits

    with pytest.raises(ExtensionError, match=r"credit rule .*Careless \(.*\) failed with ValueError"):
        training_samples([[rollout("a", 1.0), rollout("b", 0.0)]], Careless())


def test_calls_without_an_agents_name_learn_where_the_pattern_matches_an_empty_one() -> None:
    assert is_target(None, "(writer)?")
    assert not is_target(None, "writer")


def test_what_cannot_be_learned_from_is_named_by_the_rules_of_training() -> None:
    """The weights of the reward and the agent that is trained decide as in `training_samples`."""
    rollouts = [
        rollout("named", {"right": 1.0, "style": 0.0}),
        rollout("partial", {"right": 1.0}),
        rollout("unknown", {"polite": 1.0}),
        rollout("judge", 1.0, agent="judge", top_p=0.5),
        rollout("cut", 1.0, agent="writer", top_p=0.5),
        rollout("none", None),
    ]
    found = rejections(rollouts, target_agent="writer|", reward_weights={"right": 1.0, "style": 1.0})
    assert {each.rollout_id: each.reason for each in found} == {
        "partial": "missing_reward",
        "unknown": "bad_reward",
        "cut": "unfaithful_sampling",
        "none": "missing_reward",
    }
    messages = {each.rollout_id: each.message for each in found}
    assert "lacks a dimension that reward_weights names" in messages["partial"]
    assert "no weight for reward dimensions ['polite']" in messages["unknown"]
    assert "AGL_EVENT_URL" in messages["none"]


def test_minibatches_know_their_share_whatever_normalises_the_weights() -> None:
    groups = [[rollout("a", 1.0, 6), rollout("b", 0.0, 2)], [rollout("c", 1.0), rollout("d", 0.0), rollout("e", 0.0)]]
    shares = {
        str(aggregate): [sample.share for sample in training_samples(groups, aggregate=aggregate)[0]]
        for aggregate in ("rollout", "token", ConstantNormalizer(length=4))
    }
    assert list(shares.values()) == [[2 / 5, 3 / 5], [8 / 14, 6 / 14], [2 / 5, 3 / 5]]
    constant, _ = training_samples(groups, aggregate={"type": "constant", "length": 4})
    assert by_rollout(constant)["a"][0][1] == pytest.approx(1 / 20)


def test_trajectories_are_grouped_in_order_of_appearance() -> None:
    made = [rollout("a", 1.0, group="x"), rollout("b", 1.0, group="y"), rollout("c", 1.0, group="x")]
    assert [[t.rollout_id for t in group] for group in group_trajectories(made)] == [["a", "c"], ["b"]]


rewards = st.lists(st.one_of(st.none(), st.integers(0, 2).map(float)), min_size=1, max_size=5)


@given(st.lists(rewards, min_size=1, max_size=4), st.sampled_from(["rollout", "token"]), st.randoms())
def test_the_weights_of_a_batch_sum_to_one_and_advantages_to_zero(values: Any, aggregate: Any, random: Any) -> None:
    groups = [
        [rollout(f"{g}-{i}", reward, *(random.randint(1, 4) for _ in range(2))) for i, reward in enumerate(group)]
        for g, group in enumerate(values)
    ]
    samples, report = training_samples(groups, aggregate=aggregate)
    tokens = by_rollout(samples)
    if samples:
        assert math.isclose(sum(w for own in tokens.values() for _, w in own), 1.0, rel_tol=1e-6)
        assert math.isclose(sum(own[0][0] for own in tokens.values()), 0.0, abs_tol=1e-6)
    outcomes = report.groups_trained + report.groups_without_spread + report.groups_too_small
    assert outcomes == report.groups == len(groups)
    assert len(samples) == report.groups_trained + report.groups_without_spread


def test_an_answer_that_several_rollouts_went_through_is_trained_once_with_their_mean_advantage() -> None:
    def call(rollout: str, number: int, prompt: tuple[int, ...], *said: int, **more: Any) -> Transition:
        return Transition(rollout, "at", f"{rollout}{number}", number, prompt, said, (-1.0,) * len(said), **more)

    first = Trajectory("a", "at", (call("a", 1, (1,), 5), call("a", 2, (1, 5, 2), 6)), 0.0, "g")
    again = call("b", 1, (1,), 5, replays=("a", "a1"))
    branch = Trajectory("b", "at", (again, call("b", 2, (1, 5, 2), 7)), 3.0, "g")
    other = Trajectory("c", "at", (call("c", 1, (1,), 8),), 0.0, "g")
    ((sample,), report) = training_samples([[first, branch, other]], normalization="none")
    trained = {
        node.call: (float(own[0]), float(weights[0]))
        for node, own, weights in zip(sample.tree.nodes, sample.advantages, sample.weights, strict=True)
        if node.sampled
    }
    low, high = -1.0, 2.0
    assert {call: advantage for call, (advantage, _) in trained.items()} == pytest.approx(
        {"a1": (low + high) / 2, "a2": low, "b2": high, "c1": low}
    )
    assert sum(weight for _, weight in trained.values()) == pytest.approx(1.0)
    assert (report.rollouts_trained, report.tokens_trained) == (3, 4)
