"""The gateway as the official SDK and the trainer meet it."""

import asyncio
import json
import logging

import openai
import pytest
from openai import OpenAI
from tests.support.waiting import until

from agentlightning import span as names
from agentlightning.assemble import trajectory
from agentlightning.attempt_address import attempt_key, attempt_path
from agentlightning.errors import ConfigError, PolicyError
from agentlightning.gateway.app import Gateway
from agentlightning.resources import LLM
from agentlightning.store import InMemoryLightningStore
from agentlightning.testing import ByteChatFormat, ScriptedEngine

TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression":  "6*7"}}\n</tool_call>'


# -- an answer and its span ------------------------------------------------------------------------------------------


async def test_an_agent_gets_its_answer_and_the_store_the_exact_tokens(serve):
    service = await serve(["Hello."], engine={"policy_version": 3})
    reply = await service.ask("hi", temperature=0.7, top_p=0.9, max_tokens=50, seed=1, stop=["##"])
    assert reply.choices[0].message.content == "Hello."
    assert (reply.choices[0].finish_reason, reply.model, reply.id[:9]) == ("stop", "scripted", "chatcmpl-")
    (span,) = await service.spans()
    kept, ((prompt, params),) = span.attributes, service.engine.calls
    assert kept[names.PROMPT_TOKEN_IDS] == prompt
    assert ByteChatFormat().decode(kept[names.RESPONSE_TOKEN_IDS]) == "Hello.<|im_end|>"
    assert len(kept[names.LOGPROBS]) == len(kept[names.RESPONSE_TOKEN_IDS])
    assert (kept[names.POLICY_VERSION], kept[names.RESPONSE_ID]) == (3, reply.id)
    assert (params.temperature, params.top_p, params.max_tokens, params.seed, params.stop) == (0.7, 0.9, 50, 1, ("##",))
    assert kept[names.REQUEST_TEMPERATURE] == 0.7
    assert kept[names.REQUEST_STOP] == ["##"]
    assert kept[names.FINISH_REASONS] == ["stop"]
    assert (span.name, span.status_code) == ("chat scripted", "OK")


async def test_usage_counts_what_the_engine_was_given_and_drew(serve):
    service = await serve(["Hello."])
    reply = await service.ask()
    (span,) = await service.spans()
    used = (reply.usage.prompt_tokens, reply.usage.completion_tokens)
    assert used == (len(span.attributes[names.PROMPT_TOKEN_IDS]), len(span.attributes[names.RESPONSE_TOKEN_IDS]))
    assert used == (span.attributes[names.INPUT_TOKENS], span.attributes[names.OUTPUT_TOKENS])


async def test_a_tool_is_called_and_the_conversation_goes_on_in_the_same_tokens(serve):
    service = await serve([CALL, "It is 42."])
    first = (await service.ask("6*7?", tools=TOOLS)).choices[0]
    (call,) = first.message.tool_calls
    assert first.finish_reason == "tool_calls"
    assert (first.message.content, call.type, call.function.name) == (None, "function", "calculator")
    assert call.function.arguments == '{"expression":  "6*7"}'
    result = {"role": "tool", "tool_call_id": call.id, "content": "42"}
    messages = [{"role": "user", "content": "6*7?"}, first.message.model_dump(), result]
    assert (await service.ask(messages, tools=TOOLS)).choices[0].message.content == "It is 42."
    one, two = [span.attributes for span in await service.spans()]
    known = one[names.PROMPT_TOKEN_IDS] + one[names.RESPONSE_TOKEN_IDS]
    assert two[names.PROMPT_TOKEN_IDS][: len(known)] == known
    assert two[names.CONTINUES] == (await service.spans())[0].span_id
    assert (service.gateway.counters.continued, service.gateway.counters.drift) == (1, 0)


