"""The rule of each group is chosen by its own rollouts, and counted."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from agentlightning.credit import training_samples
from agentlightning.credit.base import CreditContext, CreditMemory
from agentlightning.credit.rules import HierarchicalCredit, StateValueCredit


def test_without_a_critic_the_values_of_repeated_states_decide_and_elsewhere_the_return(make: Any) -> None:
    same = [make("a", 1.0, "sxy", [None, 0.5, None]), make("b", 0.0, "sxz")]
    apart = [make("c", 1.0, "spq", [None, 0.5, None]), make("d", 0.0, "suv")]
    rule = HierarchicalCredit(pool=0)
    without = rule.assign([same, apart], CreditContext())
    assert without[0] is not None
    assert without[1] is not None
    plain = StateValueCredit(pool=0).assign([same], CreditContext())[0]
    assert plain is not None
    assert list(without[0].advantages) == list(plain.advantages)
    assert without[0].counts == {"states": 4, "states_repeated": 2, "hierarchical_state_value": 1}
    assert list(without[1].advantages) == [(0.75,) * 3, (-0.75,) * 3], "the return of the rollout, steps included"
    assert without[1].counts["hierarchical_uniform"] == 1


@pytest.mark.parametrize(("share", "chosen"), [(0.5, "state_value"), (0.51, "uniform")])
def test_the_share_of_repeated_states_is_a_setting(make: Any, share: float, chosen: str) -> None:
    (credit,) = HierarchicalCredit(repeated=share).assign(
        [[make("a", 1.0, "sxy"), make("b", 0.0, "sxz")]], CreditContext()
    )
    assert credit is not None
    assert credit.counts[f"hierarchical_{chosen}"] == 1


def test_rollouts_of_one_call_have_no_states_to_repeat(make: Any) -> None:
    (credit,) = HierarchicalCredit().assign([[make("a", 1.0, "s"), make("b", 0.0, "s")]], CreditContext())
    assert credit is not None
    assert credit.counts["hierarchical_uniform"] == 1
    assert HierarchicalCredit().assign([[make("a", 1.0, "s"), make("b", 1.0, "s")]], CreditContext()) == [None]


def test_the_choice_is_among_the_metrics_of_a_step(make: Any) -> None:
    groups = [[make(f"{g}a", 1.0, "sxy"), make(f"{g}b", 0.0, "sxz")] for g in "pq"]
    groups.append([make("c", 1.0, "spq"), make("d", 0.0, "suv")])
    _, report = training_samples(groups, HierarchicalCredit(pool=0))
    metrics = report.metrics()
    assert metrics["credit_hierarchical_state_value"] == 2
    assert metrics["credit_hierarchical_uniform"] == 1
    assert (metrics["credit_states"], metrics["credit_states_repeated"]) == (12, 4)


def test_states_of_earlier_groups_of_the_task_count_as_repeated(make: Any) -> None:
    rule, context = HierarchicalCredit(repeated=0.5), CreditContext()
    first = [make("a", 1.0, "sxyzw"), make("b", 0.0, "sxqrt")]
    second = [make("c", 0.0, "syzwx"), make("d", 1.0, "sqrtx")]
    (credit,) = rule.assign([first], context)
    assert credit is not None
    assert credit.counts == {"states": 8, "states_repeated": 2, "hierarchical_uniform": 1}
    (later,) = rule.assign([second], context)
    assert later is not None
    assert later.counts == {"states": 8, "states_repeated": 8, "hierarchical_state_value": 1}
    (alone,) = HierarchicalCredit(repeated=0.5, pool=0).assign([second], CreditContext())
    assert alone is not None
    assert alone.counts["states_repeated"] == 2


def test_nothing_is_remembered_of_groups_whose_states_are_all_different(make: Any) -> None:
    context = CreditContext()
    HierarchicalCredit().assign([[make("a", 1.0, "spq"), make("b", 0.0, "suv")]], context)
    assert context.memory.size == 0


# -- with a critic: the better predictor -----------------------------------------------------------------------------


def critic_of(group: list[Any], value: Any) -> dict[tuple[str, str], Any]:
    """The values of a critic that gives each rollout `value(rollout)` at every call."""
    return {(t.rollout_id, t.span_id): np.full(2, float(value(each))) for each in group for t in each.transitions}


def choice(rule: HierarchicalCredit, group: list[Any], value: Any, context: CreditContext) -> tuple[str, Any]:
    """What the rule chooses for a group, and its credit; the memory is that of `context`."""
    (credit,) = rule.assign([group], CreditContext(context.memory, {"values": critic_of(group, value)}))
    assert credit is not None
    (chosen,) = [name for name in ("state_value", "value", "uniform") if f"hierarchical_{name}" in credit.counts]
    return chosen, credit


def decided(make: Any, n: int) -> list[Any]:
    """Four rollouts whose second state tells their return."""
    return [make(f"{n}{i}", float(i % 2), "sg" if i % 2 else "sb") for i in range(4)]


def undecided(make: Any, n: int) -> list[Any]:
    """Four rollouts whose states are all the same, whatever became of them."""
    return [make(f"{n}{i}", float(i % 2), "sx") for i in range(4)]


def truth(rollout: Any) -> float:
    """Nearly: a critic without any error has nothing left to teach."""
    return 0.1 + 0.8 * rollout.reward


def opposite(rollout: Any) -> float:
    return 1 - rollout.reward


@pytest.mark.parametrize(
    ("groups", "critic", "chosen"),
    [
        (decided, opposite, "state_value"),
        (decided, lambda _: 0.5, "state_value"),
        (undecided, truth, "value"),
        (undecided, opposite, "state_value"),
    ],
    ids=["states", "states, not a constant critic", "critic", "states, not a critic that is wrong"],
)
def test_with_a_critic_the_better_predictor_of_earlier_groups_decides(
    make: Any, groups: Any, critic: Any, chosen: str
) -> None:
    rule, context = HierarchicalCredit(), CreditContext()
    choice(rule, groups(make, 0), critic, context)
    assert choice(rule, groups(make, 1), critic, context)[0] == chosen


def test_the_first_group_is_decided_by_its_repeated_states(make: Any) -> None:
    assert choice(HierarchicalCredit(), undecided(make, 0), truth, CreditContext())[0] == "state_value"
    apart = [make("a", 1.0, "spq"), make("b", 0.0, "suv")]
    assert choice(HierarchicalCredit(), apart, truth, CreditContext())[0] == "uniform"


def test_no_prediction_has_seen_what_it_is_judged_by(make: Any) -> None:
    """Each rollout is alone in its second state: what is left for it is the mean of the others."""
    alone = [make(f"{i}", float(i % 2), f"s{i}") for i in range(4)]
    _, credit = choice(HierarchicalCredit(), alone, lambda _: 0.5, CreditContext())
    assert credit.counts["evidence_calls"] == 4
    assert credit.counts["evidence_states"] == pytest.approx(credit.counts["evidence_mean"])
    assert credit.counts["evidence_mean"] == pytest.approx(4 * (2 / 3) ** 2)
    assert credit.counts["evidence_critic"] == pytest.approx(4 * 0.5**2)


def test_rewards_that_a_rollout_has_had_before_a_call_are_no_part_of_the_prediction(make: Any) -> None:
    pair = [make("a", 1.0, "sp", [2.0, None]), make("b", 1.0, "sq", [2.0, None])]
    _, credit = choice(HierarchicalCredit(), pair, lambda _: 1.0, CreditContext())
    assert credit.counts["evidence_mean"] == pytest.approx(0)


def test_the_margin_and_how_long_evidence_counts_are_settings(make: Any) -> None:
    def last(rule: HierarchicalCredit, critics: list[Any], groups: Any) -> str:
        context = CreditContext()
        return [choice(rule, groups(make, n), each, context)[0] for n, each in enumerate(critics)][-1]

    def mostly(make: Any, n: int) -> list[Any]:
        """The other rollouts in the second state predict a return with a mean squared error of 0.25."""
        rewards = (1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
        return [make(f"{n}{i}", reward, "sg" if i < 5 else "sb") for i, reward in enumerate(rewards)]

    def guess(rollout: Any) -> float:
        """With an error of 0.26."""
        return 0.5 - 0.01 * (2 * rollout.reward - 1)

    assert last(HierarchicalCredit(margin=0.0), [guess] * 2, mostly) == "state_value"
    assert last(HierarchicalCredit(margin=0.1), [guess] * 2, mostly) == "value"
    changed = [opposite, opposite, truth, truth]
    assert last(HierarchicalCredit(evidence=0.0, margin=0.1), changed, undecided) == "value"
    assert last(HierarchicalCredit(evidence=0.99, margin=0.1), changed, undecided) == "state_value", (
        "the pooled mean of a state"
    )


def test_the_evidence_goes_through_a_checkpoint(make: Any) -> None:
    rule, context = HierarchicalCredit(), CreditContext()
    choice(rule, undecided(make, 0), truth, context)
    restored = CreditMemory()
    restored.load_state_dict(json.loads(json.dumps(context.memory.state_dict())))
    assert choice(rule, undecided(make, 1), truth, CreditContext(restored))[0] == "value"
    assert choice(rule, undecided(make, 1), truth, CreditContext())[0] == "state_value", (
        "without its memory it is the first"
    )


def test_a_critic_learns_from_every_group_whatever_is_chosen_and_whether_rewards_differ(make: Any) -> None:
    rule, context = HierarchicalCredit(), CreditContext()
    apart = [make("a", 1.0, "spq"), make("b", 1.0, "suv")]
    chosen, credit = choice(rule, apart, lambda _: 0.0, context)
    assert chosen == "uniform"
    assert [list(own) for own in credit.advantages] == [[0.0] * 3] * 2
    assert [[each.tolist() for each in own] for own in credit.returns] == [[[1.0, 1.0]] * 3] * 2


def test_the_credit_by_states_adds_up_with_a_critic_too(make: Any) -> None:
    rule, context = HierarchicalCredit(), CreditContext()
    choice(rule, decided(make, 0), lambda _: 0.3, context)
    chosen, credit = choice(rule, decided(make, 1), lambda _: 0.3, context)
    assert chosen == "state_value"
    assert [sum(own) for own in credit.advantages] == pytest.approx([-0.5, 0.5, -0.5, 0.5])


def test_the_evidence_is_among_the_metrics_of_a_step(make: Any) -> None:
    groups = [decided(make, n) for n in range(3)]
    columns = {"values": {key: own for each in groups for key, own in critic_of(each, opposite).items()}}
    _, report = training_samples(groups, HierarchicalCredit(), context=CreditContext(columns=columns))
    metrics = report.metrics()
    assert metrics["credit_evidence_calls"] == 12
    assert metrics["credit_evidence_critic"] == pytest.approx(12)
    assert metrics["credit_evidence_states"] < metrics["credit_evidence_mean"] < metrics["credit_evidence_critic"]


@pytest.mark.parametrize("settings", [{}, {"similarity": 0.5}])
def test_none_is_the_pool_of_state_value(settings: dict[str, Any]) -> None:
    rule = HierarchicalCredit.model_validate({"type": "hierarchical", "pool": None, **settings})
    assert rule == HierarchicalCredit(**settings)
    assert rule.pool == StateValueCredit().pool
