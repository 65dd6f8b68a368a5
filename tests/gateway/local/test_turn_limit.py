"""The limit on the answers of an attempt, which its LLM resource sets."""

import asyncio

import openai
import pytest

from agentlightning.assemble import TURN_LIMIT, TURN_LIMIT_REACHED, trajectory
from agentlightning.errors import PolicyError
from agentlightning.resources import LLM


def limited(calls):
    return {"llm": LLM(endpoint="http://x", model="scripted", max_calls=calls)}


async def test_the_call_after_the_last_permitted_one_is_refused_and_recorded(serve, store):
    await store.add_resources(limited(2))
    service = await serve(["one", "two", "three"])
    said = [(await service.ask()).choices[0].message.content for _ in range(2)]
    assert said == ["one", "two"]
    with pytest.raises(openai.ConflictError, match="has been given the 2 answers") as refused:
        await service.ask()
    assert refused.value.code == "turn_limit_reached"
    assert refused.value.response.headers["x-should-retry"] == "false"
    read = trajectory(service.rollout_id, service.attempt_id, await service.spans())
    assert len(read.transitions) == 2
    assert (read.metadata[TURN_LIMIT], read.metadata[TURN_LIMIT_REACHED]) == (2, 1)


async def test_a_rollout_that_ends_within_its_limit_has_not_reached_it(serve, store):
    await store.add_resources(limited(2))
    service = await serve(["one", "two"])
    for _ in range(2):
        await service.ask()
    read = trajectory(service.rollout_id, service.attempt_id, await service.spans())
    assert read.metadata[TURN_LIMIT] == 2
    assert TURN_LIMIT_REACHED not in read.metadata


async def test_a_call_that_fails_takes_no_turn(serve, store):
    await store.add_resources(limited(1))
    service = await serve([PolicyError("the engine broke"), "one"])
    with pytest.raises(openai.InternalServerError):
        await service.ask()
    assert (await service.ask()).choices[0].message.content == "one"
    with pytest.raises(openai.ConflictError):
        await service.ask()


async def test_calls_at_the_same_time_share_the_limit(serve, store):
    await store.add_resources(limited(2))
    service = await serve(["a", "b", "c", "d"])
    found = await asyncio.gather(*(service.ask() for _ in range(4)), return_exceptions=True)
    assert sum(isinstance(each, openai.ConflictError) for each in found) == 2


async def test_without_a_limit_nothing_is_counted(serve, store):
    await store.add_resources({"llm": LLM(endpoint="http://x", model="scripted")})
    service = await serve(["one"])
    await service.ask()
    read = trajectory(service.rollout_id, service.attempt_id, await service.spans())
    assert TURN_LIMIT not in read.metadata