async def test_messages_and_tools_are_kept_as_opentelemetry_has_them(serve):
    service = await serve([CALL])
    await service.ask([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6*7?"}], tools=TOOLS)
    kept = (await service.spans())[0].attributes
    assert json.loads(kept[names.INPUT_MESSAGES])[1] == {"role": "user", "parts": [{"type": "text", "content": "6*7?"}]}
    (said,) = json.loads(kept[names.OUTPUT_MESSAGES])
    assert said["parts"][0] | {"id": ""} == {
        "type": "tool_call",
        "id": "",
        "name": "calculator",
        "arguments": {"expression": "6*7"},
    }
    assert (said["role"], said["finish_reason"]) == ("assistant", "tool_call")
    assert json.loads(kept[names.TOOL_DEFINITIONS]) == TOOLS


async def test_an_edited_history_is_counted_as_drift_and_marked(serve):
    service = await serve(["It is 41.", "ok"])
    await service.ask("6*7?")
    edited = {"role": "assistant", "content": "It is 42."}
    await service.ask([{"role": "user", "content": "6*7?"}, edited, {"role": "user", "content": "sure?"}])
    assert service.gateway.counters.drift == 1
    assert [span.attributes.get(names.DRIFT) for span in await service.spans()] == [None, True]


async def test_several_answers_are_several_spans_and_each_can_be_continued(serve):
    service = await serve(["one", "two", "three", "more"])
    reply = await service.ask("hi", n=3, seed=5)
    said = [choice.message.content for choice in reply.choices]
    assert sorted(said) == ["one", "three", "two"]
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    spans = await service.spans()
    assert len({span.span_id for span in spans}) == 3
    assert len(spans[0].attributes[names.PROMPT_TOKEN_IDS]) == reply.usage.prompt_tokens
    assert sorted(params.seed for _, params in service.engine.calls) == [5, 6, 7]
    answer = reply.choices[1].message.model_dump()
    await service.ask([{"role": "user", "content": "hi"}, answer, {"role": "user", "content": "go on"}])
    assert (await service.spans())[3].attributes[names.CONTINUES] == spans[1].span_id


async def test_an_answer_cut_at_its_limit_says_so(serve):
    service = await serve(["Hello."])
    reply = await service.ask(max_completion_tokens=3)
    assert (reply.choices[0].finish_reason, reply.choices[0].message.content) == ("length", "Hel")


async def test_a_stop_string_ends_the_answer_and_its_tokens_are_kept(serve):
    service = await serve(["yes END no"])
    reply = await service.ask(stop="END")
    assert (reply.choices[0].finish_reason, reply.choices[0].message.content) == ("stop", "yes ")
    (span,) = await service.spans()
    assert ByteChatFormat().decode(span.attributes[names.RESPONSE_TOKEN_IDS]) == "yes END"


async def test_log_probabilities_come_in_openais_shape(serve):
    service = await serve(["Hi"])
    content = (await service.ask(logprobs=True)).choices[0].logprobs.content
    (span,) = await service.spans()
    assert [token.token for token in content] == ["H", "i", "<|im_end|>"]
    assert [token.logprob for token in content] == pytest.approx(span.attributes[names.LOGPROBS])
    assert content[0].bytes == [72]


async def test_no_tools_are_shown_to_the_model_when_the_choice_is_none(serve):
    service = await serve([CALL])
    reply = await service.ask(tools=TOOLS, tool_choice="none")
    assert (reply.choices[0].message.content, reply.choices[0].message.tool_calls) == (CALL, None)
    assert "calculator" not in ByteChatFormat().decode(service.engine.calls[0][0])


async def test_the_synchronous_sdk_works_too(serve):
    service = await serve(["Hello."])

    def ask():
        with OpenAI(base_url=service.base_url, api_key=service.key) as client:
            messages = [{"role": "user", "content": "hi"}]
            return client.chat.completions.create(model="scripted", messages=messages)

    assert (await asyncio.to_thread(ask)).choices[0].message.content == "Hello."


# -- whose call it is ------------------------------------------------------------------------------------------------


async def test_a_key_alone_names_the_attempt(serve):
    service = await serve(["Hello."])
    client = await service.client(base_url=f"{service.server.url}/v1")
    await client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "hi"}])
    assert len(await service.spans()) == 1


async def test_a_url_alone_names_the_attempt_whatever_key_the_agent_has(serve):
    service = await serve(["Hello.", "Hello."])
    proxy = f"{service.server.url}/proxy{attempt_path(service.rollout_id, service.attempt_id)}/mode/train/openai/v1"
    for url in (service.base_url, proxy):
        client = await service.client(base_url=url, api_key="sk-of-somebody-else")
        await client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "hi"}])
    assert len(await service.spans()) == 2


