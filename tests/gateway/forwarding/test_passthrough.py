"""Promises of calls passed on to a provider in its own dialect: to the caller, to the provider, in the span."""

import asyncio
import gc
import json

import anthropic
import openai
import pytest
from tests.support.provider import Reply, ScriptedProvider, chat_answer
from tests.support.provider_streams import chat_events, messages_answer, messages_events
from tests.support.waiting import until

from agentlightning import span as names
from agentlightning.assemble import trajectory
from agentlightning.errors import StoreFullError
from agentlightning.gateway.config import GatewayConfig
from agentlightning.gateway.forwarding.call import ForwardedCall
from agentlightning.resources import LLM
from agentlightning.store.sql.store import SqlStore

HI = [{"role": "user", "content": "hi"}]
KEY = "sk-theirs-0123456789"
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 6, "b": 7}'}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 6, "b": 7}}
PATHS = ["chat/completions", "completions", "responses", "embeddings"]


@pytest.fixture
async def ask(serve):
    """ask(dialect, replies) -> (the service, the provider behind its model "theirs")."""
    opened = []

    async def start(dialect, replies, *, use_store=None, **options):
        provider = await ScriptedProvider(replies).start()
        opened.append(provider)
        base = provider.url if dialect == "anthropic" else f"{provider.url}/v1"
        them = {"name": "them", "dialect": dialect, "base_urls": [base], "api_key": KEY, "retries": 0}
        them |= {"paths": PATHS} if dialect == "openai" else {}
        rule = {"model": "theirs", "provider": "them", "send_model": "big-1"}
        config = GatewayConfig.model_validate({"providers": [them | options], "routes": [rule]})
        return await serve([], config=config, use_store=use_store), provider

    yield start
    for provider in opened:
        await provider.stop()


async def one_span(service):
    (span,) = await service.spans()
    return span


def messages_of(span, name):
    return json.loads(span.attributes[name])


def with_tokens(answer, prompt, drawn):
    """An answer as vLLM gives it."""
    answer["prompt_token_ids"] = prompt
    answer["choices"][0] |= {
        "token_ids": drawn,
        "logprobs": {"content": [{"token": "t", "logprob": -0.5, "bytes": [116], "top_logprobs": []} for _ in drawn]},
    }
    return answer


# -- what passes -------------------------------------------------------------------------------------------------------


async def test_a_call_passes_as_it_is_but_for_the_model_and_the_key(ask):
    service, provider = await ask("openai", [Reply(chat_answer("Hello.", usage=(11, 3), system_fingerprint="fp_1"))])
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    said = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}]
    client = await service.client()
    reply = await client.chat.completions.create(
        model="theirs", messages=said, temperature=0.5, extra_body={"their_own": {"x": [1]}}
    )
    assert (reply.choices[0].message.content, reply.model, reply.system_fingerprint) == (
        "Hello.",
        "theirs-2026",
        "fp_1",
    )
    (seen,) = provider.seen
    assert (seen.path, seen.headers["authorization"]) == ("/v1/chat/completions", f"Bearer {KEY}")
    assert seen.json == {"model": "big-1", "messages": said, "temperature": 0.5, "their_own": {"x": [1]}}

    span = await one_span(service)
    assert (span.name, span.status_code) == ("chat theirs", "OK")
    expected = {
        names.OPERATION_NAME: "chat",
        names.PROVIDER_NAME: "them",
        names.REQUEST_MODEL: "theirs",
        names.RESPONSE_MODEL: "theirs-2026",
        names.RESPONSE_ID: "chatcmpl-1",
        names.REQUEST_TEMPERATURE: 0.5,
        names.INPUT_TOKENS: 11,
        names.OUTPUT_TOKENS: 3,
        names.FINISH_REASONS: ["stop"],
        names.TOKENS: "none",
    }
    assert expected.items() <= span.attributes.items()
    text, blob = messages_of(span, names.INPUT_MESSAGES)[0]["parts"]
    assert text == {"type": "text", "content": "What is it?"}
    assert blob == {"type": "blob", "modality": "image", "mime_type": "image/png", "content": "iVBORw0KGgo="}
    answer = {"role": "assistant", "parts": [{"type": "text", "content": "Hello."}], "finish_reason": "stop"}
    assert messages_of(span, names.OUTPUT_MESSAGES) == [answer]


