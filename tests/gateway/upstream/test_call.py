"""Promises of calls to providers: which server is asked, how often, and what the caller and the span are told."""

import asyncio
import json
import logging
import time
from collections import Counter
from contextlib import asynccontextmanager

import anthropic
import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.provider import Reply, ScriptedProvider, chat_answer
from tests.support.provider_streams import chat_events
from tests.support.waiting import until

from agentlightning import span as names
from agentlightning.errors import ConfigError
from agentlightning.gateway.answer import Usage
from agentlightning.gateway.config import BudgetConfig, GatewayConfig, Price, Provider
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.upstream import call as call_module
from agentlightning.gateway.upstream.call import RETRY_FLOOR, ServerPool, UpstreamCall
from agentlightning.gateway.upstream.limits import Budgets
from agentlightning.store import LightningStore
from agentlightning.transport import Transport

pytestmark = pytest.mark.integration

KEY = "sk-marked-key-nobody-may-see"
HI = [{"role": "user", "content": "hi"}]
FINE = Reply(chat_answer("Hello."))
BROKEN = Reply({"error": {"message": f"we failed, {KEY}", "type": "server_error"}}, status=500)


@asynccontextmanager
async def connected(provider, **options):
    """The servers of a provider, and a transport to them."""
    transport = Transport()
    pool = ServerPool(provider, lambda: transport, **options)
    try:
        yield pool
    finally:
        await pool.close()
        await transport.close()


def made_of(*servers, **options):
    urls = [server if isinstance(server, str) else f"{server.url}/v1" for server in servers]
    return Provider(name="them", base_urls=tuple(urls), **options)


async def call(pool, affinity="", body=b"{}", **options):
    options = {"price": pool.provider.price} | options
    async with UpstreamCall(pool, "chat/completions", body, affinity=affinity, **options) as asked:
        asked.settle(Usage(10, 5))
        return asked


# -- which server -----------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.integers(2, 6), st.data())
def test_a_server_that_is_lost_moves_only_its_own_conversations(count, data):
    pool = ServerPool(made_of(*(f"http://host{number}/v1" for number in range(count))), Transport)
    talks = [f"ro-{number}/at-1" for number in range(40)]
    before = {talk: pool.choose(talk) for talk in talks}
    lost = data.draw(st.sampled_from(pool.replicas))
    lost.record_failure(unreachable=True)
    after = {talk: pool.choose(talk) for talk in talks}
    assert all(after[talk] is before[talk] for talk in talks if before[talk] is not lost)
    assert all(after[talk] is not lost for talk in talks)
    lost.record_success()
    assert {talk: pool.choose(talk) for talk in talks} == before


def test_conversations_are_spread_over_the_servers():
    pool = ServerPool(made_of(*(f"http://host{number}/v1" for number in range(4))), Transport)
    found = Counter(pool.choose(f"ro-{number}/at-1").url for number in range(4000))
    assert len(found) == 4
    assert min(found.values()) > 800


async def test_a_conversation_stays_with_its_server_and_goes_to_another_while_that_is_gone():
    async with (
        ScriptedProvider(lambda seen: FINE) as one,
        ScriptedProvider(lambda seen: FINE) as two,
        connected(made_of(one, two, health_seconds=0.05), clock=lambda: time.monotonic() * 20) as pool,
    ):
        for _ in range(5):
            await call(pool, "ro-1/at-1")
        home, other = (one, two) if one.seen else (two, one)
        assert (len(home.seen), len(other.seen)) == (5, 0)
        await home.stop()
        asked = await call(pool, "ro-1/at-1")
        assert (asked.retries, len(other.seen)) == (1, 1)
        assert (await call(pool, "ro-1/at-1")).retries == 0
        await home.start()
        await until(lambda: all(server.up for server in pool.replicas))
        await call(pool, "ro-1/at-1")
        assert (len(home.seen), len(other.seen)) == (6, 2)


async def test_a_server_that_says_it_is_not_well_is_left_alone_before_a_call_meets_it():
    async with (
        ScriptedProvider(lambda seen: FINE) as one,
        ScriptedProvider(lambda seen: FINE) as two,
        connected(made_of(one, two, health_seconds=0.05)) as pool,
    ):
        await call(pool, "x")
        home, other = (one, two) if one.seen else (two, one)
        home.healthy = False
        await until(lambda: any(not server.up for server in pool.replicas))
        assert (await call(pool, "x")).retries == 0
        assert len(other.seen) == 1


