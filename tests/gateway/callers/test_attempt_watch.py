"""Attempts that end while their calls are under way: the calls end with them, and nothing is remembered of them."""

import asyncio

import openai
import pytest
from tests.support.provider import Reply, ScriptedProvider, chat_answer
from tests.support.provider_streams import chat_events
from tests.support.waiting import until

from agentlightning import span as names
from agentlightning.errors import StoreLostError
from agentlightning.gateway.callers.attempts import AttemptCache, AttemptWatch
from agentlightning.gateway.config import GatewayConfig
from agentlightning.gateway.errors import ApiError

pytestmark = pytest.mark.integration

HI = [{"role": "user", "content": "hi"}]


class EndedContexts(AttemptCache):
    def __init__(self):
        self.looks = []

    def attempts(self):
        return []

    async def check(self, attempts):
        self.looks += attempts
        return {attempt: ApiError(409, "it has ended") for attempt in attempts}


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
        service = await serve([], config=GatewayConfig.model_validate(config))
        gateway, http, headers = service.gateway, await service.http(), {"authorization": f"Bearer {service.key}"}
        gateway._watch.seconds = 0.1

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
        await until(lambda: not gateway._attempts.attempts())
        assert gateway.providers["them"].rate_limiter.in_flight == 0
    spans = await store.query_spans(service.rollout_id)
    assert [span.attributes.get(names.ERROR_TYPE) for span in spans] == [None, "attempt_ended"]


async def test_a_call_of_our_own_engine_ends_with_its_attempt(serve, store):
    service = await serve(["A long answer."], engine={"delay": 30})
    service.gateway._watch.seconds = 0.05
    asked = asyncio.create_task(service.ask())
    await until(lambda: service.engine.calls)
    await store.update_attempt(service.rollout_id, service.attempt_id, status="failed")
    with pytest.raises(Exception, match="it takes no more calls"):
        await asyncio.wait_for(asked, 20)
    (span,) = await service.spans()
    assert span.attributes[names.ERROR_TYPE] == "attempt_ended"


async def test_what_is_remembered_of_an_attempt_is_forgotten_when_it_has_ended(serve, store):
    service = await serve(["Hello."])
    gateway = service.gateway
    gateway._watch.seconds = 0.02
    await (await service.client()).responses.create(model="scripted", input="hi")
    await asyncio.sleep(0.2)
    assert (len(gateway.conversations), len(gateway.kept)) == (1, 1)
    await store.update_attempt(service.rollout_id, service.attempt_id, status="succeeded")
    await until(lambda: not gateway._attempts.attempts())
    assert (len(gateway.conversations), len(gateway.kept)) == (0, 0)
    assert (gateway.conversations.tokens, gateway.kept.size) == (0, 0)
    assert gateway._watch._timer is None  # there is nothing left to look after


async def test_only_attempts_that_run_are_remembered_however_many_have_ended(serve, store):
    service = await serve([])
    gateway = service.gateway
    started = [await store.start_rollout("a task") for _ in range(1000)]
    everyone = [(each.rollout_id, each.attempt.attempt_id) for each in started]
    for ids in everyone:
        await gateway._attempts.get(*ids)
    live, ended = everyone[::100], [ids for place, ids in enumerate(everyone) if place % 100]
    for ids in ended:
        await store.update_attempt(*ids, status="succeeded")
    gateway._watch.seconds = 0.02
    gateway._watch.start()
    await until(lambda: len(gateway._attempts.attempts()) == len(live))
    assert gateway._attempts.attempts() == live


class Shaky:
    """A store that counts what it is asked, and can be away."""

    def __init__(self, store):
        self._store, self.asked, self.away = store, [], False

    def __getattr__(self, name):
        if self.away:
            raise StoreLostError("the database is away")
        self.asked.append(name)
        return getattr(self._store, name)


@pytest.fixture
async def watched(store):
    """(a store that counts, the table, its watch) with everything five times as fast."""
    shaky = Shaky(store)
    table = AttemptCache(shaky, recheck_seconds=1.0)
    watch = AttemptWatch(table, table.forget, seconds=0.1)
    yield shaky, table, watch
    await watch.close()


async def test_calls_of_attempts_that_run_read_nothing_while_the_watch_keeps_the_table(store, watched):
    """Agents think for longer than an attempt is taken for running."""
    shaky, table, watch = watched
    started = [await store.start_rollout("a task") for _ in range(20)]
    everyone = [(each.rollout_id, each.attempt.attempt_id) for each in started]
    first = [await table.get(*ids) for ids in everyone]
    watch.start()
    shaky.asked.clear()
    await asyncio.sleep(1.2)
    assert [await table.get(*ids) for ids in everyone * 3] == first * 3
    assert set(shaky.asked) == {"get_latest_attempts"}
    assert len(shaky.asked) < 15  # for 60 calls


async def succeed(store, rollout_id, attempt_id):
    await store.update_attempt(rollout_id, attempt_id, status="succeeded")


async def time_out(store, rollout_id, attempt_id):
    await store.update_attempt(rollout_id, attempt_id, status="timeout")


async def cancel(store, rollout_id, attempt_id):
    await store.cancel_rollout(rollout_id)


async def supersede(store, rollout_id, attempt_id):
    await store.start_attempt(rollout_id)


@pytest.mark.parametrize("end", [succeed, time_out, cancel, supersede])
async def test_what_ends_an_attempt_elsewhere_ends_its_calls_here(serve, store, end):
    """No call of its own tells: the watch does, and forgets it."""
    service = await serve(["Hello."], engine={"delay": 0})
    service.gateway._watch.seconds = 0.05
    await service.ask()
    await end(store, service.rollout_id, service.attempt_id)
    await until(lambda: not service.gateway._attempts.attempts())
    with pytest.raises(openai.ConflictError, match=r"takes no more calls|a later attempt"):
        await service.ask()
    assert len(await service.spans()) == 2  # the second one is refused, and recorded as that
    assert len(service.engine.calls) == 1


async def test_a_watch_that_loses_the_store_says_so_and_calls_ask_it_themselves_until_it_is_back(
    store, watched, caplog
):
    shaky, table, watch = watched
    started = await store.start_rollout("a task")
    ids = started.rollout_id, started.attempt.attempt_id
    await table.get(*ids)
    watch.start()
    shaky.away = True
    await until(lambda: "so calls ask it themselves: the database is away" in caplog.text)
    await asyncio.sleep(1.1)
    with pytest.raises(StoreLostError):
        await table.get(*ids)
    assert caplog.text.count("the database is away") == 1
    shaky.away = False
    await table.get(*ids)
    await until(lambda: "the store says again which attempts have ended" in caplog.text)
    shaky.asked.clear()
    await asyncio.sleep(1.1)
    await table.get(*ids)
    assert set(shaky.asked) == {"get_latest_attempts"}


async def test_a_call_that_takes_long_to_leave_is_ended_once():
    """Ended again, it would lose what it does last: its record."""
    contexts, recorded = EndedContexts(), []
    watch = AttemptWatch(contexts, lambda *attempt: None, seconds=0.01)

    async def call():
        with watch.track(("rollout", "attempt")):
            try:
                await asyncio.sleep(60)
            finally:
                await until(lambda: len(contexts.looks) > 3)
                recorded.append(True)

    task = asyncio.create_task(call())
    with pytest.raises(ApiError, match="it has ended"):
        await asyncio.wait_for(task, 20)
    assert (recorded, task.cancelling()) == ([True], 0)
    await watch.close()