async def test_a_stream_passes_as_it_comes_and_is_recorded_whole(ask):
    events = chat_events(["Hel", "lo."], calls=[CALL], usage=(11, 3), thought="Hm.")
    service, provider = await ask("openai", [Reply(events=events)])
    client = await service.client()
    stream = await client.chat.completions.create(model="theirs", messages=HI, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello."
    assert all(chunk.choices for chunk in chunks)  # the one that says what was used was not asked for
    assert provider.seen[0].json["stream_options"] == {"include_usage": True}
    span = await one_span(service)
    (answer,) = messages_of(span, names.OUTPUT_MESSAGES)
    assert answer["parts"] == [
        {"type": "reasoning", "content": "Hm."},
        {"type": "text", "content": "Hello."},
        {"type": "tool_call", "id": "call_1", "name": "add", "arguments": {"a": 6, "b": 7}},
    ]
    assert (answer["finish_reason"], span.attributes[names.FINISH_REASONS]) == ("tool_call", ["tool_calls"])
    assert (span.attributes[names.INPUT_TOKENS], span.attributes[names.OUTPUT_TOKENS]) == (11, 3)


async def test_a_stream_that_breaks_off_is_recorded_up_to_there(ask):
    service, _ = await ask("openai", [Reply(events=chat_events(["Hel", "lo."])[:-3])])
    stream = await (await service.client()).chat.completions.create(model="theirs", messages=HI, stream=True)
    with pytest.raises(openai.APIError):
        [chunk async for chunk in stream]
    span = await one_span(service)
    assert span.status_code == "ERROR"
    (answer,) = messages_of(span, names.OUTPUT_MESSAGES)
    assert answer["parts"] == [{"type": "text", "content": "Hello."}]


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_of_a_call_waits_for_the_garbage_collector(ask, stream):
    service, _ = await ask("openai", [Reply(events=chat_events(["Hi."])) if stream else Reply(chat_answer("Hi."))])
    client = await service.client()

    def calls():
        return sum(type(each) is ForwardedCall for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = calls()
        reply = await client.chat.completions.create(model="theirs", messages=HI, stream=stream)
        if stream:
            assert [chunk async for chunk in reply]
        await one_span(service)
        await until(lambda: calls() <= before)
    finally:
        gc.enable()


async def test_a_caller_that_asks_for_usage_gets_it(ask):
    service, _ = await ask("openai", [Reply(events=chat_events(["Hello."], usage=(11, 3)))])
    client = await service.client()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [chunk async for chunk in await client.chat.completions.create(model="theirs", messages=HI, **options)]
    assert (chunks[-1].choices, chunks[-1].usage.prompt_tokens) == ([], 11)


@pytest.mark.parametrize("wanted", [False, True])
async def test_tokens_are_asked_for_recorded_and_shown_to_who_wants_them(ask, wanted):
    answer = with_tokens(chat_answer("Hello."), [1, 2, 3], [7, 8])
    service, provider = await ask("openai", [Reply(answer)], token_ids=True)
    client = await service.client()
    options = {"logprobs": True, "extra_body": {"return_token_ids": True}} if wanted else {}
    reply = await client.chat.completions.create(model="theirs", messages=HI, **options)
    assert (provider.seen[0].json["return_token_ids"], provider.seen[0].json["logprobs"]) == (True, True)
    shown = reply.model_dump(exclude_unset=True)
    assert ("prompt_token_ids" in shown, "token_ids" in shown["choices"][0]) == (wanted, wanted)
    assert (shown["choices"][0]["logprobs"] is not None) is wanted

    span = await one_span(service)
    assert span.attributes[names.TOKENS] == "provider"
    (transition,) = trajectory(span.rollout_id, span.attempt_id, [span]).transitions
    assert (list(transition.prompt_token_ids), list(transition.response_token_ids)) == ([1, 2, 3], [7, 8])
    assert list(span.attributes[names.LOGPROBS]) == [-0.5, -0.5]


async def test_what_makes_probabilities_unfaithful_is_named(ask):
    answer = with_tokens(chat_answer("Hello."), [1, 2, 3], [7, 8])
    service, _ = await ask("openai", lambda seen: Reply(answer), token_ids=True)
    client = await service.client()
    usual = {"temperature": 0.5, "frequency_penalty": 0, "response_format": {"type": "text"}}
    await client.chat.completions.create(model="theirs", messages=HI, **usual)
    odd = {"frequency_penalty": 0.5, "response_format": {"type": "json_object"}, "extra_body": {"min_p": 0.1}}
    await client.chat.completions.create(model="theirs", messages=HI, **odd)
    first, second = await service.spans()
    assert names.RESHAPED not in first.attributes
    assert second.attributes[names.RESHAPED] == ["frequency_penalty", "min_p", "response_format"]


async def test_tokens_are_gathered_from_a_stream(ask):
    events = [json.loads(event[6:]) for event in chat_events(["Hel", "lo."])[:-1]]
    for place, event in enumerate(events[1:3]):
        with_tokens(event, [], [7 + place, 70 + place])
    events[0]["prompt_token_ids"] = [1, 2, 3]
    lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events] + [b"data: [DONE]\n\n"]
    service, _ = await ask("openai", [Reply(events=lines)], token_ids=True)
    client = await service.client()
    stream = await client.chat.completions.create(model="theirs", messages=HI, stream=True)
    chunks = [chunk.model_dump(exclude_unset=True) async for chunk in stream]
    assert not any("token_ids" in chunk["choices"][0] or "prompt_token_ids" in chunk for chunk in chunks)
    span = await one_span(service)
    assert span.attributes[names.PROMPT_TOKEN_IDS] == [1, 2, 3]
    assert span.attributes[names.RESPONSE_TOKEN_IDS] == [7, 70, 8, 71]


async def test_each_answer_of_several_has_a_span_and_the_cost_is_counted_once(ask):
    answer = chat_answer("One.", usage=(10, 6))
    second = answer["choices"][0] | {"index": 1, "message": {"role": "assistant", "content": "Two."}}
    price = {"input": 1.0, "output": 2.0}
    service, _ = await ask("openai", [Reply(answer | {"choices": [answer["choices"][0], second]})], price=price)
    client = await service.client()
    await client.chat.completions.create(model="theirs", messages=HI, n=2)
    spans = await service.spans()
    said = [messages_of(span, names.OUTPUT_MESSAGES)[0]["parts"][0]["content"] for span in spans]
    assert said == ["One.", "Two."]
    assert [span.attributes.get(names.COST) for span in spans] == [pytest.approx(22e-6), None]


async def test_raw_completions_pass(ask):
    answer = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "theirs-2026"}
    choices = [{"index": n, "text": f" {n}", "finish_reason": "length", "logprobs": None} for n in range(2)]
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    service, provider = await ask("openai", [Reply(answer | {"choices": choices, "usage": usage})])
    client = await service.client()
    reply = await client.completions.create(model="theirs", prompt=["a", "b"], max_tokens=1)
    assert [choice.text for choice in reply.choices] == [" 0", " 1"]
    assert provider.seen[0].path == "/v1/completions"
    first, second = await service.spans()
    assert first.name == "text_completion theirs"
    said = [messages_of(span, names.INPUT_MESSAGES)[0]["parts"][0]["content"] for span in (first, second)]
    assert said == ["a", "b"]