async def test_a_forged_key_and_another_attempts_key_are_refused(serve, secret):
    service = await serve([])
    for key in (service.key + "0", "agl-a.b.c", "agl-é", attempt_key(secret, service.rollout_id, "at-other")):
        headers = {"Authorization": f"Bearer {key}".encode()}
        client = await service.http()
        reply = await client.post(f"{service.base_url}/chat/completions", headers=headers, content=b"{}")
        # A key that is not even ASCII is no key: the URL still names the attempt, and the body is then refused.
        assert reply.status_code == (401 if key.isascii() else 400)
    client = await service.client(api_key=service.key + "0")
    with pytest.raises(openai.AuthenticationError) as refused:
        await client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "hi"}])
    assert service.key not in str(refused.value)


async def test_a_url_is_not_enough_where_keys_are_required(serve):
    service = await serve(["Hello."], require_key=True)
    client = await service.client(api_key="sk-mine")
    with pytest.raises(openai.AuthenticationError, match="requires the AGL_KEY"):
        await client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "hi"}])
    assert (await service.ask()).choices[0].message.content == "Hello."


async def test_a_call_that_names_no_attempt_is_told_how(serve):
    service = await serve([])
    client = await service.client(base_url=f"{service.server.url}/v1", api_key="sk-mine")
    with pytest.raises(openai.AuthenticationError, match="AGL_OPENAI_BASE_URL"):
        await client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "hi"}])


async def test_a_call_for_no_attempt_is_served_and_counted_where_that_is_allowed(serve):
    service = await serve(["Hello."], allow_unattributed=True)
    client = await service.client(base_url=f"{service.server.url}/v1", api_key="sk-mine")
    await client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "hi"}])
    assert service.gateway.counters.unattributed == 1
    assert await service.spans() == []


async def test_unknown_rollouts_and_attempts_are_not_found(serve):
    service = await serve([])
    for path in (attempt_path("ro-nobody", "at-1"), attempt_path(service.rollout_id, "at-nobody")):
        client = await service.client(base_url=f"{service.server.url}{path}/v1", api_key="x")
        with pytest.raises(openai.NotFoundError, match="nobody"):
            await client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "hi"}])


async def test_an_attempt_that_has_ended_or_was_superseded_takes_no_more_calls(serve):
    service = await serve(["Hello."], check_seconds=0.02)
    await service.ask()
    await service.store.update_attempt(service.rollout_id, service.attempt_id, status="failed")
    await until(lambda: not len(service.gateway.attempts))
    with pytest.raises(openai.ConflictError, match="ended as failed"):
        await service.ask()
    assert len(service.gateway.conversations) == 0
    await service.store.start_attempt(service.rollout_id)
    with pytest.raises(openai.ConflictError, match="later attempt"):
        await service.ask()
    errors = [span.attributes.get(names.ERROR_TYPE) for span in await service.spans()]
    assert errors == [None, "attempt_ended", "attempt_superseded"]


async def test_a_superseded_attempt_is_noticed_by_its_first_span(serve):
    service = await serve(["Hello.", "Hello."], check_seconds=3600)
    await service.ask()
    await service.store.start_attempt(service.rollout_id)
    await service.ask()
    with pytest.raises(openai.ConflictError, match="later attempt"):
        await service.ask()


async def test_agents_say_who_they_are_by_header_or_baggage(serve):
    service = await serve(["a", "b", "c"])
    for headers in (
        {"x-agentlightning-agent": "writer"},
        {"baggage": "x=1, agentlightning.agent=the%20critic;p=2"},
        {},
    ):
        await service.ask(extra_headers=headers)
    agents = [span.attributes.get(names.AGENT_NAME) for span in await service.spans()]
    assert agents == ["writer", "the critic", None]


async def test_spans_join_the_trace_of_the_caller(serve):
    service = await serve(["a", "b", "c"])
    await service.ask(extra_headers={"traceparent": f"00-{'a' * 32}-{'b' * 16}-03"})
    await service.ask()
    await service.ask()
    one, two, three = await service.spans()
    assert (one.trace_id, one.parent_id) == ("a" * 32, "b" * 16)
    assert two.trace_id == three.trace_id != one.trace_id


# -- what is sampled -------------------------------------------------------------------------------------------------


