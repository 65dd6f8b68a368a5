"""Events that agents post to their own attempt."""

import httpx
import pytest

from agentlightning import span as names
from agentlightning.assemble import trajectory
from agentlightning.attempt_address import attempt_key
from agentlightning.attempt_variables import attempt_environment
from agentlightning.gateway.upstream.limits import Account, spend_of_spans
from agentlightning.server.app import Server
from agentlightning.tracing.rewards import find_final_reward

SECRET = "a-secret"


@pytest.fixture
async def server(store):
    async with Server(store, secret=SECRET) as server:
        yield server


@pytest.fixture
async def attempt(store, server):
    """(rollout_id, attempt_id, environment)."""
    started = await store.start_rollout("a task")
    ids = (started.rollout_id, started.attempt.attempt_id)
    return *ids, attempt_environment(server.url, SECRET, *ids)


async def post(environment, event, url=None, key=None):
    headers = {"Authorization": f"Bearer {key or environment['AGL_KEY']}"}
    content = event if isinstance(event, bytes) else None
    async with httpx.AsyncClient(headers=headers) as client:
        url = url or environment["AGL_EVENT_URL"]
        return await client.post(url, content=content) if content else await client.post(url, json=event)


async def test_a_posted_reward_becomes_a_reward_of_the_attempt(store, attempt):
    rollout_id, attempt_id, environment = attempt
    reply = await post(environment, {"event_type": "reward", "data": {"value": 1.0}})
    (span,) = await store.query_spans(rollout_id, attempt_id)
    assert (span.name, span.attributes[names.SCORE_VALUE]) == (names.REWARD, 1.0)
    assert reply.json() == {"span_id": span.span_id, "sequence_id": 1, "superseded": False, "late": False}


async def test_a_reward_of_several_dimensions_keeps_their_names(store, attempt):
    rollout_id, attempt_id, environment = attempt
    await post(environment, {"event_type": "reward", "data": {"value": {"correct": 1, "format": 0.5}}})
    (span,) = await store.query_spans(rollout_id, attempt_id)
    assert span.attributes[names.REWARD_VALUES] == {"correct": 1.0, "format": 0.5}


async def test_other_events_become_spans_of_their_name(store, attempt):
    rollout_id, attempt_id, environment = attempt
    url = environment["AGL_EVENT_URL"].replace("/rollout/", "/api/rollouts/")
    await post(environment, {"event_type": "message", "data": {"content": "hello"}}, url=url)
    await post(environment, {"event_type": "cache.hit", "data": {"key": "x"}})
    message, hit = await store.query_spans(rollout_id, attempt_id)
    assert (message.name, message.attributes[names.MESSAGE_BODY]) == (names.MESSAGE, "hello")
    assert (hit.name, hit.attributes) == ("cache.hit", {"key": "x"})


@pytest.mark.parametrize(
    ("event", "named"),
    [
        (b'{"event_type": "reward", "data": {"value": NaN}}', "NaN"),
        ({"event_type": "reward", "data": {"value": "good"}}, "the event gave 'good', which is not a reward"),
        ({"event_type": "reward", "data": {"value": 1e308}}, "the event gave 1e"),
        ({"event_type": "reward", "data": {}}, "the event gave None"),
        ({"event_type": "reward", "data": {"value": {"format": None}}}, "the event gave {'format': None}"),
        ({"data": {}}, "event_type"),
        (b'{"event_type": "message", "data": ' + b"[" * 300 + b"]" * 300 + b"}", "flatter"),
        (b'{"event_type": "reward", "data": ' + b"[" * 300 + b"]" * 300 + b"}", "flatter"),
        (b"reward", "not JSON"),
    ],
)
async def test_an_invalid_event_is_rejected_and_not_stored(store, attempt, event, named):
    rollout_id, attempt_id, environment = attempt
    reply = await post(environment, event)
    assert reply.status_code == 400
    assert named in reply.json()["error"]["message"]
    assert await store.query_spans(rollout_id, attempt_id) == []


async def test_events_need_the_key_of_their_own_attempt(store, attempt):
    rollout_id, attempt_id, environment = attempt
    for key in ("sk-other", attempt_key(SECRET, rollout_id, "at-other"), attempt_key("other", rollout_id, attempt_id)):
        reply = await post(environment, {"event_type": "reward", "data": {"value": 1}}, key=key)
        assert reply.status_code == 401
        assert key not in reply.text
    assert await store.query_spans(rollout_id, attempt_id) == []


async def test_events_of_an_unknown_attempt_are_not_found(server):
    environment = attempt_environment(server.url, SECRET, "ro-nobody", "at-nobody")
    reply = await post(environment, {"event_type": "reward", "data": {"value": 1}})
    assert reply.status_code == 404


async def test_an_event_of_a_superseded_attempt_is_stored_and_marked(store, attempt):
    rollout_id, _, environment = attempt
    await store.start_attempt(rollout_id)
    reply = await post(environment, {"event_type": "reward", "data": {"value": 1}})
    assert reply.json()["superseded"] is True


async def test_attributes_of_the_gateway_are_removed_from_events(store, attempt):
    rollout_id, attempt_id, environment = attempt
    forged = {names.OPERATION_NAME: "chat", names.PROMPT_TOKEN_IDS: [1], names.RESPONSE_TOKEN_IDS: [2]}
    forged |= {names.LOGPROBS: [-1e30], names.COST: -1e6, names.PROVIDER_RETRIES: 0, names.RETRIES: 1, "mine": 1}
    forged |= {names.TURN_LIMIT: 99, names.REPLAYS: ["ro", "s"], names.BEGUN: 1, names.REPLAY_MISMATCH: True}
    await post(environment, {"event_type": "chat", "data": forged})
    (span,) = await store.query_spans(rollout_id, attempt_id)
    stripped = span.attributes.pop(names.STRIPPED)
    assert span.attributes == {names.OPERATION_NAME: "chat", "mine": 1}
    assert stripped == sorted(forged.keys() - {names.OPERATION_NAME, "mine"})
    assert trajectory(rollout_id, attempt_id, [span]).transitions == ()
    assert spend_of_spans([span]) == Account()


@pytest.mark.parametrize("status", ["succeeded", "failed"])
async def test_an_event_after_the_attempt_has_ended_is_stored_and_ignored(store, attempt, status):
    rollout_id, attempt_id, environment = attempt
    await post(environment, {"event_type": "reward", "data": {"value": 0.25}})
    await store.update_attempt(rollout_id, attempt_id, status=status)
    reply = await post(environment, {"event_type": "reward", "data": {"value": 1.0}})
    assert reply.json()["late"] is True
    spans = await store.query_spans(rollout_id, attempt_id)
    assert len(spans) == 2
    assert trajectory(rollout_id, attempt_id, spans).reward == 0.25
    assert find_final_reward(spans) == 0.25
