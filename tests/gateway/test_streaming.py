"""Streams: as they are drawn, nothing to take back, recorded before they end."""

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import openai
import pytest
from tests.support.provider_streams import chat_events, messages_events

from agentlightning.errors import PolicyError, StoreFullError
from agentlightning.gateway import http
from agentlightning.gateway.config import GatewayConfig
from agentlightning.store import LightningStore

HI = [{"role": "user", "content": "hi"}]

TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression":  "6*7"}}\n</tool_call>'


async def test_text_streams_as_it_is_drawn_and_ends_with_reason_and_usage(serve):
    service = await serve(["Hé 🎉!"], engine={"delay": 0.001})
    chunks = await service.stream()
    deltas = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(deltas) == "Hé 🎉!"
    assert len(deltas) > 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == len("Hé 🎉!".encode()) + 1
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("n", [1, 2])
async def test_a_plain_loop_finds_a_choice_in_every_chunk_and_the_usage_on_the_last(serve, n):
    service = await serve(["Hi."] * n)
    said, used = "", []
    for chunk in await service.stream(n=n):
        said += chunk.choices[0].delta.content or ""
        used.append(chunk.usage)
    assert said == "Hi." * n
    assert used[-1].completion_tokens == n * len("Hi.<")
    assert not any(used[:-1])


async def test_whoever_asks_for_the_usage_gets_it_in_a_chunk_of_its_own(serve):
    service = await serve(["Hi."])
    *chunks, last = await service.stream(stream_options={"include_usage": True})
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert (last.choices, last.usage.completion_tokens) == ([], len("Hi.<"))


async def test_options_of_a_stream_that_are_none_are_refused_by_name(serve):
    service = await serve(["Hi."])
    with pytest.raises(openai.BadRequestError, match="stream_options"):
        await service.stream(stream_options={"include_usage": "yes"})


async def test_a_tool_call_streams_whole_with_index_id_and_type(serve):
    service = await serve(["Let me see. " + CALL])
    chunks = await service.stream(tools=TOOLS)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    calls = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or ()]
    assert text == "Let me see."
    assert [(call.index, call.type, call.function.name) for call in calls] == [(0, "function", "calculator")]
    assert json.loads(calls[0].function.arguments) == {"expression": "6*7"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_the_sdks_stream_helper_puts_together_what_the_span_says(serve):
    service = await serve(["Let me see. " + CALL, "ok"])
    client, asked = await service.client(), [{"role": "user", "content": "hi"}]
    async with client.chat.completions.stream(model="scripted", messages=asked, tools=TOOLS) as events:
        async for _ in events:
            pass
        message = (await events.get_final_completion()).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}
    await service.ask([*asked, message.model_dump(exclude={"parsed"}), result], tools=TOOLS)
    assert (service.gateway.counters.continued, service.gateway.counters.drift) == (1, 0)


async def test_several_answers_stream_side_by_side(serve):
    service = await serve(["one", "two"], engine={"delay": 0.001})
    said = {0: "", 1: ""}
    for chunk in await service.stream(n=2):
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
    assert sorted(said.values()) == ["one", "two"]


async def test_each_chunk_carries_the_log_probabilities_of_its_own_tokens(serve):
    service = await serve(["Hé🎉!"])
    chunks = [chunk.choices[0] for chunk in await service.stream(logprobs=True) if chunk.choices]
    shown = [(chunk.delta.content, len(chunk.logprobs.content)) for chunk in chunks if chunk.logprobs]
    assert shown == [("H", 1), ("é", 2), ("🎉", 4), ("!", 1), (None, 1)]


async def test_an_engine_that_tells_log_probabilities_only_at_the_end_has_them_in_the_last_chunk(serve):
    service = await serve(["Hi"])
    whole = service.engine.sample

    async def quiet(prompt_token_ids, params, on_tokens=None, *, affinity=""):
        return await whole(prompt_token_ids, replace(params, stream_logprobs=False), on_tokens)

    service.engine.sample = quiet
    chunks = [chunk.choices[0] for chunk in await service.stream(logprobs=True) if chunk.choices]
    assert [token.token for token in chunks[-1].logprobs.content] == ["H", "i", "<|im_end|>"]
    assert not any(chunk.logprobs for chunk in chunks[:-1])


async def test_the_span_is_in_the_store_before_the_stream_says_that_the_answer_is_finished(serve):
    service = await serve(["Hello."])
    client, kept = await service.client(), None
    messages = [{"role": "user", "content": "hi"}]
    async for chunk in await client.chat.completions.create(model="scripted", messages=messages, stream=True):
        if chunk.choices and chunk.choices[0].finish_reason:
            kept = await service.spans()
    assert len(kept) == 1


