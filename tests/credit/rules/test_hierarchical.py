"""The rule of each group is chosen by its own rollouts, and counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentlightning.credit import CreditContext, HierarchicalCredit, StateValueCredit, ValueCredit, training_samples


def values_of(*groups: list[Any]) -> dict[tuple[str, str], Any]:
    return {(t.rollout_id, t.span_id): np.full(2, 0.25) for group in groups for each in group for t in each.transitions}


def test_where_states_repeat_their_values_decide_and_elsewhere_the_critic_or_the_return(make: Any) -> None:
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

    context = CreditContext(columns={"values": values_of(same, apart)})
    learned = rule.assign([same, apart], context)
    critic = ValueCredit().assign([apart], context)[0]
    assert learned[0] is not None
    assert learned[1] is not None
    assert critic is not None
    assert learned[0].counts["hierarchical_state_value"] == 1
    assert learned[1].counts["hierarchical_value"] == 1
    assert [x.tolist() for x in learned[1].advantages[0]] == [x.tolist() for x in critic.advantages[0]]
    assert all(credit is not None and credit.returns is not None for credit in learned), "the critic learns from all"


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
