"""Learned values: generalised advantages by call and by token, against the sums written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.credit import training_samples
from agentlightning.credit.base import CreditContext, credit_rule
from agentlightning.credit.rules import ValueCredit
from agentlightning.errors import ConfigError

number = st.floats(-2, 2)
call = st.tuples(st.integers(-1, 1).map(float), st.lists(number, min_size=1, max_size=4))
rollouts = st.lists(
    st.tuples(st.integers(0, 1).map(float), st.lists(call, min_size=1, max_size=5)), min_size=1, max_size=3
)


def built(make: Any, batch: list[Any]) -> tuple[list[Any], CreditContext]:
    """(reward, [(step reward, values of the tokens)]) as trajectories and their column."""
    group, values = [], {}
    for i, (final, calls) in enumerate(batch):
        made = [make(f"r{i}", final, "x" * len(calls), [step for step, _ in calls])]
        counts = [len(own) for _, own in calls]
        from dataclasses import replace

        transitions = tuple(
            replace(one, response_token_ids=(7,) * n, logprobs=(-1.0,) * n)
            for one, n in zip(made[0].transitions, counts, strict=True)
        )
        group.append(replace(made[0], transitions=transitions))
        values |= {(t.rollout_id, t.span_id): np.array(own) for t, (_, own) in zip(transitions, calls, strict=True)}
    return group, CreditContext(columns={"values": values})


def expected(final: float, calls: list[Any], k: int, j: int, rule: ValueCredit) -> float:
    """The advantage of token j of call k, as the sums of the docstring."""
    states = [own[0] for _, own in calls] + [final]
    deltas = [
        step + (rule.gamma if i + 1 < len(calls) else 1.0) * states[i + 1] - states[i]
        for i, (step, _) in enumerate(calls)
    ]
    advantage = sum((rule.gamma * rule.lam) ** (i - k) * deltas[i] for i in range(k, len(calls)))
    tokens = [*calls[k][1], states[k] + advantage]
    return sum(rule.token_lam ** (i - j) * (tokens[i + 1] - tokens[i]) for i in range(j, len(tokens) - 1))


@given(
    batch=rollouts,
    gamma=st.sampled_from([0.5, 1.0]),
    lam=st.sampled_from([0.0, 0.9, 1.0]),
    token=st.sampled_from([0.8, 1.0]),
)
def test_it_gives_what_the_sums_say(make: Any, batch: Any, gamma: float, lam: float, token: float) -> None:
    rule = ValueCredit(gamma=gamma, lam=lam, token_lam=token)
    (credit,) = rule.assign([built(make, batch)[0]], built(make, batch)[1])
    sums = [
        [[expected(final, calls, k, j, rule) for j in range(len(own))] for k, (_, own) in enumerate(calls)]
        for final, calls in batch
    ]
    if credit is None:
        assert all(abs(x) < 1e-9 for one in sums for own in one for x in own)
        return
    assert credit.returns is not None
    for i, (_, calls) in enumerate(batch):
        for k, (_, own) in enumerate(calls):
            assert credit.advantages[i][k] == pytest.approx(sums[i][k], abs=1e-9)
            assert credit.returns[i][k] == pytest.approx(np.array(sums[i][k]) + np.array(own), abs=1e-9)


def test_with_lambda_1_every_token_learns_the_return_whatever_the_values(make: Any) -> None:
    group, context = built(make, [(1.0, [(0.0, [0.3, 0.9]), (0.5, [0.1])])])
    (credit,) = ValueCredit(lam=1.0).assign([group], context)
    assert credit is not None
    assert credit.returns is not None
    assert [own.tolist() for own in credit.returns[0]] == [pytest.approx([1.5, 1.5]), pytest.approx([1.5])]
    assert credit.advantages[0][0] == pytest.approx([1.2, 0.6])


def test_values_and_returns_become_columns_of_the_samples(make: Any) -> None:
    group, context = built(make, [(1.0, [(0.0, [0.25, 0.5])]), (0.0, [(0.0, [0.25])])])
    (sample,), report = training_samples([group], ValueCredit(lam=1.0), context=context)
    found = {n.rollout_id: i for i, n in enumerate(sample.tree.nodes) if n.sampled}
    assert sample.columns["values"][found["r0"]].tolist() == [0.25, 0.5]
    assert sample.columns["returns"][found["r0"]].tolist() == [1.0, 1.0]
    assert report.metrics()["credit_value_groups"] == 1.0


def test_a_column_that_was_not_computed_is_named(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"needs the column 'values' of call r-0 of rollout r"):
        credit_rule("gae").assign([[make("r", 1.0, "x")]], CreditContext())


def test_calls_without_tokens_do_no_harm(make: Any) -> None:
    (credit,) = ValueCredit().assign([[make("r", 1.0, "xy", tokens=0)]], CreditContext(columns={"values": {}}))
    assert credit is not None
    assert [len(own) for rollout in credit.advantages for own in rollout] == [0, 0]
