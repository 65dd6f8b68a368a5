"""What holds in every dialect alike."""

import asyncio

import pytest
from tests.support.waiting import until

from agentlightning import span as names

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi", "max_tokens": 100_000},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 100_000},
}


def url(service, path):
    return service.environment["ANTHROPIC_BASE_URL"] + path


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_caller_that_hangs_up_frees_the_engine_and_is_recorded(serve, path, streams):
    service = await serve(["a long answer " * 1000], engine={"delay": 0.001})
    whole, freed = service.engine.sample, []

    async def watched(*args, **options):
        try:
            return await whole(*args, **options)
        except asyncio.CancelledError:
            freed.append(True)
            raise

    service.engine.sample = watched
    client = await service.http()
    body = {"model": "scripted", "stream": streams} | BODIES[path]
    call = asyncio.create_task(client.post(url(service, path), json=body))
    await until(lambda: service.engine.calls)
    call.cancel()
    await asyncio.wait([call])
    await until(lambda: service.gate.num_in_flight == 0)
    assert freed == [True]
    (span,) = await service.spans()
    assert span.attributes[names.ERROR_TYPE] == "client_disconnected"
    assert len(span.attributes.get(names.RESPONSE_TOKEN_IDS, ())) == span.attributes[names.OUTPUT_TOKENS]


@pytest.mark.parametrize("path", BODIES)
async def test_the_span_is_in_the_store_before_the_stream_says_that_the_answer_is_finished(serve, path):
    service = await serve(["Hello."], engine={"delay": 0.001})
    body = {"model": "scripted", "stream": True} | BODIES[path]
    last = {
        "/v1/chat/completions": '"finish_reason":"stop"',
        "/v1/completions": '"finish_reason":"stop"',
        "/v1/responses": "response.output_text.done",
        "/v1/messages": '"stop_reason":"end_turn"',
    }[path]
    recorded = None
    client = await service.http()
    async with client.stream("POST", url(service, path), json=body) as reply:
        async for line in reply.aiter_lines():
            if last in line and recorded is None:
                recorded = await service.spans()
    assert len(recorded) == 1


@pytest.mark.parametrize("path", BODIES)
async def test_an_invalid_body_is_an_error_in_the_callers_format(serve, path):
    service = await serve([])
    client = await service.http()
    for body in (b"{", b"[]", b"{}", b'{"messages": 5, "prompt": {}, "input": 5}'):
        reply = await client.post(url(service, path), content=body)
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        assert ("type" in reply.json()) == (path == "/v1/messages")
    assert service.engine.calls == []


@pytest.mark.parametrize("path", BODIES)
async def test_fields_nobody_knows_are_accepted_and_counted(serve, path):
    service = await serve(["Hello."])
    client = await service.http()
    body = {"model": "scripted", "x_unheard_of": 1, "service_tier": "auto"} | BODIES[path]
    assert (await client.post(url(service, path), json=body)).status_code == 200
    assert service.gateway.metrics()["unknown_fields"] == 2


@pytest.mark.parametrize("path", BODIES)
async def test_a_call_for_no_attempt_is_served_where_that_is_allowed(serve, path):
    service = await serve(["Hello."], allow_unattributed=True)
    client = await service.http()
    body = {"model": "scripted"} | BODIES[path]
    reply = await client.post(service.server.url + path, json=body)
    assert "Hello." in reply.text
    assert service.gateway.counters.unattributed == 1
    assert await service.spans() == []


async def test_dialects_share_one_conversation(serve):
    service = await serve(["Hello.", "Good-bye."])
    client = await service.http()
    await client.post(url(service, "/v1/messages"), json={"messages": MESSAGES, "max_tokens": 9})
    history = [*MESSAGES, {"role": "assistant", "content": "Hello."}, *MESSAGES]
    await client.post(url(service, "/v1/responses"), json={"input": history})
    assert service.gateway.counters.continued == 1
