"""Calls to providers are answered, recorded, counted, limited and given up, in a file or in memory."""

import asyncio
import json
import random

import httpx
import openai
import pytest
from tests.support.provider import Reply, ScriptedProvider, chat_answer
from tests.support.provider_streams import response_answer
from tests.support.waiting import until

from agentlightning import span as names
from agentlightning.attempt_address import attempt_key
from agentlightning.errors import StoreFullError
from agentlightning.gateway.config import GatewayConfig
from agentlightning.store.sql.store import SqlStore
from agentlightning.transport import pool

pytestmark = pytest.mark.integration

KEY = "sk-theirs-0123456789"
BODY = {"model": "theirs", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def durable(tmp_path):
    store = SqlStore(tmp_path / "store.db")
    yield store
    await store.close()


@pytest.fixture
async def ask(serve, durable):
    """ask(script, ...) -> (the service, the provider behind its model "theirs", a client that has called once)."""
    opened = []

    async def start(script, *, use_store=None, gateway=None, **options):
        def reply(seen):
            return Reply(chat_answer("First.")) if len(provider.seen) == 1 else script(seen)

        provider = await ScriptedProvider(reply).start()
        opened.append(provider)
        them = {"name": "them", "base_urls": [f"{provider.url}/v1"], "api_key": KEY} | options
        config = GatewayConfig.model_validate(
            {"providers": [them], "routes": [{"model": "theirs", "provider": "them"}]} | (gateway or {})
        )
        service = await serve([], config=config, use_store=use_store or durable)
        http = await service.http()
        assert (await call(service, http)).status_code == 200
        return service, provider, http

    yield start
    for provider in opened:
        await provider.stop()


async def call(service, http, **more):
    headers = {"authorization": f"Bearer {service.key}"} | more.pop("headers", {})
    return await http.post(f"{service.base_url}/chat/completions", json=BODY | more, headers=headers)


def said(reply):
    return reply.json()["choices"][0]["message"]["content"]


async def test_calls_of_an_attempt_are_passed_on_recorded_and_counted(ask):
    answer = Reply(chat_answer("Again."), headers={"x-request-id": "req-7", "set-cookie": "mine=1"})
    service, provider, http = await ask(lambda seen: answer)
    for _ in range(3):
        reply = await call(service, http, temperature=0.5)
        assert said(reply) == "Again."
        assert reply.headers["x-request-id"] == "req-7"
        assert "set-cookie" not in reply.headers
    assert provider.seen[-1].json == BODY | {"temperature": 0.5}
    spans = await service.spans()
    assert [span.sequence_id for span in spans] == [1, 2, 3, 4]
    assert spans[-1].attributes[names.REQUEST_TEMPERATURE] == 0.5
    assert spans[-1].attributes[names.INPUT_TOKENS] == 10
    figures = service.gateway.metrics()
    assert (figures["requests"], figures["prompt_tokens"], figures["errors"]) == (4, 40, 0)


async def test_what_says_that_a_call_is_a_repeat_is_read_from_each_call(ask):
    service, _, http = await ask(lambda seen: Reply(chat_answer("Again.")))
    marked = {"idempotency-key": "one", "x-stainless-retry-count": "2"}
    for headers in (marked, {}, {}, {"x-stainless-retry-count": "1"}, {"idempotency-key": "two"}, {}):
        await call(service, http, headers={"x-sender": "the same"} | headers)
    kept = [span.attributes for span in (await service.spans())[1:]]
    assert [each.get(names.RETRIES, 0) for each in kept] == [2, 0, 0, 1, 0, 0]
    requests = [each[names.REQUEST] for each in kept]
    assert requests[1] == requests[2] == requests[3] == requests[5]
    assert len({requests[0], requests[1], requests[4]}) == 3
    assert [request.startswith(names.SENT_ONCE) for request in requests] == [True, False, False, False, True, False]


async def test_who_calls_is_found_out_for_each_of_several_callers_of_one_connection(ask):
    service, _, http = await ask(lambda seen: Reply(chat_answer("Again.")))
    url = f"{service.base_url}/chat/completions"
    for agent in ("writer", "critic", "writer", None):
        headers = {"x-agentlightning-agent": agent} if agent else {}
        assert (await http.post(url, json=BODY, headers=headers)).status_code == 200
    assert [span.attributes.get(names.AGENT_NAME) for span in await service.spans()][1:] == [
        *("writer", "critic", "writer", None)
    ]
    refused = await http.post(url, json=BODY, headers={"authorization": "Bearer agl-wrong"})
    assert refused.status_code == 401


async def test_a_response_that_its_provider_keeps_is_retrieved_there_by_its_own_attempt(ask, secret):
    whole = response_answer([{"type": "message", "id": "m", "content": [{"type": "output_text", "text": "Hello."}]}])
    service, provider, _ = await ask(lambda seen: Reply(answers.pop(0)), paths=["chat/completions", "responses"])
    answers = [whole, {"id": "resp_1", "object": "response", "deleted": True}]
    provider.responses = lambda seen: Reply(whole if seen.path == "/v1/responses/resp_1" else {}, status=200)
    client = await service.client()
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_1")  # it is nobody's answer yet
    reply = await client.responses.create(model="theirs", input="hi")
    assert (await client.responses.retrieve(reply.id)).output_text == "Hello."
    other = await service.store.start_rollout({})
    stranger = await service.client(api_key=attempt_key(secret, other.rollout_id, other.attempt.attempt_id))
    stranger = stranger.with_options(base_url=f"{service.server.url}/v1")
    with pytest.raises(openai.NotFoundError):
        await stranger.responses.retrieve(reply.id)
    await client.responses.delete(reply.id)
    assert provider.seen[-1].method == "DELETE"
    unkept = await service.client()
    answers.append(whole | {"id": "resp_2"})
    await unkept.responses.create(model="theirs", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_2")


async def test_a_failure_is_repeated_and_then_told(ask):
    replies = iter([Reply(status=500), Reply(chat_answer("At last.")), *[Reply(status=503) for _ in range(3)]])
    service, provider, http = await ask(lambda seen: next(replies), retries=2)
    assert said(await call(service, http)) == "At last."
    failed = await call(service, http)
    assert failed.status_code == 503
    assert failed.headers["x-should-retry"] == "false"
    spans = await service.spans()
    assert [(span.status_code, span.attributes[names.PROVIDER_RETRIES]) for span in spans] == [
        *[("OK", 0), ("OK", 1), ("ERROR", 2)]
    ]
    assert len(provider.seen) == 6


async def test_an_answer_that_cannot_be_read_is_an_error_and_recorded(ask):
    service, _, http = await ask(lambda seen: Reply(b"<html>"), retries=0)
    reply = await call(service, http)
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "provider_protocol")
    assert [span.status_code for span in await service.spans()] == ["OK", "ERROR"]


async def test_a_caller_that_hangs_up_ends_the_call_and_is_recorded(ask):
    service, provider, http = await ask(lambda seen: Reply(head=False, end="hang"))
    calling = asyncio.create_task(call(service, http))
    await until(lambda: len(provider.seen) == 2)
    calling.cancel()
    await asyncio.wait_for(provider.hung_up.wait(), 5)
    await until(lambda: service.gateway.metrics()["cancelled"] == 1)
    span = (await service.spans())[-1]
    assert (span.status_code, span.attributes[names.ERROR_TYPE]) == ("ERROR", "client_disconnected")


async def test_a_connection_that_was_closed_meanwhile_is_no_failure(ask):
    service, provider, http = await ask(lambda seen: Reply(chat_answer("Again.")), retries=0)
    await provider.stop()
    await provider.start()
    assert said(await call(service, http)) == "Again."
    assert (await service.spans())[-1].attributes[names.PROVIDER_RETRIES] == 0


async def test_no_more_calls_are_under_way_than_the_provider_and_the_gateway_take(ask):
    under_way = []

    def script(seen):
        under_way.append(service.gateway.providers["them"].rate_limiter.in_flight)
        return Reply(chat_answer("Again."))

    service, _, http = await ask(script, max_concurrency=2)
    pool = service.gateway.providers["them"]
    replies = await asyncio.gather(*(call(service, http) for _ in range(20)))
    assert {said(reply) for reply in replies} == {"Again."}
    assert set(under_way) <= {1, 2}
    assert (pool.rate_limiter.in_flight, pool.rate_limiter.num_waiting) == (0, 0)
    assert service.gateway._limit._value == 4096
    assert len(await service.spans()) == 21


async def test_a_call_is_recorded_before_it_is_answered(ask, store):
    service, _, http = await ask(lambda seen: Reply(chat_answer("Again.")), use_store=store)
    for count in (2, 3, 4):
        assert said(await call(service, http)) == "Again."
        assert len(await store.query_spans(service.rollout_id)) == count
    assert service.gateway.metrics()["prompt_tokens"] == 40


async def test_a_budget_is_kept(ask):
    price = {"input": 1_000_000.0, "output": 1_000_000.0}
    service, _, http = await ask(
        lambda seen: Reply(chat_answer("Again.")),
        price=price,
        max_output_tokens=5,
        gateway={"budget": {"rollout_dollars": 100.0}},
    )
    seen = [(await call(service, http)).status_code for _ in range(6)]
    assert seen[0] == 200
    assert seen[-1] == 402


async def test_calls_of_every_kind_at_once_are_each_answered_and_recorded_once(ask):
    rng = random.Random(7)

    def script(seen):
        kind = seen.json["metadata"]["kind"]
        if kind == "hang":
            return Reply(head=False, end="hang")
        if kind == "cut":
            return Reply(chat_answer("Cut."), end="close")
        return Reply(status=400) if kind == "refuse" else Reply(chat_answer(seen.json["metadata"]["name"]))

    service, provider, http = await ask(script, retries=0)
    kinds = [rng.choice(["well", "well", "well", "hang", "cut", "refuse"]) for _ in range(120)]

    async def one(number, kind):
        work = asyncio.create_task(call(service, http, metadata={"kind": kind, "name": f"n{number}"}))
        if kind == "hang":
            await until(
                lambda: any(seen.json.get("metadata", {}).get("name") == f"n{number}" for seen in provider.seen)
            )
            work.cancel()
            await asyncio.wait({work})
            return None
        return await work

    for start in range(0, len(kinds), 12):
        some = list(enumerate(kinds))[start : start + 12]
        replies = await asyncio.gather(*(one(*each) for each in some))
        for (number, kind), reply in zip(some, replies, strict=True):
            if kind == "well":
                assert said(reply) == f"n{number}"
            elif kind != "hang":
                assert reply.status_code == {"cut": 502, "refuse": 400}[kind]
    await until(lambda: service.gateway.metrics()["cancelled"] == kinds.count("hang"))
    spans = (await service.spans())[1:]
    assert len(spans) == len(kinds)
    texts = [
        json.loads(span.attributes[names.OUTPUT_MESSAGES])[0]["parts"] for span in spans if span.status_code == "OK"
    ]
    assert sorted(parts[0]["content"] for parts in texts) == sorted(
        f"n{number}" for number, kind in enumerate(kinds) if kind == "well"
    )
    pool = service.gateway.providers["them"]
    assert (pool.rate_limiter.in_flight, [len(each.requests) for each in pool.replicas]) == (0, [0])


async def test_a_prompt_that_was_read_and_never_answered_is_paid_for(ask):
    service, provider, http = await ask(lambda seen: Reply(head=False, end="hang"), price={"input": 1_000_000.0})
    spent = service.gateway.metrics()["provider_dollars"]
    calling = asyncio.create_task(call(service, http))
    await until(lambda: len(provider.seen) == 2)
    calling.cancel()
    await until(lambda: service.gateway.metrics()["cancelled"] == 1)
    assert service.gateway.metrics()["provider_dollars"] > spent
    assert (await service.spans())[-1].attributes[names.COST] > 0


async def test_a_server_that_dies_while_it_thinks_is_a_failure(ask, monkeypatch):
    monkeypatch.setattr(pool, "STALE_SECONDS", 0.0)
    service, provider, http = await ask(lambda seen: Reply(head=False, end="close"), retries=0)
    assert (await call(service, http)).status_code == 502
    assert len(provider.seen) == 2


async def test_a_server_that_ends_ends_what_is_under_way_and_asks_nobody_again(ask, durable):
    service, provider, http = await ask(lambda seen: Reply(head=False, end="hang"), retries=2)
    service.server._grace = 0.1
    calling = asyncio.create_task(call(service, http))
    await until(lambda: len(provider.seen) == 2)
    await service.server.stop()
    with pytest.raises(httpx.TransportError):
        await calling
    await asyncio.wait_for(provider.hung_up.wait(), 5)
    await asyncio.sleep(0.1)
    assert len(provider.seen) == 2
    assert [span.status_code for span in await service.spans()] == ["OK", "ERROR"]


async def test_a_call_given_up_that_cannot_be_recorded_holds_nothing(ask, durable, monkeypatch, caplog):
    service, provider, http = await ask(lambda seen: Reply(head=False, end="hang"))

    async def full(*_):
        raise StoreFullError("the disk is full")

    calling = asyncio.create_task(call(service, http))
    await until(lambda: len(provider.seen) == 2)
    monkeypatch.setattr(durable, "add_many_spans", full)
    calling.cancel()
    await asyncio.wait_for(provider.hung_up.wait(), 5)
    await until(lambda: "a call failed: " in caplog.text and "the disk is full" in caplog.text)
    assert service.gateway.providers["them"].rate_limiter.in_flight == 0
    await until(lambda: service.gateway._limit._value == 4096)
