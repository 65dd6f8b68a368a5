"""Budgets are announced before anything is spent, and kept."""

from __future__ import annotations

import pytest

from agentlightning import span as names
from agentlightning.algorithms.apo.config import (
    SearchBudget,
    Spending,
    announcement,
    check_budget,
    detectable_gain,
    price,
)
from agentlightning.algorithms.apo.search import usage
from agentlightning.errors import ConfigError
from agentlightning.span import Span


def test_each_limit_ends_the_search_in_words():
    spent = Spending(SearchBudget(calls=3, tokens=50, money=1e-3, seconds=100))
    assert spent.exhausted() is None
    spent.add(15, price(10, 5, 2.0, 10.0))
    assert spent.tokens == 15
    assert spent.money == pytest.approx((10 * 2 + 5 * 10) / 1e6)
    spent.calls += 3
    assert "3 evaluations" in str(spent.exhausted())
    assert "50 tokens" in str(Spending(SearchBudget(calls=None, tokens=50), tokens=50).exhausted())
    assert "0.001" in str(Spending(SearchBudget(calls=None, money=1e-3), money=0.01).exhausted())
    assert "5 seconds" in str(Spending(SearchBudget(calls=None, seconds=5), seconds=6).exhausted())


def test_calls_of_the_agent_cost_what_the_gateway_says_or_what_the_budget_does():
    budget = SearchBudget(agent_input_price=1.0, agent_output_price=3.0)
    used = {"gen_ai.operation.name": "chat", names.INPUT_TOKENS: 100, names.OUTPUT_TOKENS: 10}
    free = Span("r", "a", "chat", 0.0, span_id="1" * 16, sequence_id=1, attributes=used)
    priced = Span("r", "a", "chat", 0.0, span_id="2" * 16, sequence_id=2, attributes={**used, names.COST: 0.25})
    assert usage([free], budget) == (110, pytest.approx(130 / 1e6))
    assert usage([free, priced], budget) == (220, pytest.approx(0.25 + 130 / 1e6))


def test_what_is_put_aside_is_not_spent_on_the_search():
    spent = Spending(SearchBudget(calls=10), calls=4)
    assert spent.left(reserved=5) == 1
    assert spent.exhausted(reserved=6)
    assert spent.exhausted() is None


def test_a_resumed_run_goes_on_counting():
    spent = Spending(SearchBudget(), calls=7, tokens=9, money=0.5, seconds=3)
    again = Spending(SearchBudget())
    again.load_state_dict(spent.state_dict())
    assert (again.calls, again.tokens, again.money) == (7, 9, 0.5)
    assert again.elapsed >= 3


def test_a_budget_that_can_show_nothing_is_refused_before_it_is_spent():
    with pytest.raises(ConfigError, match=r"budget\.calls=5 is too small.*use at least 14"):
        check_budget(SearchBudget(calls=5), 14, "reflective")
    check_budget(SearchBudget(calls=None, tokens=1), 14, "reflective")


def test_the_announcement_says_what_the_budget_can_show():
    text = announcement(SearchBudget(calls=300, money=2), 120, 200)
    assert "300 evaluations or 2 in money" in text
    assert "120 are put aside" in text
    assert f"a gain of {detectable_gain(200):.2f}" in text
    assert detectable_gain(400) == pytest.approx(detectable_gain(100) / 2)
