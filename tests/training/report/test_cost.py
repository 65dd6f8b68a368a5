"""What a run has cost, from its metrics and from the spans in its store."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning import span as names
from agentlightning.rollouts import EnqueueRolloutRequest
from agentlightning.span import Span
from agentlightning.store import InMemoryLightningStore
from agentlightning.training.report.result import Cost, cost_of_steps, fill_report, with_providers


def searched(step: int, stage: int, tokens: int, money: float) -> dict[str, Any]:
    return {"step": step, "stage": stage, "apo_tokens": tokens, "apo_money": money, "apo_model_calls": 2 * step}


def test_a_search_counts_its_total_so_that_its_last_step_has_it_and_several_searches_add_up() -> None:
    learned = {"step": 3, "stage": 2, "sampled_tokens": 25, "tokens_per_second": 4.0, "collect_seconds": 2.5}
    lines = [searched(1, 1, 100, 0.25), searched(2, 1, 300, 0.5), learned, searched(4, 3, 50, 0.25)]
    assert cost_of_steps(lines) == Cost(25, 4 + 8, 350, 0.75)


def test_money_without_a_price_is_unknown_and_not_nothing() -> None:
    assert cost_of_steps([searched(1, 1, 100, 0.0)]).search_money is None


async def call(store: InMemoryLightningStore, name: str, **attributes: Any) -> None:
    [rollout] = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input={}, rollout_id=name)])
    attempted = await store.dequeue_rollout()
    assert attempted is not None
    usage = {names.INPUT_TOKENS: 20, names.OUTPUT_TOKENS: 5}
    ids = rollout.rollout_id, attempted.attempt.attempt_id
    await store.add_span(Span(*ids, "chat", 0.0, span_id="1" * 16, attributes=usage | attributes))


async def test_calls_to_providers_are_read_from_the_spans_of_the_run_but_for_those_that_a_search_has_counted() -> None:
    store = InMemoryLightningStore()
    await call(store, "r1-train-1", **{names.PROVIDER_RETRIES: 0, names.COST: 0.007})
    await call(store, "r1-after-1", **{names.PROVIDER_RETRIES: 0})
    await call(store, "r1-train-2")
    await call(store, "r1-trial-000001-p-train00001-0", **{names.PROVIDER_RETRIES: 0, names.COST: 5.0})
    await call(store, "r2-train-1", **{names.PROVIDER_RETRIES: 0, names.COST: 9.0})
    found = await with_providers(Cost(), store, "r1")
    await store.close()
    assert found == Cost(
        provider_calls=2, provider_tokens=50, provider_dollars=pytest.approx(0.007), provider_calls_without_price=1
    )


def test_the_report_has_money_where_prices_are_known_and_says_where_not() -> None:
    report = {
        **dict.fromkeys(("steps", "rollouts", "failed_rollouts", "seconds", "rollbacks"), 0),
        "rejected_rollouts": {},
        "held_out": {},
        "cost": Cost(12, 3, 90, None, 4, 30, 0.25, 1).as_json(),
    }
    text = fill_report("r", report)
    assert "| sampled tokens of training | 12 |" in text
    assert "| tokens of the prompt search, agent included | 90 |" in text
    assert "| money of the prompt search | unknown, no price is set |" in text
    assert "| US dollars of providers beside the search | 0.2500, without 1 calls that have no price |" in text
    assert "Stages" not in text, "one algorithm has no stages"
