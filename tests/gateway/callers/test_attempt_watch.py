"""Attempts that end while their calls are under way: the calls end with them, and nothing is remembered of them."""

import asyncio

import pytest
from tests.support.provider import Reply, ScriptedProvider, chat_answer
from tests.support.provider_streams import chat_events
from tests.support.waiting import until

from agentlightning import span as names
from agentlightning.gateway.config import GatewayConfig

pytestmark = pytest.mark.integration


def answer(seen):
    """The second call is never answered to its end."""
    if "first" in seen.body.decode():
        return Reply(chat_answer("Hello."))
    if seen.json.get("stream"):
        return Reply(events=chat_events(["Hel"])[:2], end="hang")
    return Reply(end="hang", head=False)


@pytest.mark.parametrize("way", ["whole", "stream", "translated"])
async def test_a_providers_call_ends_with_its_attempt(serve, store, way):
    """A proxy keeps the connection of an agent that is gone: nobody hangs up."""
    path = "messages" if way == "translated" else "chat/completions"
    async with ScriptedProvider(answer) as provider:
        them = {"name": "them", "base_urls": [f"{provider.url}/v1"]}
        config = {"providers": [them], "routes": [{"model": "theirs", "provider": "them"}]}
        service = await serve([], config=GatewayConfig.model_validate(config), check_seconds=0.1)
        gateway, http, headers = service.gateway, await service.http(), {"authorization": f"Bearer {service.key}"}

        def call(text, **more):
            body = {"model": "theirs", "max_tokens": 9, "messages": [{"role": "user", "content": text}]} | more
            return asyncio.create_task(http.post(f"{service.base_url}/{path}", json=body, headers=headers))

        assert (await call("first")).status_code == 200
        asked = call("second", stream=way in ("stream", "translated"))
        await until(lambda: len(provider.seen) == 2)
        await store.update_attempt(service.rollout_id, service.attempt_id, status="failed")
        reply = await asyncio.wait_for(asked, 20)
        await asyncio.wait_for(provider.hung_up.wait(), 20)
        assert reply.status_code == (409 if way == "whole" else 200)
        assert "ended as failed; it takes no more calls" in reply.text
        assert len(gateway.attempts) == 0
        assert gateway.providers["them"].rate_limiter.in_flight == 0
    spans = await store.query_spans(service.rollout_id)
    assert [span.attributes.get(names.ERROR_TYPE) for span in spans] == [None, "attempt_ended"]


async def test_a_call_of_our_own_engine_ends_with_its_attempt(serve, store):
    service = await serve(["A long answer."], engine={"delay": 30}, check_seconds=0.05)
    asked = asyncio.create_task(service.ask())
    await until(lambda: service.engine.calls)
    await store.update_attempt(service.rollout_id, service.attempt_id, status="failed")
    with pytest.raises(Exception, match="it takes no more calls"):
        await asyncio.wait_for(asked, 20)
    (span,) = await service.spans()
    assert span.attributes[names.ERROR_TYPE] == "attempt_ended"


async def test_what_is_remembered_of_an_attempt_is_forgotten_when_it_has_ended(serve, store):
    service = await serve(["Hello."], check_seconds=0.02)
    gateway = service.gateway
    await (await service.client()).responses.create(model="scripted", input="hi")
    await asyncio.sleep(0.2)
    assert (len(gateway.conversations), len(gateway.responses)) == (1, 1)
    await store.update_attempt(service.rollout_id, service.attempt_id, status="succeeded")
    await until(lambda: not len(gateway.attempts))
    assert (len(gateway.conversations), len(gateway.responses)) == (0, 0)
    assert (gateway.conversations.tokens, gateway.responses.size) == (0, 0)


class CountedStore:
    """A store that counts what it is asked."""

    def __init__(self, store):
        self._store, self.asked = store, []

    def __getattr__(self, name):
        self.asked.append(name)
        return getattr(self._store, name)


async def test_calls_of_an_agent_that_thinks_long_only_write_to_the_store(serve, store):
    counted = CountedStore(store)
    service = await serve(lambda messages: "Hello.", use_store=counted, check_seconds=0.1)
    await service.ask()
    asked = []
    for _ in range(5):
        await asyncio.sleep(0.3)
        counted.asked.clear()
        await service.ask()
        asked += counted.asked
    assert [name for name in asked if name != "get_latest_attempts"] == ["add_span"] * 5
    assert asked.count("get_latest_attempts") < 5  # of the watch, by chance at the same time
