"""Promises of budgets: nothing is overspent, however many calls are under way, and a restart forgets nothing."""

import asyncio
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning import span as names
from agentlightning.errors import ConfigError
from agentlightning.gateway.answer import Usage
from agentlightning.gateway.config import BudgetConfig, Price
from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.upstream.limits import Budgets
from agentlightning.span import Span, new_span_id


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 30), st.floats(0, 1)), max_size=40))
async def test_nothing_is_ever_overspent(calls):
    budgets = Budgets(BudgetConfig(dollars=100, rollout_dollars=60, tokens=1000))
    spent, held = {"a": 0.0, "b": 0.0}, []
    for rollout, worst, share in calls:
        try:
            held.append((rollout, worst * share, await budgets.reserve(rollout, worst, 10)))
        except ApiError as api_error:
            assert api_error.status == 402  # noqa: PT017  most calls fit
        if len(held) > 3:
            paid, dollars, reservation = held.pop(0)
            reservation.settle(dollars, 5)
            spent[paid] += dollars
        assert all(dollars <= 60 + 1e-9 for dollars in spent.values())
        assert sum(spent.values()) <= 100 + 1e-9
    assert budgets.total.dollars == pytest.approx(sum(spent.values()))
    assert budgets.total.reserved_tokens == 10 * len(held)


async def test_what_is_set_aside_is_given_back_once():
    budgets = Budgets(BudgetConfig(rollout_tokens=100))
    first = await budgets.reserve("ro-1", 0, 100)
    with pytest.raises(ApiError, match="100 reserved for calls in flight; this call may use 1"):
        await budgets.reserve("ro-1", 0, 1)
    first.settle(0, 30)
    first.release()
    first.settle(0, 30)
    account = budgets.spent("ro-1")
    assert (account.tokens, account.reserved_tokens, budgets.num_rejected) == (30, 0, 1)
    (await budgets.reserve("ro-1", 0, 70)).release()


