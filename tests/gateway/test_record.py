"""Promises to agents whose calls cannot be served: their SDK's own exception, a span that says why, and never a key."""

import logging

import anthropic
import openai
import pytest
from tests.support.provider import Reply, ScriptedProvider, chat_answer

from agentlightning import span as names
from agentlightning.attempt_address import attempt_key
from agentlightning.attempt_variables import attempt_environment
from agentlightning.gateway.config import GatewayConfig
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.record import failure_of

HI = [{"role": "user", "content": "hi"}]
LONG = [{"role": "user", "content": "hi " * 200}]
STRANGER = "sk-marked-key-of-the-agents-own"


def test_the_error_of_a_failed_call_is_named_as_that_of_a_rejected_one():
    assert failure_of(ApiError(429, "later")) == ("rate_limit_error", "later")
    assert failure_of(ApiError(404, "gone", code="model_not_found")) == ("model_not_found", "gone")
    assert failure_of(RuntimeError("broken")) == ("RuntimeError", "broken")


class Bad:
    """What is wrong, by name: (asked of OpenAI's SDK, OpenAI's exception, Anthropic's, error.type of the span)."""

    model = {"model": "gpt-5"}, openai.NotFoundError, anthropic.NotFoundError, "model_not_found"
    context = {"messages": LONG}, openai.BadRequestError, anthropic.BadRequestError, "context_length_exceeded"
    size = {"messages": LONG * 20}, openai.APIStatusError, anthropic.RequestTooLargeError, "body_too_large"
    shape = {"messages": []}, openai.BadRequestError, anthropic.BadRequestError, "invalid_request_error"
    field = {"tools": "all of them"}, openai.BadRequestError, anthropic.BadRequestError, "invalid_request_error"


@pytest.fixture
async def small(serve):
    return await serve([], engine={"context_length": 300}, max_body_bytes=8000)


@pytest.mark.parametrize("bad", ["model", "context", "size", "shape", "field"])
async def test_a_bad_request_is_the_sdks_exception_and_its_span_says_why(bad, small):
    asked, for_openai, for_anthropic, kind = getattr(Bad, bad)
    asked = {"model": "scripted", "messages": HI} | asked
    with pytest.raises(for_openai) as caught:
        await (await small.client()).with_options(max_retries=2).chat.completions.create(**asked)
    with pytest.raises(for_anthropic):
        await (await small.anthropic()).with_options(max_retries=2).messages.create(max_tokens=9, **asked)
    spans = await small.spans()
    assert [(span.status_code, span.attributes[names.OPERATION_NAME]) for span in spans] == [("ERROR", "chat")] * 2
    expected = {"context_length_exceeded": "ContextLengthError"}.get(kind, kind)
    assert [span.attributes[names.ERROR_TYPE] for span in spans] == [expected] * 2
    assert spans[0].status_message in caught.value.message


async def test_invalid_json_is_recorded_as_a_rejected_call(small):
    http = await small.http()
    for path in ("chat/completions", "responses", "messages", "completions", "embeddings"):
        reply = await http.post(f"{small.base_url}/{path}", content=b'{"model": "scripted", "messages": [')
        assert reply.status_code == 400
        assert "not JSON" in reply.json()["error"]["message"]
    spans = await small.spans()
    assert [span.attributes[names.ERROR_TYPE] for span in spans] == ["invalid_json"] * 5
    assert len({span.span_id for span in spans}) == 5


async def test_a_missing_or_ended_attempt_is_an_error_without_retry(small, secret):
    ids = small.rollout_id, small.attempt_id

    async def refused(rollout_id, attempt_id):
        there = attempt_environment(small.server.url, secret, rollout_id, attempt_id)
        key = attempt_key(secret, rollout_id, attempt_id)
        client = (await small.client(base_url=there["OPENAI_BASE_URL"], api_key=key)).with_options(max_retries=2)
        other = await small.anthropic(base_url=there["ANTHROPIC_BASE_URL"], api_key=key)
        with pytest.raises(openai.APIStatusError) as first:
            await client.chat.completions.create(model="scripted", messages=HI)
        with pytest.raises(anthropic.APIStatusError) as second:
            await other.messages.create(model="scripted", max_tokens=9, messages=HI)
        return type(first.value), type(second.value), first.value.code

    unknown = openai.NotFoundError, anthropic.NotFoundError
    ended = openai.ConflictError, anthropic.ConflictError
    assert await refused("ro-nobody", ids[1]) == (*unknown, "rollout_not_found")
    assert await refused(ids[0], "at-nobody") == (*unknown, "attempt_not_found")
    await small.store.update_attempt(*ids, status="succeeded")
    requests = small.gateway.counters.requests
    assert await refused(*ids) == (*ended, "attempt_ended")
    assert small.gateway.counters.requests == requests + 2


async def test_a_wrong_key_is_an_authentication_error_and_is_shown_nowhere(small, caplog, secret):
    caplog.set_level(logging.DEBUG, "agentlightning")
    bad = attempt_key("another secret", small.rollout_id, small.attempt_id)
    for key, url in ((bad, small.base_url), (bad, f"{small.server.url}/v1"), (STRANGER, f"{small.server.url}/v1")):
        with pytest.raises(openai.AuthenticationError) as caught:
            await (await small.client(api_key=key, base_url=url)).chat.completions.create(model="scripted", messages=HI)
        client = await small.anthropic(api_key=key, base_url=url.removesuffix("/v1"))
        with pytest.raises(anthropic.AuthenticationError) as other:
            await client.messages.create(model="scripted", max_tokens=9, messages=HI)
        assert key not in caplog.text + str(caught.value) + str(other.value)
    assert await small.spans() == []


async def test_the_agents_own_key_is_never_forwarded_or_recorded(serve, caplog):
    caplog.set_level(logging.DEBUG, "agentlightning")
    async with ScriptedProvider(lambda seen: Reply(chat_answer("Hello."))) as provider:
        them = {"name": "them", "base_urls": [f"{provider.url}/v1"], "api_key": "sk-ours-0123456789"}
        rule = {"model": "theirs", "provider": "them"}
        service = await serve([], config=GatewayConfig.model_validate({"providers": [them], "routes": [rule]}))
        client = await service.client(api_key=STRANGER)
        await client.chat.completions.create(model="theirs", messages=HI, extra_headers={"x-api-key": STRANGER})
        other = await service.anthropic(api_key=STRANGER)
        await other.messages.create(model="theirs", max_tokens=9, messages=HI)
        spans = await service.spans()
        assert [span.status_code for span in spans] == ["OK", "OK"]
        seen = repr([(each.headers, each.body) for each in provider.seen])
        assert STRANGER not in seen + repr(spans) + caplog.text
        assert seen.count("sk-ours-0123456789") == 2
