"""What the gateway remembers of the attempts that call it."""

import asyncio

import pytest

from agentlightning.gateway.callers.attempts import AttemptCache
from agentlightning.gateway.errors import ApiError
from agentlightning.resources import LLM


class Counted:
    """A store that counts how often it is asked."""

    def __init__(self, store):
        self._store, self.asked = store, []

    def __getattr__(self, name):
        self.asked.append(name)
        return getattr(self._store, name)


async def start(store, **options):
    started = await store.start_rollout("a task", **options)
    return started.rollout_id, started.attempt.attempt_id


async def test_the_store_is_asked_once_while_an_attempt_calls_often(store):
    ids, counted = await start(store), Counted(store)
    contexts = AttemptCache(counted, recheck_seconds=3600)
    first = await contexts.get(*ids)
    asked = len(counted.asked)
    assert [await contexts.get(*ids) for _ in range(10)] == [first] * 10
    assert len(counted.asked) == asked


async def test_resources_stay_those_the_attempt_began_with(store):
    await store.add_resources({"llm": LLM(endpoint="x", model="m", sampling_parameters={"temperature": 0.5})})
    contexts, ids = AttemptCache(store, recheck_seconds=0), await start(store)
    await contexts.get(*ids)
    await store.add_resources({"llm": LLM(endpoint="x", model="m", sampling_parameters={"temperature": 0.9})})
    assert (await contexts.get(*ids)).sampling_parameters("m") == ("llm", {"temperature": 0.5})
    assert (await contexts.get(*ids)).sampling_parameters("other") == ("", {})


async def test_a_rollout_bound_to_a_version_of_the_resources_gets_that_one(store):
    for name, temperature in (("one", 0.1), ("two", 0.2)):
        await store.add_resources(
            {"llm": LLM(endpoint="x", model="m", sampling_parameters={"temperature": temperature})}, name
        )
    context = await AttemptCache(store).get(*await start(store, resources_id="one"))
    assert context.sampling_parameters("m")[1] == {"temperature": 0.1}


async def test_only_so_many_attempts_are_remembered(store):
    counted = Counted(store)
    contexts = AttemptCache(counted, limit=2, recheck_seconds=3600)
    attempts = [await start(store) for _ in range(3)]
    for ids in attempts:
        await contexts.get(*ids)
    counted.asked.clear()
    await contexts.get(*attempts[2])
    assert counted.asked == []
    await contexts.get(*attempts[0])
    assert counted.asked != []


async def test_a_cancelled_rollout_takes_no_more_calls(store):
    contexts, ids = AttemptCache(store, recheck_seconds=0), await start(store)
    await contexts.get(*ids)
    await store.cancel_rollout(ids[0])
    with pytest.raises(ApiError, match="takes no more calls") as refused:
        await contexts.get(*ids)
    assert (refused.value.status, refused.value.retry) == (409, False)


async def test_callers_that_come_together_ask_the_store_once_and_one_that_leaves_takes_nothing_along(store):
    counted = Counted(store)
    contexts, ids = AttemptCache(counted, recheck_seconds=0), await start(store)
    asking = [asyncio.create_task(contexts.get(*ids)) for _ in range(10)]
    await asyncio.sleep(0)
    asking[0].cancel()
    found = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert len({id(context) for context in found[1:]}) == 1
    assert counted.asked.count("get_rollout_by_id") == 1


async def test_many_attempts_are_checked_with_one_query(store):
    contexts, counted = AttemptCache(store), Counted(store)
    running, succeeded, superseded, cancelled = [await start(store) for _ in range(4)]
    await store.update_attempt(*succeeded, status="succeeded")
    await store.start_attempt(superseded[0])
    await store.cancel_rollout(cancelled[0])
    both = [running, succeeded]
    alone = {ids: await contexts.end_reason(*ids) for ids in (running, succeeded, superseded, cancelled)}
    together = await AttemptCache(counted).check(both)
    assert counted.asked == ["get_latest_attempts"]
    assert str(together[succeeded]) == str(alone[succeeded])
    assert running not in together
    every = await contexts.check([*alone, ("unknown", "attempt")])
    known = {ids: str(api_error) for ids, api_error in alone.items() if api_error is not None}
    assert set(known) == {succeeded, superseded, cancelled}
    assert {ids: str(every[ids]) for ids in known} == known
    assert set(every) == {*known, ("unknown", "attempt")}
