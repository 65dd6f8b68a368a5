"""A response that its provider works on in the background is recorded when a poll brings its end, once."""

import asyncio
import json
from contextlib import suppress

import httpx
import openai
import pytest
from tests.support.provider import Reply
from tests.support.provider_streams import response_answer, response_events

from agentlightning import span as names
from agentlightning.assemble import calls
from agentlightning.errors import StoreFullError

pytestmark = pytest.mark.integration

MESSAGE = {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]}
QUEUED = response_answer([], status="queued", usage=(0, 0)) | {"usage": None}
WORKING = QUEUED | {"status": "in_progress"}
DONE = response_answer([MESSAGE], usage=(1_000_000, 500_000))


@pytest.fixture
async def started(ask):
    """(the service, its client, the statuses that polls bring)."""
    service, provider = await ask("openai", [Reply(QUEUED)], paths=["responses"], price={"input": 1, "output": 2})
    polls = []
    provider.responses = lambda seen: polls.pop(0)
    client = await service.client()
    reply = await client.responses.create(model="theirs", input="hi", background=True)
    assert reply.status == "queued"
    return service, client, polls


async def test_the_end_of_a_background_response_has_a_span_of_its_own(started):
    service, client, polls = started
    polls += [Reply(WORKING), Reply(DONE), Reply(DONE)]
    (call,) = await service.spans()
    assert (call.status_code, call.attributes[names.FINISH_REASONS]) == ("UNSET", ["queued"])
    assert calls([call]) == []
    assert service.gateway.metrics()["provider_dollars"] == 0
    statuses = [(await client.responses.retrieve("resp_1")).status for _ in range(3)]
    assert statuses == ["in_progress", "completed", "completed"]
    spans = await service.spans()
    (end,) = calls(spans)
    assert (len(spans), end.parent_id, end.trace_id) == (2, call.span_id, call.trace_id)
    assert (end.status_code, end.attributes[names.FINISH_REASONS]) == ("OK", ["stop"])
    (message,) = json.loads(end.attributes[names.OUTPUT_MESSAGES])
    assert message["parts"] == [{"type": "text", "content": "Hello."}]
    assert end.attributes[names.INPUT_MESSAGES] == call.attributes[names.INPUT_MESSAGES]
    assert (end.attributes[names.INPUT_TOKENS], end.attributes[names.OUTPUT_TOKENS]) == (1_000_000, 500_000)
    assert end.attributes[names.COST] == pytest.approx(2.0)
    metrics = service.gateway.metrics()
    assert (metrics["provider_dollars"], metrics["response_tokens"]) == (pytest.approx(2.0), 500_000)


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (DONE | {"status": "failed", "error": {"code": "server_error", "message": "out of memory"}}, "failed"),
        (DONE | {"status": "cancelled"}, "cancelled"),
        (DONE | {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, "length"),
    ],
)
async def test_other_ends_are_recorded_as_what_they_are(started, end, reason):
    service, client, polls = started
    polls.append(Reply(end))
    await client.responses.retrieve("resp_1")
    _, span = await service.spans()
    assert span.attributes[names.FINISH_REASONS] == [reason]
    assert (span.status_code == "OK") == (reason == "length")


async def test_polls_that_bring_no_end_or_come_at_once_lose_and_double_nothing(started):
    service, client, polls = started
    polls += [Reply(status=500), Reply(b"{broken"), Reply({}), *[Reply(DONE)] * 8]
    for _ in range(3):
        with suppress(openai.APIError, json.JSONDecodeError):
            await client.responses.retrieve("resp_1")
    assert len(await service.spans()) == 1
    await asyncio.gather(*(client.responses.retrieve("resp_1") for _ in range(8)))
    assert len(await service.spans()) == 2


async def test_a_finished_response_that_is_retrieved_is_not_recorded_again(ask):
    service, provider = await ask("openai", [Reply(DONE)], paths=["responses"])
    provider.responses = lambda seen: Reply(DONE)
    client = await service.client()
    await client.responses.create(model="theirs", input="hi")
    await client.responses.retrieve("resp_1")
    assert len(await service.spans()) == 1


async def test_what_could_not_be_recorded_is_recorded_with_the_next_poll(started, monkeypatch):
    service, client, polls = started
    polls += [Reply(DONE)] * 2

    async def fail(spans):
        raise StoreFullError("the disk is full")

    with monkeypatch.context() as full:
        full.setattr(service.store, "add_many_spans", fail)
        with pytest.raises(openai.InternalServerError, match="the disk is full"):
            await client.responses.retrieve("resp_1")
    assert (await client.responses.retrieve("resp_1")).status == "completed"
    assert len(calls(await service.spans())) == 1


@pytest.mark.parametrize("final", [DONE | {"status": "cancelled", "output": []}, DONE])
async def test_a_response_that_is_cancelled_ends_with_what_its_provider_answers(ask, final):
    service, provider = await ask("openai", [Reply(QUEUED), Reply(final)], paths=["responses"])
    client = await service.client()
    await client.responses.create(model="theirs", input="hi", background=True)
    assert (await client.responses.cancel("resp_1")).status == final["status"]
    assert (provider.seen[-1].method, provider.seen[-1].path) == ("POST", "/v1/responses/resp_1/cancel")
    call, end = await service.spans()
    assert end.parent_id == call.span_id
    assert (end.status_code == "OK") == (final is DONE)
    with pytest.raises(openai.NotFoundError):
        await client.responses.cancel("resp_of_another_attempt")
    assert len(provider.seen) == 2


EVENTS = response_events([MESSAGE], usage=(1_000_000, 500_000))


@pytest.mark.parametrize("num_events", [1, 2, 4, len(EVENTS) - 1])
@pytest.mark.parametrize("end", ["whole", "close"])
async def test_polls_bring_the_answer_of_a_background_response_whose_stream_broke(ask, num_events, end):
    broken = Reply(events=EVENTS[:num_events], end=end)
    service, provider = await ask("openai", [broken], paths=["responses"], price={"input": 1, "output": 2})
    provider.responses = lambda seen: Reply(DONE)
    client = await service.client()
    with suppress(openai.APIError, httpx.TransportError):
        async for _ in await client.responses.create(model="theirs", input="hi", background=True, stream=True):
            pass
    (call,) = await service.spans()
    assert (call.status_code, calls([call])) == ("ERROR", [])
    assert (await client.responses.retrieve("resp_1")).status == "completed"
    await client.responses.retrieve("resp_1")
    spans = await service.spans()
    (answer,) = calls(spans)
    assert (len(spans), answer.parent_id, answer.status_code) == (2, call.span_id, "OK")
    assert service.gateway.metrics()["provider_dollars"] == pytest.approx(2.0)


async def test_a_stream_that_broke_in_the_foreground_is_a_failed_call(ask):
    service, _ = await ask("openai", [Reply(events=EVENTS[:4], end="close")], paths=["responses"])
    client = await service.client()
    with suppress(openai.APIError, httpx.TransportError):
        async for _ in await client.responses.create(model="theirs", input="hi", stream=True):
            pass
    (call,) = await service.spans()
    assert (call.status_code, call.attributes[names.OPERATION_NAME]) == ("ERROR", "chat")