async def test_the_spans_of_a_rollout_say_what_it_has_spent_before_a_restart(store):
    attempted = await store.start_rollout({})
    ids = attempted.rollout_id, attempted.attempt.attempt_id
    paid = {names.COST: 0.4, names.INPUT_TOKENS: 10, names.OUTPUT_TOKENS: 5, names.PROVIDER_RETRIES: 0}
    ours = {names.INPUT_TOKENS: 1000, names.OUTPUT_TOKENS: 1000}
    several = {names.RESPONSE_ID: "one call", names.INPUT_TOKENS: 5, names.OUTPUT_TOKENS: 0, names.PROVIDER_RETRIES: 0}
    for attributes in (paid, paid, ours, several, several):
        await store.add_span(Span(*ids, "chat theirs", 1.0, span_id=new_span_id(), attributes=attributes))
    budgets = Budgets(BudgetConfig(rollout_dollars=1, rollout_tokens=100), store)
    calls = [budgets.reserve(ids[0], 0.1, 31) for _ in range(3)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert sorted(isinstance(result, ApiError) for result in results) == [False, False, True]
    assert budgets.spent(ids[0]).dollars == pytest.approx(0.8)


async def test_the_servers_total_outlives_it_with_calls_under_way_at_their_worst(tmp_path):
    config, file = BudgetConfig(dollars=1), tmp_path / "deep" / "store.db.spent"
    first = Budgets(config, file=file)
    (await first.reserve("ro-1", 0.5, 10)).settle(0.25, 10)
    await first.reserve("ro-2", 0.5, 10)  # Under way when the process is killed.
    with pytest.raises(ConfigError, match="in use by another server"):
        Budgets(config, file=file)
    first.close()
    second = Budgets(config, file=file)
    assert (second.total.dollars, second.total.tokens) == (0.75, 20)
    with pytest.raises(ApiError, match="the budget of this server is spent"):
        await second.reserve("ro-3", 0.26, 10)
    second.close()


def test_a_file_that_is_no_budgets_is_refused_and_left_as_it_is(tmp_path):
    other = tmp_path / "notes.txt"
    other.write_text("something else")
    with pytest.raises(ConfigError, match="is not a budget file"):
        Budgets(BudgetConfig(dollars=1, file=str(other)))
    assert other.read_text() == "something else"


def test_cache_writes_count_whichever_api_reports_them():
    response = DIALECTS["chat/completions"].response()
    details = {"cached_tokens": 10, "cache_write_tokens": 40}
    response.read({"usage": {"prompt_tokens": 100, "completion_tokens": 5, "prompt_tokens_details": details}})
    assert response.usage == Usage(100, 5, 10, 40)
    assert Price(input=1_000_000, cached_input=0).dollars(response.usage) == pytest.approx(50 + 1.25 * 40)


def test_a_price_counts_cached_tokens_for_what_they_cost():
    price = Price(input=2, output=10, cached_input=0.5)
    assert price.dollars(Usage(1_000_000, 100_000, 400_000)) == pytest.approx(1.2 + 0.2 + 1.0)
    assert Price(input=2).dollars(Usage(1_000_000, 5, 400_000)) == pytest.approx(2)


def test_a_price_counts_what_is_written_to_a_cache_for_what_that_costs():
    usage = Usage(1_000_000, written_tokens=200_000, written_hour_tokens=100_000)
    assert Price(input=4).dollars(usage) == pytest.approx(0.7 * 4 + 0.2 * 5 + 0.1 * 8)
    assert Price(input=4, cache_write=6, cache_write_hour=7).dollars(usage) == pytest.approx(0.7 * 4 + 0.2 * 6 + 0.7)


def test_what_anthropic_writes_to_its_cache_is_read_from_whole_answers_and_streams():
    created = {"ephemeral_5m_input_tokens": 30, "ephemeral_1h_input_tokens": 20}
    used = {"input_tokens": 10, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 50, "output_tokens": 7}
    expected = Usage(65, 7, 5, 30, 20)
    for more, usage in (({"cache_creation": created}, expected), ({}, Usage(65, 7, 5, 50, 0))):
        whole = DIALECTS["messages"].response()
        whole.read({"type": "message", "content": [], "usage": used | more})
        assert whole.usage == usage
    start = {"type": "message_start", "message": {"usage": used | {"cache_creation": created, "output_tokens": 1}}}
    for end in ({"output_tokens": 7}, used):
        response = DIALECTS["messages"].response()
        for event in (start, {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": end}):
            response.read(event)
        assert response.usage == expected


async def test_calls_of_no_rollout_share_no_rollouts_limit_and_all_share_the_servers():
    budgets = Budgets(BudgetConfig(rollout_tokens=100, tokens=350))
    for _ in range(2):
        (await budgets.reserve("", 0, 100)).settle(0, 100)
    with pytest.raises(ApiError, match="rollout 'ro-1'"):
        await budgets.reserve("ro-1", 0, 101)
    with pytest.raises(ApiError, match="the budget of this server"):
        await budgets.reserve("", 0, 200)
    assert budgets.total.tokens == 200


SPENDER = """
import asyncio, sys
from pathlib import Path
from agentlightning.gateway.config import BudgetConfig
from agentlightning.gateway.upstream.limits import Budgets

async def spend():
    budgets = Budgets(BudgetConfig(dollars=1000), file=Path(sys.argv[1]))
    for number in range(1, 100_000):
        (await budgets.reserve("ro-1", 0.5, 10)).settle(0.25, 10)
        print(number, flush=True)

asyncio.run(spend())
"""


@pytest.mark.chaos
def test_what_was_spent_is_known_after_the_process_was_killed(tmp_path):
    file = tmp_path / "spent"
    process = subprocess.Popen([sys.executable, "-c", SPENDER, str(file)], stdout=subprocess.PIPE, text=True)
    told = 0
    while told < 500:
        told = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    told = max(told, *(int(line) for line in process.stdout.read().splitlines() if line), 0)
    process.wait()
    process.stdout.close()
    budgets = Budgets(BudgetConfig(dollars=1000), file=file)
    assert told * 0.25 <= budgets.total.dollars <= told * 0.25 + 0.5
    budgets.close()