async def test_the_trainers_sampling_parameters_win(serve, store):
    llm = LLM(endpoint="http://x", model="scripted", sampling_parameters={"temperature": 1.0, "max_tokens": 4})
    await store.add_resources({"main": llm})
    service = await serve(["Hello."])
    await service.ask(temperature=0.1, max_tokens=100, top_p=0.5)
    (_, params) = service.engine.calls[0]
    assert (params.temperature, params.max_tokens, params.top_p) == (1.0, 4, 0.5)
    (span,) = await service.spans()
    assert span.attributes[names.REQUEST_TEMPERATURE] == 1.0


async def test_a_resource_that_sets_what_cannot_be_honoured_is_named(serve, store):
    llm = LLM(endpoint="http://x", model="scripted", sampling_parameters={"typical_p": 0.1})
    await store.add_resources({"main_llm": llm})
    service = await serve([])
    with pytest.raises(openai.BadRequestError, match="'main_llm' sets typical_p"):
        await service.ask()


async def test_what_cannot_be_honoured_is_refused_before_anything_is_sampled(serve):
    service = await serve([])
    with pytest.raises(openai.BadRequestError, match="presence_penalty cannot be honoured") as refused:
        await service.ask(presence_penalty=0.5)
    assert refused.value.param == "presence_penalty"
    assert service.engine.calls == []


async def test_fields_that_change_nothing_are_accepted_and_unknown_ones_counted(serve):
    service = await serve(["Hello."])
    harmless = {"response_format": {"type": "text"}, "frequency_penalty": 0, "tool_choice": "auto", "logit_bias": {}}
    unknown = {"store": True, "prompt_cache_key": "x", "metadata": {}}
    await service.ask(**harmless, parallel_tool_calls=True, tools=TOOLS, extra_body=unknown)
    assert service.gateway.metrics()["unknown_fields"] == len(unknown)


# -- what goes wrong -------------------------------------------------------------------------------------------------


async def test_an_unknown_model_is_not_found_and_the_known_ones_are_named(serve):
    service = await serve([])
    client = await service.client()
    with pytest.raises(openai.NotFoundError, match="known: scripted") as refused:
        await client.chat.completions.create(model="gpt-5", messages=[{"role": "user", "content": "hi"}])
    assert refused.value.code == "model_not_found"


async def test_any_model_name_is_served_where_that_is_allowed(serve):
    service = await serve(["Hello."], accept_any_model=True)
    client = await service.client()
    reply = await client.chat.completions.create(model="gpt-5", messages=[{"role": "user", "content": "hi"}])
    assert reply.model == "scripted"
    (span,) = await service.spans()
    assert (span.attributes[names.REQUEST_MODEL], span.attributes[names.RESPONSE_MODEL]) == ("gpt-5", "scripted")


def test_a_default_model_that_is_not_served_is_refused():
    with pytest.raises(ConfigError, match="default_model='b' is not served; use one of a"):
        Gateway(InMemoryLightningStore(), {"a": ScriptedEngine([])}, secret="x", default_model="b")


async def test_a_prompt_longer_than_the_context_is_the_callers_error_and_recorded(serve):
    service = await serve([], engine={"context_length": 10})
    with pytest.raises(openai.BadRequestError, match="shorten the prompt") as refused:
        await service.ask("a question longer than ten tokens")
    assert refused.value.code == "context_length_exceeded"
    (span,) = await service.spans()
    assert (span.status_code, span.attributes[names.ERROR_TYPE]) == ("ERROR", "ContextLengthError")


async def test_a_body_that_is_no_json_is_a_bad_request_in_openais_shape(serve):
    service = await serve([])
    client = await service.http()
    reply = await client.post(f"{service.base_url}/chat/completions", content=b"{")
    assert reply.status_code == 400
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_large_is_refused(serve, chunked):
    service = await serve([], max_body_bytes=1000)

    async def parts():
        for _ in range(20):
            yield b"x" * 100

    client = await service.http()
    content = parts() if chunked else b"x" * 2000
    reply = await client.post(f"{service.base_url}/chat/completions", content=content)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("n", [1, 2])
async def test_an_engine_that_fails_is_a_server_error_recorded_in_the_store(serve, caplog, n):
    service = await serve([PolicyError("the device is lost"), PolicyError("the device is lost")])
    with caplog.at_level(logging.ERROR), pytest.raises(openai.InternalServerError, match="the device is lost"):
        await service.ask(n=n)
    spans = await service.spans()
    assert [(span.status_code, span.attributes[names.ERROR_TYPE]) for span in spans] == [("ERROR", "PolicyError")] * n
    assert names.RESPONSE_TOKEN_IDS not in spans[0].attributes
    assert service.key not in caplog.text


