"""State values: the credit of the steps of a rollout adds up to what became of it, and lands where it was earned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.credit.base import CreditContext, CreditMemory, credit_rule
from agentlightning.credit.rules import StateValueCredit
from agentlightning.errors import ConfigError


def assign(rule: StateValueCredit, group: list[Any], context: CreditContext | None = None) -> list[list[float]]:
    (credit,) = rule.assign([group], context or CreditContext())
    return [] if credit is None else [list(own) for own in credit.advantages]


rollouts = st.lists(
    st.tuples(st.integers(-2, 2).map(float), st.text("abc", min_size=1, max_size=6), st.integers(0, 2).map(float)),
    min_size=2,
    max_size=6,
)
rules = st.builds(
    StateValueCredit,
    history=st.integers(0, 3),
    pool=st.sampled_from([0.0, 0.5]),
    prior_visits=st.sampled_from([0.0, 1.0, 5.0]),
)


@given(batches=st.lists(rollouts, min_size=1, max_size=3), rule=rules, learned=st.booleans())
def test_the_credit_of_a_rollout_adds_up_to_its_return_less_the_value_of_its_first_state(
    make: Any, batches: list[Any], rule: StateValueCredit, learned: bool
) -> None:
    context = CreditContext()
    for batch in batches:
        group = [
            make(f"r{i}", final, ["s", *text], [step] * (len(text) + 1)) for i, (final, text, step) in enumerate(batch)
        ]
        values = {(call.rollout_id, call.span_id): np.array([0.3, 9.0]) for each in group for call in each.transitions}
        context = CreditContext(context.memory, {"values": values} if learned else {})
        found = assign(rule, group, context)
        returns = [final + step * (len(text) + 1) for final, text, step in batch]
        starts = [total - sum(own) for total, own in zip(returns, found, strict=False)]
        assert starts == pytest.approx(starts[:1] * len(starts)), "all start in the same state, which has one value"
        if found and (rule.pool == 0 or len(batches) == 1):
            assert starts[0] == pytest.approx(sum(returns) / len(returns))


def test_credit_lands_on_the_step_that_decided(make: Any) -> None:
    group = [make(f"good{i}", 1.0, "sabc") for i in range(2)] + [make(f"bad{i}", 0.0, "saxc") for i in range(2)]
    found = assign(StateValueCredit(), group)
    assert found[0] == pytest.approx([0.0, 0.5, -0.5, 0.5]), "c is a state of both: b led from good to average"
    clear = [make(f"good{i}", 1.0, "sabc") for i in range(2)] + [make(f"bad{i}", 0.0, "saxy") for i in range(2)]
    assert assign(StateValueCredit(), clear) == [[0.0, 0.5, 0.0, 0.0]] * 2 + [[0.0, -0.5, 0.0, 0.0]] * 2


def test_a_common_history_tells_states_apart_that_look_alike(make: Any) -> None:
    group = [make(f"good{i}", 1.0, "sabc") for i in range(2)] + [make(f"bad{i}", 0.0, "saxc") for i in range(2)]
    (good, *_) = assign(StateValueCredit(history=1), group)
    value_of_c = (1 * 0.5 + 2 * 1.0) / 3  # The order 0 has weight 1, the order 1 weight 2.
    value_of_a = 0.5
    assert good == pytest.approx([0.0, 1.0 - value_of_a, value_of_c - 1.0, 1.0 - value_of_c])


def test_a_state_seen_once_leans_on_the_value_before_it_or_on_the_learned_one(make: Any) -> None:
    group = [make("a", 1.0, "sx"), make("b", 0.0, "sy")]
    assert assign(StateValueCredit(), group)[0] == pytest.approx([0.25, 0.25]), "V(x) = (1 + V(s)) / 2"
    assert assign(StateValueCredit(prior_visits=0), group)[0] == pytest.approx([0.5, 0.0])
    values = {(call.rollout_id, call.span_id): np.array([0.9, 0.0]) for each in group for call in each.transitions}
    found = assign(StateValueCredit(prior_visits=3), group, CreditContext(columns={"values": values}))
    value_of_x = (1.0 + 3 * 0.9) / 4
    assert found[0] == pytest.approx([value_of_x - 0.5, 1.0 - value_of_x])


def test_values_are_pooled_over_earlier_groups_of_the_same_task_alone(make: Any) -> None:
    rule = StateValueCredit(pool=0.5)
    context = CreditContext()
    assign(rule, [make(f"r{i}", 1.0, "sx", task={"n": 1}) for i in range(4)], context)
    group = [make("a", 0.0, "sx", task={"n": 1}), make("b", 0.0, "sx", task={"n": 1})]
    found = assign(rule, group, context)
    pooled = (2 * 0.0 + 0.5 * 4 * 1.0) / (2 + 0.5 * 4)
    assert found == [pytest.approx([0.0, -pooled])] * 2
    other = [make("a", 0.0, "sx", task={"n": 2}), make("b", 0.0, "sx", task={"n": 2})]
    assert assign(rule, other, context) == [], "equal rewards teach nothing where nothing is known"
    assert assign(StateValueCredit(pool=0), group, context) == []


def test_a_memory_that_went_through_a_file_gives_the_same_credit(make: Any) -> None:
    rule, first = StateValueCredit(), CreditContext()
    assign(rule, [make(f"r{i}", float(i % 2), "sxy"[: 2 + i % 2]) for i in range(4)], first)
    second = CreditMemory()
    second.load_state_dict(first.memory.state_dict())
    group = [make("a", 1.0, "sxz"), make("b", 0.0, "sz")]
    assert assign(rule, group, first) == assign(rule, group, CreditContext(second))


def test_nearly_the_same_observation_is_the_same_state_where_asked(make: Any) -> None:
    group = [
        make("a", 1.0, ["start", "you see a red door at noon"]),
        make("b", 0.0, ["start", "you see a red door at one"]),
        make("c", 0.0, ["start", "nothing here"]),
    ]
    alike = StateValueCredit(similarity=0.8, pool=0)
    assert assign(alike, group)[0] == pytest.approx([0.5 - 1 / 3, 0.5])
    assert assign(alike, group[::-1])[2] == pytest.approx([0.5 - 1 / 3, 0.5])
    assert assign(StateValueCredit(pool=0), group)[0] != pytest.approx([0.5 - 1 / 3, 0.5])
    with pytest.raises(ConfigError, match=r"similarity=0.8 compares observations within a group only; set pool=0"):
        credit_rule({"type": "state_value", "similarity": 0.8, "pool": 0.5})


def test_the_same_observation_of_another_agent_is_another_state(make: Any) -> None:
    group = [make("a", 1.0, "x", agent="writer"), make("b", 0.0, "x", agent="critic")]
    assert assign(StateValueCredit(prior_visits=0), group) == []
    assert assign(StateValueCredit(prior_visits=1), group)[0] == pytest.approx([0.25])


def test_what_was_found_is_counted(make: Any) -> None:
    (credit,) = StateValueCredit().assign([[make("a", 1.0, "sxy"), make("b", 0.0, "sxz")]], CreditContext())
    assert credit is not None
    assert credit.counts == {"states": 4, "states_repeated": 2}