async def test_responses_pass_whole_and_streamed(ask):
    item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
    item["content"] = [{"type": "output_text", "text": "Hello.", "annotations": []}]
    call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "add", "arguments": '{"a":6}'}
    whole = {"id": "resp_1", "object": "response", "created_at": 1, "model": "theirs-2026", "status": "completed"}
    whole |= {"output": [item, call], "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    whole["usage"] = {"input_tokens": 9, "output_tokens": 4, "total_tokens": 13}
    delta = {"type": "response.output_text.delta", "item_id": "msg_1", "output_index": 0, "content_index": 0}
    said = [
        {"type": "response.created", "sequence_number": 0, "response": whole | {"status": "in_progress", "output": []}},
        delta | {"sequence_number": 1, "delta": "Hello.", "logprobs": []},
        {"type": "response.completed", "sequence_number": 2, "response": whole},
    ]
    events = [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in said]
    service, provider = await ask("openai", [Reply(whole), Reply(events=events)])
    client = await service.client()
    reply = await client.responses.create(model="theirs", input="hi", instructions="Be brief.")
    assert (reply.output_text, provider.seen[0].path) == ("Hello.", "/v1/responses")
    stream = await client.responses.create(model="theirs", input="hi", instructions="Be brief.", stream=True)
    assert [event.type async for event in stream] == [event["type"] for event in said]
    for span in await service.spans():
        assert [message["role"] for message in messages_of(span, names.INPUT_MESSAGES)] == ["system", "user"]
        (answer,) = messages_of(span, names.OUTPUT_MESSAGES)
        assert [part["type"] for part in answer["parts"]] == ["text", "tool_call"]
        assert (span.attributes[names.INPUT_TOKENS], span.attributes[names.RESPONSE_ID]) == (9, "resp_1")


async def test_embeddings_pass(ask):
    answer = {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}]}
    answer |= {"model": "embed-2026", "usage": {"prompt_tokens": 2, "total_tokens": 2}}
    service, provider = await ask("openai", [Reply(answer)])
    client = await service.client()
    reply = await client.embeddings.create(model="theirs", input=["one"], encoding_format="float")
    assert reply.data[0].embedding == [0.5, 0.25]
    assert provider.seen[0].path == "/v1/embeddings"
    span = await one_span(service)
    assert (span.name, span.attributes[names.INPUT_TOKENS]) == ("embeddings theirs", 2)
    assert names.OUTPUT_MESSAGES not in span.attributes