async def test_a_call_is_never_refused_for_want_of_a_well_server():
    async with ScriptedProvider([BROKEN] * 6 + [FINE]) as server, connected(made_of(server, retries=0)) as pool:
        for _ in range(6):
            with pytest.raises(ApiError):
                await call(pool)
        assert not pool.replicas[0].up
        assert (await call(pool)).status == 200


# -- sending again ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first",
    [
        BROKEN,
        *(Reply(status=status) for status in (502, 503, 504, 529)),
        Reply(head=False, end="close"),
        Reply(chat_answer("Hello."), end="close"),
        Reply({"error": {"message": "slow down"}}, status=429, headers={"retry-after-ms": "1"}),
    ],
)
async def test_a_call_that_failed_before_its_answer_is_sent_once_more(first):
    async with ScriptedProvider([first, FINE]) as server, connected(made_of(server)) as pool:
        asked = await call(pool)
        assert (asked.retries, len(server.seen), pool.num_retries) == (1, 2, 1)
        assert json.loads(asked.body) == chat_answer("Hello.")


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_what_is_the_callers_affair_is_not_sent_again(status):
    refused = Reply({"error": {"message": "too long", "code": "context_length_exceeded", "param": "messages"}}, status)
    async with ScriptedProvider([refused, FINE]) as server, connected(made_of(server)) as pool:
        with pytest.raises(ApiError, match="too long") as caught:
            await call(pool)
        api_error = caught.value
        assert (api_error.status, api_error.code, api_error.param) == (status, "context_length_exceeded", "messages")
        assert (api_error.retry, len(server.seen)) == (False, 1)


async def test_nothing_is_sent_again_once_a_byte_was_there_to_be_shown():
    begun = Reply(events=chat_events(["Hel", "lo."])[:2], end="close")
    async with ScriptedProvider([begun, FINE]) as server, connected(made_of(server)) as pool:
        async with UpstreamCall(pool, "chat/completions", b"{}", stream=True) as asked:
            with pytest.raises(ApiError, match="closed the connection"):
                [events async for events in asked.events()]
        assert (len(server.seen), asked.retries) == (1, 0)


async def test_a_stream_that_closes_before_its_first_byte_is_asked_for_again():
    replies = [Reply(events=[], end="close"), Reply(events=chat_events(["Hello."]))]
    async with ScriptedProvider(replies) as server, connected(made_of(server)) as pool:
        async with UpstreamCall(pool, "chat/completions", b"{}", stream=True) as asked:
            stream = b"".join([events async for events in asked.events()])
            asked.settle(None)
        assert stream == b"".join(chat_events(["Hello."]))
        assert asked.retries == 1


async def test_an_outage_is_not_multiplied():
    async with ScriptedProvider(lambda seen: BROKEN) as server, connected(made_of(server)) as pool:
        calls = 60

        async def one():
            with pytest.raises(ApiError):
                await call(pool)

        await asyncio.gather(*(one() for _ in range(calls)))
        assert calls < len(server.seen) <= calls * 1.2 + RETRY_FLOOR


async def test_an_outage_that_goes_on_is_not_multiplied_either(monkeypatch):
    monkeypatch.setattr(call_module, "_BACKOFF_SECONDS", 0.0)
    async with ScriptedProvider(lambda seen: BROKEN) as server, connected(made_of(server)) as pool:
        for _ in range(60):  # one after the other: each might have saved up for its own repetition
            with pytest.raises(ApiError):
                await call(pool)
        assert 60 + RETRY_FLOOR <= len(server.seen) <= 60 * 1.2 + RETRY_FLOOR


async def test_who_asks_to_be_left_alone_for_long_is_not_asked_again_and_the_caller_may_be():
    busy = Reply({"error": {"message": "slow down"}}, status=429, headers={"retry-after": "30"})
    async with ScriptedProvider([busy]) as server, connected(made_of(server, max_wait_seconds=5)) as pool:
        with pytest.raises(ApiError) as caught:
            await call(pool)
        assert (caught.value.status, caught.value.retry, caught.value.retry_after) == (429, True, 30)
        assert len(server.seen) == 1


