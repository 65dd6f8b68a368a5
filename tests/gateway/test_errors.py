"""What goes wrong is named by what went wrong: the request, the engine, or the gateway itself."""

import logging

import pytest

from agentlightning.errors import PolicyError
from agentlightning.gateway.errors import to_api_error


async def refused(service, caplog, more=""):
    http = await service.http()
    body = '{"model": "scripted", "messages": [{"role": "user", "content": "hi"}]' + more + "}"
    with caplog.at_level(logging.CRITICAL):
        reply = await http.post(f"{service.base_url}/chat/completions", content=body)
    return reply.status_code, reply.json()["error"]


@pytest.mark.parametrize("depth", [300, 900])
async def test_a_request_that_is_nested_too_deeply_is_the_callers_error(serve, bpe_chat, caplog, depth):
    service = await serve([], engine={"chat": bpe_chat})
    nested = '{"a":' * depth + "1" + "}" * depth
    function = '{"name": "f", "parameters": ' + nested + "}"
    status, error = await refused(service, caplog, ', "tools": [{"type": "function", "function": ' + function + "}]")
    assert (status, error["code"]) == (400, "nested_too_deeply"), error
    assert "engine" not in error["message"]


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
async def test_a_request_that_is_nested_too_deeply_to_be_sent_on_is_the_callers_error(ask, dialect):
    service, provider = await ask(dialect, [])
    nested = '{"a":' * 300 + "1" + "}" * 300
    body = '{"model": "theirs", "messages": [{"role": "user", "content": "hi"}], "metadata": ' + nested + "}"
    reply = await (await service.http()).post(f"{service.base_url}/chat/completions", content=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "nested_too_deeply")
    assert not provider.seen


@pytest.mark.parametrize("failure", [PolicyError("the device is lost"), ValueError("the device is lost")])
async def test_what_an_engine_raises_is_the_engines_failure(serve, caplog, failure):
    service = await serve([failure])
    status, error = await refused(service, caplog)
    assert (status, error["code"]) == (500, "engine_error")
    assert "the device is lost" in error["message"]


def test_an_unknown_failure_is_the_gateways_own():
    api_error = to_api_error(KeyError("x"))
    assert (api_error.status, api_error.code) == (500, "internal_error")
    assert "engine" not in api_error.message