async def test_anthropics_messages_pass_whole_and_streamed(ask):
    blocks = [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "Hello."}, USE]
    replies = [Reply(messages_answer(blocks, usage=(11, 3))), Reply(events=messages_events(blocks, usage=(11, 3)))]
    service, provider = await ask("anthropic", replies)
    client = await service.anthropic(default_headers={"anthropic-beta": "b1"})
    given = {"model": "theirs", "max_tokens": 50, "system": "Be brief.", "messages": HI}
    await client.messages.create(**given)
    async with client.messages.stream(**given) as stream:
        message = await stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[2].input == {"a": 6, "b": 7}
    assert (provider.seen[0].path, provider.seen[0].headers["x-api-key"]) == ("/v1/messages", KEY)
    assert (provider.seen[0].json["model"], provider.seen[0].headers["anthropic-beta"]) == ("big-1", "b1")
    for span in await service.spans():
        assert [message["role"] for message in messages_of(span, names.INPUT_MESSAGES)] == ["system", "user"]
        (answer,) = messages_of(span, names.OUTPUT_MESSAGES)
        assert [part["type"] for part in answer["parts"]] == ["reasoning", "text", "tool_call"]
        assert answer["parts"][2]["arguments"] == {"a": 6, "b": 7}
        assert (span.attributes[names.INPUT_TOKENS], span.attributes[names.OUTPUT_TOKENS]) == (11, 3)
        assert span.attributes[names.FINISH_REASONS] == ["tool_calls"]


async def test_the_sampling_of_the_attempts_resources_is_what_is_asked_for(ask, store):
    sampling = {"temperature": 0.25, "max_tokens": 7}
    await store.add_resources({"llm": LLM(endpoint="http://x", model="theirs", sampling_parameters=sampling)})
    service, provider = await ask("openai", [Reply(chat_answer("Hello."))])
    client = await service.client()
    await client.chat.completions.create(model="theirs", messages=HI, temperature=1.0, max_completion_tokens=99)
    sent = provider.seen[0].json
    assert (sent["temperature"], sent["max_completion_tokens"], "max_tokens" in sent) == (0.25, 7, False)
    span = await one_span(service)
    assert span.attributes[names.REQUEST_TEMPERATURE] == 0.25


OPENAI, AZURE = "http://api.openai.com/v1", "http://mine.openai.azure.com/openai/v1"


@pytest.mark.parametrize(
    ("url", "asked", "sent"),
    [
        (OPENAI, {}, {"max_completion_tokens": 7}),
        (OPENAI, {"max_tokens": 99}, {"max_completion_tokens": 7}),
        (AZURE, {"max_completion_tokens": 99}, {"max_completion_tokens": 7}),
        ("http://openai.example/v1", {"max_tokens": 99}, {"max_tokens": 7}),
        ("http://openai.example/v1", {"max_completion_tokens": 99}, {"max_completion_tokens": 7}),
    ],
)
async def test_the_output_limit_of_a_resource_has_the_name_that_its_provider_takes(url, asked, sent, ask, store):
    sampling = {"max_tokens": 7}
    await store.add_resources({"llm": LLM(endpoint="http://x", model="theirs", sampling_parameters=sampling)})
    async with ScriptedProvider([Reply(chat_answer("Hello."))]) as proxy:
        service, _ = await ask("openai", [], base_urls=[url], proxy=proxy.url)
        client = await service.client()
        await client.chat.completions.create(model="theirs", messages=HI, **asked)
        (seen,) = proxy.seen
        assert seen.path == f"{url}/chat/completions"
        assert {name: value for name, value in seen.json.items() if name.startswith("max_")} == sent