async def test_all_calls_of_a_model_wait_as_long_as_its_server_asked_one_of_them_to():
    times = []

    def answer(seen):
        times.append((time.monotonic(), seen.json["model"]))
        busy = Reply({"error": {"message": "slow down"}}, status=429, headers={"retry-after-ms": "400"})
        return busy if len(times) == 1 else FINE

    async with ScriptedProvider(answer) as server, connected(made_of(server, retries=0)) as pool:
        with pytest.raises(ApiError):
            await call(pool, body=b'{"model": "a"}', model="a")
        await call(pool, body=b'{"model": "b"}', model="b")
        await asyncio.gather(*(call(pool, body=b'{"model": "a"}', model="a") for _ in range(3)))
        first, other, *waited = times
        assert (other[1], len(waited)) == ("b", 3)
        assert other[0] - first[0] < 0.4 <= min(at for at, _ in waited) - first[0]
        assert pool.replicas[0].up
        assert pool.replicas[0].pause_seconds("a") == 0


async def test_a_call_is_turned_away_at_once_where_its_server_wants_none_for_long():
    busy = Reply({"error": {"message": "slow down"}}, status=429, headers={"retry-after": "30"})
    async with ScriptedProvider([busy, FINE]) as server, connected(made_of(server, max_wait_seconds=5)) as pool:
        for _ in range(2):
            with pytest.raises(ApiError) as caught:
                await call(pool)
            assert (caught.value.status, caught.value.retry) == (429, True)
            assert 29 <= caught.value.retry_after <= 30
        assert len(server.seen) == 1


async def test_callers_that_meet_a_rate_limit_together_all_wait_for_its_end():
    ends = []

    def answer(seen):
        ends.append(ends[0] if ends else time.monotonic() + 0.4)
        busy = Reply({"error": {"message": "slow down"}}, status=429, headers={"retry-after-ms": "400"})
        return busy if time.monotonic() < ends[0] else FINE

    async with ScriptedProvider(answer) as server, connected(made_of(server)) as pool:
        calls = await asyncio.gather(*(call(pool, body=b"{}", model="a") for _ in range(64)))
        assert {asked.status for asked in calls} == {200}
        assert sum(asked.retries for asked in calls) == pool.num_retries == len(server.seen) - 64
        assert pool.rate_limiter.in_flight == 0
        assert pool.take_retry(), "the budget is for outages"


SLOW_DOWN = Reply({"error": {"message": "slow down"}}, status=429, headers={"retry-after-ms": "1"})


@pytest.mark.parametrize(
    "met", [[SLOW_DOWN] * 3, [BROKEN, SLOW_DOWN], [SLOW_DOWN, BROKEN], [SLOW_DOWN, BROKEN, SLOW_DOWN]]
)
async def test_a_rate_limit_is_waited_for_beside_the_retries_of_an_outage(met):
    async with ScriptedProvider([*met, FINE]) as server, connected(made_of(server)) as pool:
        asked = await call(pool)
        assert (asked.status, asked.retries, pool.num_retries, len(server.seen)) == (200, *[len(met)] * 2, len(met) + 1)


async def test_rate_limits_are_waited_for_no_longer_than_a_call_may_wait():
    busy = Reply({"error": {"message": "slow down"}}, status=429, headers={"retry-after-ms": "300"})
    async with ScriptedProvider(lambda seen: busy) as server, connected(made_of(server, max_wait_seconds=0.7)) as pool:
        with pytest.raises(ApiError, match="slow down") as caught:
            await call(pool)
        assert (caught.value.retry, len(server.seen)) == (True, 3)


@pytest.mark.parametrize(
    "met", [BROKEN, Reply(status=520), Reply(status=408), Reply(status=429), Reply(head=False, end="close")]
)
async def test_the_caller_may_retry_while_the_budget_of_retries_is_empty(met, monkeypatch):
    monkeypatch.setattr(call_module, "_BACKOFF_SECONDS", 0.0)
    async with ScriptedProvider(lambda seen: met) as server, connected(made_of(server)) as pool:
        hints = []
        for _ in range(int(RETRY_FLOOR) + 4):
            with pytest.raises(ApiError) as caught:
                await call(pool)
            hints.append(caught.value.retry)
        assert (hints[0], hints[-1]) == (False, None)


@pytest.mark.parametrize("status", [400, 404, 408, 409, 422, 429, 500, 501, 502, 503, 504, 520, 529])
@pytest.mark.parametrize(("hint", "expected"), [(None, None), ("true", True), ("false", False)])
async def test_who_does_not_retry_leaves_it_to_the_caller_as_its_provider_says(status, hint, expected):
    reply = Reply({"error": {"message": "no"}}, status, {} if hint is None else {"x-should-retry": hint})
    async with ScriptedProvider([reply, FINE]) as server, connected(made_of(server, retries=0)) as pool:
        with pytest.raises(ApiError, match="no") as caught:
            await call(pool)
        assert (caught.value.status, caught.value.retry, len(server.seen)) == (status, expected, 1)


