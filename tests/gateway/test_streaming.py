"""Streams: as they are drawn, nothing to take back, recorded before they end."""

import asyncio
import json
from dataclasses import replace

import openai
import pytest

from agentlightning.errors import PolicyError, StoreFullError
from agentlightning.store import LightningStore

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