async def test_anthropic_is_told_by_its_own_names_what_the_resources_ask_for(ask, store):
    sampling = {"stop": ["END"], "max_tokens": 7}
    await store.add_resources({"llm": LLM(endpoint="http://x", model="theirs", sampling_parameters=sampling)})
    service, provider = await ask("anthropic", [Reply(messages_answer([{"type": "text", "text": "Hello."}]))])
    client = await service.anthropic()
    await client.messages.create(model="theirs", messages=HI, max_tokens=99)
    sent = provider.seen[0].json
    assert (sent["stop_sequences"], sent["max_tokens"], "stop" in sent) == (["END"], 7, False)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "error", "said"),
    [
        (Reply({"error": {"message": "bad field"}}, status=400), openai.BadRequestError, "bad field"),
        (Reply({"error": {"message": f"no {KEY}"}}, status=401), openai.APIStatusError, "key"),
        (Reply(status=500), openai.InternalServerError, "them"),
        (Reply(end="close", head=False), openai.InternalServerError, "closed the connection"),
        (Reply(b"<html>", status=200), openai.InternalServerError, "not JSON"),
        (Reply(chat_answer("Hello."), end="close"), openai.InternalServerError, "closed the connection"),
    ],
)
async def test_a_failure_is_the_error_it_is_and_recorded_without_the_key(ask, reply, error, said):
    service, _ = await ask("openai", [reply])
    client = await service.client()
    with pytest.raises(error, match=said) as caught:
        await client.chat.completions.create(model="theirs", messages=HI)
    assert KEY not in str(caught.value)
    span = await one_span(service)
    assert (span.status_code, names.ERROR_TYPE in span.attributes) == ("ERROR", True)
    assert names.RESPONSE_TOKEN_IDS not in span.attributes
    assert KEY not in repr(span)


@pytest.mark.parametrize("end", ["close", "whole"])
async def test_a_stream_that_breaks_off_says_so_and_what_came_is_recorded(ask, end):
    events = chat_events(["Hel", "lo."])[:2]
    service, _ = await ask("openai", [Reply(events=events, end=end)])
    client = await service.client()
    stream = await client.chat.completions.create(model="theirs", messages=HI, stream=True)
    heard = [(await anext(stream)).choices[0].delta.content for _ in range(2)]
    assert heard == ["", "Hel"]
    with pytest.raises(openai.APIError, match="them"):
        await anext(stream)
    span = await one_span(service)
    assert (span.status_code, messages_of(span, names.OUTPUT_MESSAGES)[0]["parts"][0]["content"]) == ("ERROR", "Hel")


async def test_an_error_in_the_middle_of_a_stream_reaches_the_caller_and_the_span(ask):
    event = b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}\n\n'
    events = [*messages_events([{"type": "text", "text": "Hello."}])[:3], event]
    service, _ = await ask("anthropic", [Reply(events=events)])
    client = await service.anthropic()
    with pytest.raises(anthropic.APIStatusError, match="Overloaded"):
        async with client.messages.stream(model="theirs", max_tokens=50, messages=HI) as stream:
            await stream.get_final_message()
    span = await one_span(service)
    assert (span.status_code, span.status_message) == ("ERROR", "Overloaded")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_that_hangs_up_ends_the_call_at_the_provider(ask, stream):
    reply = Reply(events=chat_events(["Hel", "lo."])[:2], end="hang") if stream else Reply(end="hang", head=False)
    service, provider = await ask("openai", [reply])
    client = await service.client()
    if stream:
        answer = await client.chat.completions.create(model="theirs", messages=HI, stream=True)
        await anext(aiter(answer))
        await answer.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.1).chat.completions.create(model="theirs", messages=HI)
    await asyncio.wait_for(provider.hung_up.wait(), 5)
    await until(lambda: service.gateway.counters.cancelled == 1)
    span = await one_span(service)
    assert (span.status_code, span.attributes[names.ERROR_TYPE]) == ("ERROR", "client_disconnected")


async def test_a_reader_that_stops_reading_makes_the_provider_wait(ask):
    """A stream of 32 MB to a caller that does not read stays out of memory."""
    event = chat_events(["x" * 65536])[1]
    service, _ = await ask("openai", [Reply(events=[event] * 512)])
    reader, writer = await asyncio.open_connection("127.0.0.1", service.server.port, limit=65536)
    body = json.dumps({"model": "theirs", "messages": HI, "stream": True}).encode()
    path = service.base_url.partition(str(service.server.port))[2] + "/chat/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {service.key}\r\ncontent-length: {len(body)}\r\n"
    writer.write(head.encode() + b"\r\n" + body)
    await reader.readuntil(b"\r\n\r\n")
    (pool,) = service.gateway.providers.values()
    await until(lambda: any(connection._response.paused for connection in pool.transport._busy))
    writer.close()
    await until(lambda: not pool.transport._busy)