class FullStore:
    """A store whose disk is full."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        return getattr(self._store, name)

    async def add_span(self, span):
        raise StoreFullError("no room for spans; free some disk space")


async def test_an_answer_that_cannot_be_recorded_is_not_given(serve, store):
    service = await serve(["Hello.", "Hello."], use_store=FullStore(store))
    with pytest.raises(openai.InternalServerError, match="free some disk space"):
        await service.ask()
    with pytest.raises(openai.APIError, match="free some disk space"):
        await service.stream()


async def test_a_database_that_was_deleted_is_named_in_one_line_of_the_log(serve, tmp_path, caplog):
    store = LightningStore(tmp_path / "store.db")
    service = await serve(["Hello."], use_store=store)
    (tmp_path / "store.db").unlink()
    with pytest.raises(openai.InternalServerError, match="was deleted while") as refusal:
        await service.ask()
    assert (refusal.value.status_code, refusal.value.code) == (503, "store_unavailable")
    (said,) = [record for record in caplog.records if "a call failed" in record.message]
    assert said.exc_info is None
    await store.close()


async def test_a_failure_in_the_middle_of_a_stream_reaches_the_caller(serve):
    service = await serve(["Hello."])
    whole = service.engine.sample

    async def breaks(prompt_token_ids, params, on_tokens=None, *, affinity=""):
        await whole(prompt_token_ids, params, on_tokens)
        await asyncio.sleep(0.01)
        raise PolicyError("the device is lost")

    service.engine.sample = breaks
    with pytest.raises(openai.APIError, match="the device is lost"):
        await service.stream()


# -- while nothing is said ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def slow_provider(events, silent_before):
    """A provider that sends its head at once, and each of `events` after `silent_before` of them is 0.3 s late."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-request-id: r-1\r\n\r\n")
        for number, event in enumerate(events):
            if number == silent_before:
                await asyncio.sleep(0.3)
            half = len(event) // 2  # Never between the halves.
            writer.write(event[:half])
            await writer.drain()
            await asyncio.sleep(0)
            writer.write(event[half:])
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


PINGS = {"chat/completions": b": keep-alive\n\n", "messages": b'event: ping\ndata: {"type": "ping"}\n\n'}
PINGS |= {"responses": PINGS["chat/completions"], "completions": PINGS["chat/completions"]}


@pytest.mark.parametrize("silent_before", [0, 2])
@pytest.mark.parametrize(
    ("path", "dialect"),
    [("chat/completions", "openai"), ("messages", "openai"), ("responses", "openai"), ("messages", "anthropic")],
)
async def test_a_silent_provider_does_not_make_a_silent_stream(path, dialect, silent_before, serve, monkeypatch):
    monkeypatch.setattr(http, "KEEP_ALIVE_SECONDS", 0.05)
    hello = [{"type": "text", "text": "Hello."}]
    events = messages_events(hello) if dialect == "anthropic" else chat_events(["Hel", "lo."])
    async with slow_provider(events, silent_before) as url:
        base = url if dialect == "anthropic" else f"{url}/v1"
        them = {"name": "them", "base_urls": [base], "dialect": dialect}
        rules = [{"model": "theirs", "provider": "them"}]
        service = await serve([], config=GatewayConfig.model_validate({"providers": [them], "routes": rules}))
        client = await service.http()
        body = {"model": "theirs", "stream": True, "max_tokens": 9, "messages": HI}
        if path == "responses":
            body = {"model": "theirs", "stream": True, "input": "hi"}
        reply = await client.post(f"{service.base_url}/{path}", json=body)
        assert reply.headers["x-request-id"] == "r-1"
        assert PINGS[path] in reply.content
        found = reply.content.strip().split(b"\n\n")
        assert all(event.startswith((b"data:", b"event:", b":")) for event in found)
        if path == "messages":
            claude = await service.anthropic()
            async with claude.messages.stream(model="theirs", max_tokens=9, messages=HI) as stream:
                assert await stream.get_final_text() == "Hello."
        elif path == "responses":
            sdk = await service.client()
            async with sdk.responses.stream(model="theirs", input="hi") as stream:
                assert (await stream.get_final_response()).output_text == "Hello."
        else:
            sdk = await service.client()
            async with sdk.chat.completions.stream(model="theirs", messages=HI) as stream:
                assert (await stream.get_final_completion()).choices[0].message.content == "Hello."
        assert all(span.status_code == "OK" for span in await service.spans())


async def test_a_provider_that_has_not_answered_keeps_its_right_to_fail(serve, monkeypatch):
    monkeypatch.setattr(http, "KEEP_ALIVE_SECONDS", 0.02)

    async def fail_late(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.2)
        writer.write(b"HTTP/1.1 529 Busy\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(fail_late, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        them = {"name": "them", "base_urls": [url], "retries": 0}
        rules = [{"model": "theirs", "provider": "them"}]
        service = await serve([], config=GatewayConfig.model_validate({"providers": [them], "routes": rules}))
        client = await service.client()
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="theirs", messages=HI, stream=True)
        assert caught.value.status_code == 529


@pytest.mark.parametrize("path", PINGS)
async def test_a_stream_of_our_own_is_not_silent_while_the_weights_change(path, serve, monkeypatch):
    monkeypatch.setattr(http, "KEEP_ALIVE_SECONDS", 0.02)
    service = await serve(["Hello."])
    client = await service.http()
    asked = {"messages": HI, "max_tokens": 9}
    asked = {"responses": {"input": "hi"}, "completions": {"prompt": "hi"}}.get(path, asked)
    body = {"model": "scripted", "stream": True} | asked
    async with AsyncExitStack() as update:
        await update.enter_async_context(service.gate.update())
        async with client.stream("POST", f"{service.base_url}/{path}", json=body) as reply:
            parts = reply.aiter_bytes()
            first = await anext(parts)
            await update.aclose()
            after = b"".join([part async for part in parts])
    assert (reply.status_code, first.replace(PINGS[path], b"")) == (200, b"")
    assert b'"H"' in after
    assert (b"message_start" in after) == (path == "messages")
    assert (b"response.created" in after) == (path == "responses")