async def test_a_provider_that_asks_for_a_retry_or_for_none_is_respected():
    replies = [Reply(status=422, headers={"x-should-retry": "true"}), FINE]
    async with ScriptedProvider(replies) as server, connected(made_of(server)) as pool:
        assert (await call(pool)).retries == 1
    replies = [Reply(status=503, headers={"x-should-retry": "false"}), FINE]
    async with ScriptedProvider(replies) as server, connected(made_of(server)) as pool:
        with pytest.raises(ApiError) as caught:
            await call(pool)
        assert (caught.value.retry, len(server.seen)) == (False, 1)


@pytest.mark.parametrize("user", ["me:p%40ss-word-long", "me", ":only-a-password", "token:"])
async def test_a_user_in_a_base_url_is_sent_as_the_sdk_sends_it(user):
    async with ScriptedProvider([FINE, FINE]) as server:
        url = f"{server.url}/v1".replace("//", f"//{user}@")
        async with connected(made_of(url, api_key="sk-theirs-0123456789")) as pool, httpx.AsyncClient() as client:
            await call(pool)
            await client.post(url)
            assert "@" not in pool.replicas[0].url
        ours, theirs = server.seen
        assert ours.headers["authorization"] == theirs.headers["authorization"]


async def test_a_whole_answer_that_breaks_off_is_paid_for_beside_the_one_that_came():
    answer = chat_answer("Hello.")
    price, length = Price(input=1e6, output=1e6), len(json.dumps(answer, separators=(",", ":")))
    half = Reply(answer, end="close")
    async with ScriptedProvider([half, FINE]) as server, connected(made_of(server, price=price)) as pool:
        paid = await call(pool, body=b"x" * 400, max_output_tokens=5000)
        assert (len(server.seen), paid.retries, paid.usage) == (2, 1, Usage(10, 5))
        lost = 100 + length // 4
        kept = paid.attributes()
        assert (kept[names.COST], pool.dollars) == (15 + lost, 15 + lost)
        assert (kept[names.INPUT_TOKENS], kept[names.OUTPUT_TOKENS]) == (110, 5 + length // 4)


@pytest.mark.parametrize(("most", "tries"), [(1000, 2), (300, 1)])
async def test_a_budget_knows_of_an_answer_that_broke_off_before_the_call_is_sent_again(most, tries):
    budgets = Budgets(BudgetConfig(rollout_tokens=most))
    half = Reply(chat_answer("Hello."), end="close")
    async with ScriptedProvider([half] * 3) as server, connected(made_of(server), budgets=budgets) as pool:
        with pytest.raises(ApiError) as caught:
            await call(pool, body=b"x" * 400, max_output_tokens=50, rollout_id="ro-1")
        assert (caught.value.status, len(server.seen)) == (402 if tries == 1 else 502, tries)
        account = budgets.spent("ro-1")
        assert (account.tokens, account.reserved_tokens) == (tries * 150, 0)


async def test_a_busy_server_passes_its_call_to_another_at_once():
    busy = Reply({"error": {"message": "slow down"}}, status=429, headers={"retry-after": "30"})
    async with (
        ScriptedProvider(lambda seen: busy) as one,
        ScriptedProvider(lambda seen: busy) as two,
        connected(made_of(one, two, max_wait_seconds=5)) as pool,
    ):
        with pytest.raises(ApiError):
            await call(pool, "x")
        assert (len(one.seen), len(two.seen)) == (1, 1)


async def test_what_a_hung_up_stream_cost_is_estimated_and_kept():
    endless = Reply(events=chat_events(["data: a", "b"])[:3], end="hang")
    price = Price(input=1e6, output=1e6)
    async with ScriptedProvider([endless]) as server, connected(made_of(server, price=price)) as pool:
        async with UpstreamCall(pool, "chat/completions", b"x" * 400, stream=True, price=price) as asked:
            async for events in asked.events():
                if b'"b"' in events:
                    break
        assert asked.usage == Usage(100, 3)
        assert asked.attributes()[names.COST] == 103
        await asyncio.wait_for(server.hung_up.wait(), 10)
        assert pool.rate_limiter.in_flight == 0


def test_a_key_that_is_not_there_is_said_at_the_start(monkeypatch):
    monkeypatch.delenv("THEIR_KEY", raising=False)
    with pytest.raises(ConfigError, match="THEIR_KEY, which is not set"):
        ServerPool(made_of("http://host/v1", api_key_env="THEIR_KEY"), Transport)


# -- bad providers, as the official SDKs meet them ---------------------------------------------------------------------


@pytest.fixture
async def ask(serve):
    """ask(replies) -> (the service, the provider behind its model "theirs")."""
    opened = []

    async def start(replies, *, budget=None, use_store=None, **options):
        provider = await ScriptedProvider(replies).start()
        opened.append(provider)
        them = {"name": "them", "base_urls": [f"{provider.url}/v1"], "api_key": KEY, "headers": {"x-extra": KEY}}
        rule = {"model": "theirs", "provider": "them"}
        config = {"providers": [them | options], "routes": [rule], "budget": budget or {}}
        return await serve([], config=GatewayConfig.model_validate(config), use_store=use_store), provider

    yield start
    for provider in opened:
        await provider.stop()


BAD = {
    "answers 500": (BROKEN, openai.InternalServerError, anthropic.InternalServerError, "we failed"),
    "refuses the key": (
        Reply({"error": {"message": f"Incorrect API key provided: {KEY}"}}, status=401),
        openai.InternalServerError,
        anthropic.InternalServerError,
        "rejected the configured API key",
    ),
    "knows no such model": (
        Reply({"error": {"message": "no such model"}}, status=404),
        openai.NotFoundError,
        anthropic.NotFoundError,
        "no such model",
    ),
    "has had enough": (
        Reply({"error": {"message": "slow down"}}, status=429),
        openai.RateLimitError,
        anthropic.RateLimitError,
        "slow down",
    ),
    "closes before the first byte": (
        Reply(head=False, end="close"),
        openai.InternalServerError,
        anthropic.InternalServerError,
        "closed the connection",
    ),
    "closes in the middle": (
        Reply(chat_answer("Hello."), end="close"),
        openai.InternalServerError,
        anthropic.InternalServerError,
        "closed the connection",
    ),
    "hangs": (
        Reply(head=False, end="hang"),
        openai.InternalServerError,
        anthropic.InternalServerError,
        "sent nothing for",
    ),
    "sends broken JSON": (
        Reply(b'{"choices": ['),
        openai.InternalServerError,
        anthropic.InternalServerError,
        "not JSON",
    ),
}


@pytest.mark.parametrize("bad", BAD)
async def test_a_bad_provider_is_the_sdks_proper_exception_and_no_key_is_seen(bad, ask, caplog, tmp_path):
    caplog.set_level(logging.DEBUG, "agentlightning")
    reply, for_openai, for_anthropic, said = BAD[bad]
    store = LightningStore(tmp_path / "store.db")
    service, provider = await ask(lambda seen: reply, timeout_seconds=0.2, use_store=store)
    client = (await service.client()).with_options(max_retries=2)
    with pytest.raises(for_openai, match=said) as caught:
        await client.chat.completions.create(model="theirs", messages=HI)
    assert caught.value.response.headers["x-should-retry"] == "false"
    asked = len(provider.seen)
    assert asked <= 2, "retries happen at one place"
    client = (await service.anthropic()).with_options(max_retries=2)
    with pytest.raises(for_anthropic, match=said) as other:
        await client.messages.create(model="theirs", max_tokens=9, messages=HI)
    spans = await service.spans()
    assert [span.status_code for span in spans] == ["ERROR", "ERROR"]
    assert all(said in span.status_message for span in spans)
    assert spans[0].attributes[names.PROVIDER_RETRIES] == asked - 1
    await service.exits.aclose()
    await store.close()
    shown = [caplog.text, str(caught.value), str(other.value), repr(caught.value.body), repr(spans)]
    assert not any(KEY in text for text in shown)
    assert not any(KEY.encode() in file.read_bytes() for file in tmp_path.iterdir())


@pytest.mark.parametrize("status", [429, 500, 503, 529])
async def test_the_headers_of_an_error_reach_the_caller(status, ask):
    headers = {"retry-after": "7", "retry-after-ms": "6500", "x-request-id": "req-1", "x-ratelimit-remaining": "0"}
    service, _ = await ask([Reply({"error": {"message": "no"}}, status, headers)], retries=0)
    client = await service.client()
    with pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(model="theirs", messages=HI)
    seen = caught.value.response.headers
    assert {name: seen.get_list(name) for name in headers} == {name: [value] for name, value in headers.items()}
    assert "x-should-retry" not in seen


@pytest.mark.parametrize("end", ["close", "whole"])
async def test_a_stream_that_breaks_off_is_an_error_in_the_stream(end, ask):
    service, _ = await ask([Reply(events=chat_events(["Hel", "lo."])[:2], end=end)])
    client = await service.client()
    heard = []

    async def listen():
        stream = await client.chat.completions.create(model="theirs", messages=HI, stream=True)
        heard.extend([chunk.choices[0].delta.content async for chunk in stream])

    with pytest.raises(openai.APIError, match="them"):
        await listen()
    (span,) = await service.spans()
    assert (span.status_code, "Hel" in span.attributes[names.OUTPUT_MESSAGES]) == ("ERROR", True)


async def test_a_caller_that_hangs_up_hangs_up_on_the_provider(ask):
    service, provider = await ask([Reply(events=chat_events(["Hel", "lo."])[:2], end="hang")])
    client = await service.client()
    stream = await client.chat.completions.create(model="theirs", messages=HI, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    await asyncio.wait_for(provider.hung_up.wait(), 10)
    await until(lambda: service.gateway.counters.cancelled == 1)
    (span,) = await service.spans()
    assert (span.status_code, span.attributes[names.ERROR_TYPE]) == ("ERROR", "client_disconnected")


async def test_limits_turn_a_call_away_with_a_time_to_come_back(ask):
    service, provider = await ask([FINE], requests_per_minute=1, max_wait_seconds=1)
    client = await service.client()
    await client.chat.completions.create(model="theirs", messages=HI)
    with pytest.raises(openai.RateLimitError) as caught:
        await client.chat.completions.create(model="theirs", messages=HI)
    headers = caught.value.response.headers
    assert 50 <= int(headers["retry-after"]) <= 60
    assert headers["x-should-retry"] == "true"
    assert len(provider.seen) == 1


async def test_what_calls_cost_is_on_their_spans_and_in_the_figures(ask):
    service, _ = await ask(
        lambda seen: Reply(chat_answer("Hello.", usage=(1000, 100))), price={"input": 2, "output": 10}
    )
    client = await service.client()
    for _ in range(2):
        await client.chat.completions.create(model="theirs", messages=HI)
    assert [span.attributes[names.COST] for span in await service.spans()] == pytest.approx([0.003, 0.003])
    assert service.gateway.metrics()["provider_dollars"] == pytest.approx(0.006)


async def test_a_budget_stops_a_rollout_before_it_is_overspent_in_both_dialects(ask):
    replies = lambda seen: Reply(chat_answer("Hello.", usage=(20, 80)))  # noqa: E731
    budget = {"rollout_dollars": 0.00025}
    service, provider = await ask(replies, price={"output": 1}, budget=budget)
    client = (await service.client()).with_options(max_retries=2)
    for _ in range(2):
        await client.chat.completions.create(model="theirs", messages=HI, max_tokens=80)
    with pytest.raises(openai.APIStatusError, match="budget of rollout") as caught:
        await client.chat.completions.create(model="theirs", messages=HI, max_tokens=100)
    assert (caught.value.status_code, caught.value.code) == (402, "budget_exceeded")
    await client.chat.completions.create(model="theirs", messages=HI, max_tokens=80)
    other = (await service.anthropic()).with_options(max_retries=2)
    with pytest.raises(anthropic.APIStatusError, match="budget of rollout") as refused:
        await other.messages.create(model="theirs", max_tokens=80, messages=HI)
    assert refused.value.body["error"]["type"] == "billing_error"
    assert (len(provider.seen), service.gateway.metrics()["over_budget"]) == (3, 2)
    spans = await service.spans()
    assert [span.status_code for span in spans] == ["OK", "OK", "ERROR", "OK", "ERROR"]


async def test_what_a_call_costs_and_the_end_of_its_reservation_are_written_at_once():
    budgets, written = Budgets(BudgetConfig(tokens=1000)), []
    record = budgets.record

    def recorded(*amounts):
        record(*amounts)
        written.append(budgets.total.tokens + budgets.total.reserved_tokens)

    budgets.record = recorded
    async with ScriptedProvider([FINE]) as server, connected(made_of(server), budgets=budgets) as pool:
        await call(pool, body=b"x" * 20, max_output_tokens=5)
    assert set(written) == {15}  # A crash at any moment finds the worst case, or the cost, and never their sum.
