"""Promises of `/v1/messages/count_tokens`: there is a number whoever the provider is, and it says how it was found."""

import anthropic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.provider import Reply, ScriptedProvider

from agentlightning.gateway.config import GatewayConfig
from agentlightning.gateway.upstream.limits import estimate_prompt_tokens

HI = [{"role": "user", "content": "How many files are there?"}]
TOOL = {"name": "ls", "description": "Lists files.", "input_schema": {"type": "object", "properties": {}}}


def routed(them, **options):
    provider = {"name": "them", "base_urls": [f"{them.url}/v1"], **options}
    return GatewayConfig.model_validate({"providers": [provider], "routes": [{"provider": "them", "send_model": "m"}]})


async def count(service, **asked):
    """(tokens, how they were counted)."""
    client = await service.anthropic()
    raw = await client.messages.with_raw_response.count_tokens(**{"model": "x", "messages": HI} | asked)
    return (await raw.parse()).input_tokens, raw.headers.get("x-agentlightning-count")


async def test_a_server_with_a_tokenizer_counts_what_it_would_be_asked(serve):
    async with ScriptedProvider(lambda seen: Reply({"count": 31, "tokens": [1] * 31})) as them:
        service = await serve([], config=routed(them, price={"input": 9.0}))
        assert await count(service, system="Be short.", tools=[TOOL]) == (31, "tokenizer")
        assert await count(service) == (31, "tokenizer")
    assert [seen.path for seen in them.seen] == ["/tokenize"] * 2
    asked = them.seen[0].json
    assert (asked["model"], asked["messages"]) == ("m", [{"role": "system", "content": "Be short."}, *HI])
    assert asked["tools"][0]["function"]["name"] == "ls"
    assert (await service.spans(), service.gateway.metrics()["provider_dollars"]) == ([], 0)


@pytest.mark.parametrize("answer", [Reply(status=404), Reply(b"<html>"), Reply(head=False, end="close")])
async def test_one_without_is_asked_once_and_the_number_says_that_it_is_an_estimate(serve, answer):
    async with ScriptedProvider(lambda seen: answer) as them:
        service = await serve([], config=routed(them))
        tokens, how = await count(service)
        assert (await count(service), how) == ((tokens, how), "estimate")
        longer, _ = await count(service, messages=HI * 2)
        assert len(them.seen) == 1
    assert 5 <= tokens <= 15
    assert longer in (tokens * 2 - 1, tokens * 2)


async def test_a_server_that_serves_only_responses_is_estimated_like_any_other(serve):
    said = [*HI, {"role": "assistant", "content": "Three. " * 50}, {"role": "user", "content": "Which?"}]
    counts = []
    for paths in (["chat/completions"], ["responses"]):
        async with ScriptedProvider(lambda seen: Reply(status=404)) as them:
            service = await serve([], config=routed(them, paths=paths))
            counts.append(await count(service, messages=said, system="Be short. " * 30, tools=[TOOL]))
    (chat, _), (responses, how) = counts
    assert how == "estimate"
    assert chat * 0.8 <= responses <= chat * 1.2


async def test_a_request_the_tokenizer_refuses_says_nothing_of_the_next(serve):
    answers = [Reply({"error": "no tools"}, status=400), Reply({"count": 3})]
    async with ScriptedProvider(answers) as them:
        service = await serve([], config=routed(them))
        assert (await count(service))[1] == "estimate"
        assert await count(service) == (3, "tokenizer")


async def test_a_server_of_anthropics_dialect_that_does_not_count_is_no_reason_to_fail(serve):
    answers = [
        Reply({"detail": "Not Found"}, status=404),
        Reply({"type": "error", "error": {"type": "not_found_error", "message": "model: m"}}, status=404),
        Reply({"input_tokens": 8}),
    ]
    async with ScriptedProvider(answers) as them:
        service = await serve([], config=routed(them, dialect="anthropic"))
        assert (await count(service))[1] == "estimate"
        with pytest.raises(anthropic.NotFoundError, match="model: m"):
            await count(service)
        assert await count(service) == (8, None)


@settings(max_examples=30)
@given(st.text(max_size=200), st.text(max_size=200))
def test_an_estimate_grows_with_the_text_and_never_loses_any(one, other):
    def said(text):
        return estimate_prompt_tokens({"messages": [{"role": "user", "content": text}]})

    assert said(one) <= said(one + other) <= said(one) + said(other)
    assert said(one) >= len(one.encode()) / 4
    by_bytes = {1: 1 / 3.5, 2: 0.6, 3: 1.15, 4: 2.0}
    assert abs(said(one) - 4 - sum(by_bytes[len(each.encode())] for each in one)) <= 1


def test_both_dialects_and_all_kinds_of_content_are_estimated():
    words = "word " * 700
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 900_000}}
    paper = {"type": "document", "source": {"type": "base64", "data": "A" * 20_000}}
    call = {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {"path": words}}
    cases = [
        ({"system": words, "messages": []}, 1000),
        ({"system": [{"type": "text", "text": words}], "messages": []}, 1000),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": words}, picture]}]}, 2600),
        ({"messages": [{"role": "assistant", "content": [call]}]}, 1000),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": words}, paper]}]}, 2000),
        ({"messages": [], "tools": [TOOL | {"description": words}]}, 1000),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": words}}]}]}, 1000),
        ({"messages": [{"role": "user", "content": "漢字" * 500}]}, 1150),
    ]
    for asked, expected in cases:
        assert expected <= estimate_prompt_tokens(asked) < expected + 60, asked.keys()