@pytest.mark.parametrize("streams", [False, True])
async def test_a_caller_that_hangs_up_ends_the_sampling_and_is_recorded(serve, streams):
    service = await serve(["a long answer " * 1000, "Hello."], engine={"delay": 0.001})
    call = asyncio.create_task(service.stream() if streams else service.ask())
    await until(lambda: service.engine.calls)
    call.cancel()
    await asyncio.wait([call])
    await until(lambda: service.gate.num_in_flight == 0)
    (span,) = await service.spans()
    assert span.attributes[names.ERROR_TYPE] == "client_disconnected"
    drawn = bytes(span.attributes.get(names.RESPONSE_TOKEN_IDS, ())).decode()
    assert ("a long answer " * 1000).startswith(drawn)
    assert len(drawn) == span.attributes[names.OUTPUT_TOKENS]
    assert trajectory(span.rollout_id, span.attempt_id, [span]).transitions == ()
    assert (await service.ask()).choices[0].message.content == "Hello."
    assert service.gateway.counters.cancelled == 1


# -- the valve -------------------------------------------------------------------------------------------------------


async def test_calls_that_come_during_an_update_wait_and_none_fails(serve):
    service = await serve(lambda messages: "Hello.")
    async with service.gate.update():
        calls = [asyncio.create_task(service.ask()) for _ in range(5)]
        await asyncio.sleep(0.2)
        assert service.engine.calls == []
    assert [reply.choices[0].message.content for reply in await asyncio.gather(*calls)] == ["Hello."] * 5


async def test_an_update_lets_what_is_under_way_finish_and_nothing_else_begin(serve):
    service = await serve(lambda messages: "Hello.", engine={"delay": 0.02})
    early = asyncio.create_task(service.ask())
    await until(lambda: service.engine.calls)

    async def come_late():
        await until(lambda: service.gate.closed)
        assert not early.done()
        await service.ask()

    late = asyncio.create_task(come_late())
    async with service.gate.update():
        await until(lambda: service.gate.num_waiting == 1)
        assert len(await service.spans()) == 1
        service.engine.policy_version += 1
    await asyncio.gather(early, late)
    assert [span.attributes[names.POLICY_VERSION] for span in await service.spans()] == [0, 1]


async def test_more_calls_than_allowed_at_once_wait_their_turn(serve):
    service = await serve(lambda messages: "Hello.", max_concurrency=1, engine={"delay": 0.002})
    replies = await asyncio.gather(*(service.ask() for _ in range(4)))
    assert len(replies) == 4


# -- beside the calls ------------------------------------------------------------------------------------------------


async def test_models_are_listed_at_every_base_url(serve):
    service = await serve([])
    for url in (service.base_url, f"{service.server.url}/v1"):
        client = await service.client(base_url=url)
        assert [model.id async for model in await client.models.list()] == ["scripted"]
        assert (await client.models.retrieve("scripted")).id == "scripted"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-5")


async def test_roots_answer_at_once_and_unknown_paths_in_openais_shape(serve):
    service = await serve([])
    root = service.base_url.removesuffix("/v1")
    client = await service.http()
    for url in (service.server.url, f"{service.server.url}/v1", root, service.base_url):
        assert (await client.head(url)).status_code == 200
    reply = await client.post(f"{service.base_url}/images/generations", content=b"{}")
    assert reply.status_code == 404
    assert "/v1/images/generations is not served here" in reply.json()["error"]["message"]
    worker = f"{service.server.url}/worker/w/key/{service.key}"
    beside = [await client.get(url) for url in (f"{root}/chat/completions", f"{root}/v1/none", f"{worker}/v1/none")]
    for each in (reply, *beside):
        assert (each.status_code, service.key in each.text) == (404, False), each.text


async def test_no_key_is_ever_kept(serve, caplog):
    service = await serve(["Hello.", PolicyError("broken")])
    with caplog.at_level(logging.DEBUG, logger="agentlightning"):
        await service.ask()
        with pytest.raises(openai.InternalServerError):
            await service.ask()
    assert service.key not in str(await service.spans()) + caplog.text