# -- the record --------------------------------------------------------------------------------------------------------


@pytest.fixture
async def store(tmp_path):
    store = SqlStore(tmp_path / "store.db")
    yield store
    await store.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_in_the_file_before_its_last_byte_goes_out(ask, store, tmp_path, stream):
    reply = Reply(events=chat_events(["Hello."])) if stream else Reply(chat_answer("Hello."))
    service, _ = await ask("openai", [reply], use_store=store)
    client = await service.client()
    answer = await client.chat.completions.create(model="theirs", messages=HI, stream=stream)
    if stream:
        assert [chunk.choices[0].finish_reason async for chunk in answer][-1] == "stop"
    assert b"Hello." in b"".join(path.read_bytes() for path in tmp_path.glob("store.db*"))
    assert len(await service.spans()) == 1


async def test_an_answer_that_cannot_be_recorded_is_an_error(ask, store, monkeypatch):
    service, _ = await ask("openai", lambda seen: Reply(chat_answer("Hello.")), use_store=store)
    client = await service.client()

    async def full(*_):
        raise StoreFullError("the disk is full")

    monkeypatch.setattr(store, "add_many_spans", full)
    with pytest.raises(openai.InternalServerError, match="the store of this server") as caught:
        await client.chat.completions.create(model="theirs", messages=HI)
    assert caught.value.status_code == 503
    monkeypatch.undo()
    await client.chat.completions.create(model="theirs", messages=HI)
    assert len(await service.spans()) == 1


async def test_calls_of_an_attempt_that_was_superseded_are_refused_soon(ask, store):
    service, _ = await ask("openai", lambda seen: Reply(chat_answer("Hello.")), use_store=store)
    client = await service.client()
    await client.chat.completions.create(model="theirs", messages=HI)
    await store.start_attempt(service.rollout_id)
    await client.chat.completions.create(model="theirs", messages=HI)
    with pytest.raises(openai.ConflictError, match="taken the place"):
        await client.chat.completions.create(model="theirs", messages=HI)


async def test_a_caller_gets_its_answer_though_its_rollout_was_deleted_meanwhile(ask, store, caplog):
    service, _ = await ask("openai", lambda seen: Reply(chat_answer("Hello.")), use_store=store)
    client = await service.client()
    await client.chat.completions.create(model="theirs", messages=HI)
    await store.cancel_rollout(service.rollout_id)
    await store.delete_rollouts([service.rollout_id])
    answer = await client.chat.completions.create(model="theirs", messages=HI)
    assert answer.choices[0].message.content == "Hello."
    assert "the store rejected 1 spans: no rollout" in caplog.text


LARGE = 2**70
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": LARGE, "enum": [LARGE, -LARGE]}}}
FUNCTION = {"name": "count", "description": "d", "parameters": SCHEMA}
REQUESTS = {
    "/v1/chat/completions": {"messages": HI, "tools": [{"type": "function", "function": FUNCTION}]},
    "/v1/responses": {"input": "hi", "tools": [{"type": "function", "strict": False, **FUNCTION}]},
    "/v1/messages": {"messages": HI, "max_tokens": 9, "tools": [{"name": "count", "input_schema": SCHEMA}]},
}


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
async def test_integers_of_any_size_reach_the_provider_and_the_span(ask, dialect, path):
    answer = messages_answer([{"type": "text", "text": "Hello."}]) if dialect == "anthropic" else chat_answer("Hello.")
    own = {"paths": ["chat/completions"]} if dialect == "openai" else {}
    service, provider = await ask(dialect, [Reply(answer)], **own)
    http = await service.http()
    headers = {"authorization": f"Bearer {service.key}", "content-type": "application/json"}
    body = json.dumps({"model": "theirs", **REQUESTS[path]})
    response = await http.post(service.server.url + path, content=body, headers=headers)
    assert response.status_code == 200, response.text
    (seen,) = provider.seen
    assert json.dumps(SCHEMA["properties"]["n"]["enum"]).replace(" ", "") in seen.body.decode().replace(" ", "")
    assert str(LARGE) in (await one_span(service)).attributes[names.TOOL_DEFINITIONS]
