"""Promises of `/v1/models`: what a provider serves is listed beside our own, as the caller's SDK wants to be told."""

import asyncio

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.provider import Reply, ScriptedProvider

from agentlightning.attempt_address import attempt_key, attempt_secret
from agentlightning.cli.options import has_model
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.config import GatewayConfig, Provider
from agentlightning.gateway.routing import CACHE_SECONDS, RETRY_SECONDS, UpstreamModels, describe_model
from agentlightning.gateway.routing import read_models as read
from agentlightning.gateway.upstream.call import ServerPool
from agentlightning.server.app import Server
from agentlightning.transport import Transport

GPTS = [
    {"id": "gpt-5", "object": "model", "created": 1700000000, "owned_by": "openai", "context_length": 400000},
    {"id": "scripted", "object": "model", "created": 1, "owned_by": "openai"},
    {"id": "o3", "object": "model", "created": 2, "owned_by": "system"},
]
CLAUDES = [
    {"type": "model", "id": f"claude-{n}", "display_name": f"Claude {n}", "created_at": "2025-02-19T00:00:00Z"}
    for n in range(3)
]


def lists(models):
    return lambda seen: Reply({"object": "list", "data": models})


def pages(seen):
    """Two at a time."""
    after = seen.path.partition("after_id=")[2]
    first = next((number + 1 for number, model in enumerate(CLAUDES) if model["id"] == after), 0)
    return Reply({"data": CLAUDES[first : first + 2], "has_more": first + 2 < len(CLAUDES)})


def both(gpt, claude, **options):
    providers = [
        {"name": "gpt", "base_urls": [f"{gpt.url}/v1"], "api_key": "sk-one"},
        {"name": "claude", "dialect": "anthropic", "base_urls": [claude.url], "api_key": "sk-two"},
    ]
    rules = [{"model": "claude*", "provider": "claude"}, {"provider": "gpt"}]
    return GatewayConfig.model_validate({"providers": providers, "routes": rules, **options})


async def test_what_providers_serve_is_listed_after_our_own_in_the_callers_own_shape(serve):
    asked = []
    async with ScriptedProvider([]) as gpt, ScriptedProvider([]) as claude:
        gpt.models = lambda seen: (asked.append(seen), Reply({"object": "list", "data": GPTS}))[1]
        claude.models = lambda seen: (asked.append(seen), pages(seen))[1]
        service = await serve([], config=both(gpt, claude))
        ours, theirs = await service.client(), await service.anthropic()
        names = [model.id async for model in ours.models.list()]
        listed = [(model.id, model.display_name) async for model in theirs.models.list(limit=2)]
        shown, described = await ours.models.retrieve("gpt-5"), await theirs.models.retrieve("claude-2")
    assert names == ["scripted", "claude-0", "claude-1", "claude-2", "gpt-5", "o3"]
    assert [name for name, _ in listed] == names
    assert listed[1] == ("claude-0", "Claude 0")
    assert (shown.owned_by, shown.created, shown.context_length) == ("openai", 1700000000, 400000)
    assert described.created_at.year == 2025
    assert [seen.path for seen in asked].count("/v1/models") == 1, "each is asked once for all of this"
    assert {seen.headers.get("authorization") or seen.headers.get("x-api-key") for seen in asked} == {
        *("Bearer sk-one", "sk-two")
    }


async def test_only_what_a_rule_leads_to_is_listed(serve):
    config = {
        "providers": [{"name": "gpt", "base_urls": ["http://127.0.0.1:1/v1"]}],
        "routes": [
            {"model": "gpt-*", "provider": "gpt", "dialect": "openai"},
            {"model": "o*", "provider": "gpt", "send_model": "other"},
            {"model": "fixed", "provider": "gpt", "dialect": "anthropic"},
        ],
    }
    async with ScriptedProvider([]) as gpt:
        gpt.models = lists(GPTS)
        config["providers"][0]["base_urls"] = [f"{gpt.url}/v1"]
        service = await serve([], config=GatewayConfig.model_validate(config))
        assert [model.id async for model in (await service.client()).models.list()] == ["scripted", "gpt-5"]
        assert [model.id async for model in (await service.anthropic()).models.list()] == ["scripted", "fixed"]


@pytest.mark.parametrize("answer", [Reply(status=500), Reply(b"<html>"), Reply({"data": [{}, 1]}, end="close")])
async def test_a_provider_that_does_not_say_costs_nothing_but_its_names(serve, answer):
    async with ScriptedProvider([]) as gpt, ScriptedProvider([]) as claude:
        gpt.models, claude.models = lambda seen: answer, pages
        service = await serve([], config=both(gpt, claude))
        client = await service.client()
        assert [model.id async for model in client.models.list()] == ["scripted", "claude-0", "claude-1", "claude-2"]
        assert (await client.models.retrieve("an-alias")).id == "an-alias"


async def test_a_list_is_asked_for_once_by_all_and_kept_where_it_cannot_be_had_again():
    now, answers, asked = [0.0], [Reply({"data": GPTS})], []

    def answer(seen):
        asked.append(seen)
        return answers[0]

    async with ScriptedProvider([]) as them:
        them.models = answer
        transport = Transport()
        provider = Provider(name="them", base_urls=(f"{them.url}/v1",))
        listing = UpstreamModels(ServerPool(provider, lambda: transport), lambda: now[0])
        assert await asyncio.gather(*(listing.models() for _ in range(5))) == [GPTS] * 5
        now[0], answers[0] = CACHE_SECONDS - 1, Reply(status=503)
        assert (await listing.models(), len(asked)) == (GPTS, 1)
        now[0] = CACHE_SECONDS
        assert (await listing.models(), len(asked)) == (GPTS, 2)
        assert (await listing.models(), len(asked)) == (GPTS, 2)
        now[0], answers[0] = CACHE_SECONDS + RETRY_SECONDS, Reply({"data": GPTS[:1]})
        assert (await listing.models(), len(asked)) == (GPTS[:1], 3)
        await transport.close()


async def test_a_runner_knows_that_a_server_answers_though_its_provider_names_no_models(store):
    away = {"providers": [{"name": "x", "base_urls": ["http://127.0.0.1:1/v1"]}], "routes": [{"provider": "x"}]}
    for config, expected in ((away, True), ({}, False)):
        gateway = Gateway(store, {}, secret="s", config=GatewayConfig.model_validate(config))
        async with Server(store, gateway, secret="s") as server:
            assert await has_model(server.url, None) is expected


VALUE = st.none() | st.integers(-(2**60), 2**60) | st.sampled_from(["", "2025-01-01T00:00:00Z", "x"]) | st.just([1])
MODEL = VALUE | st.dictionaries(st.sampled_from(["id", "created", "created_at", "display_name", "type"]), VALUE)


@settings(max_examples=20)
@given(VALUE | st.lists(MODEL, max_size=2) | st.fixed_dictionaries({"data": VALUE | st.lists(MODEL, max_size=2)}))
def test_whatever_a_provider_says_of_its_models_is_shown_or_left_out(page):
    for model in read(page):
        shown, told = describe_model(model, "openai"), describe_model(model, "anthropic")
        assert (shown["object"], told["type"]) == ("model", "model")
        assert shown["id"] == told["id"] == model["id"]
        assert shown.keys() >= {"created", "owned_by"}
        assert told.keys() >= {"created_at", "display_name"}


async def test_where_keys_are_asked_for_models_are_listed_for_those_who_have_one(store):
    token, asked = "the-token", []
    secret = attempt_secret(token)
    async with ScriptedProvider([]) as gpt, ScriptedProvider([]) as claude:
        gpt.models = lambda seen: (asked.append(seen), Reply({"object": "list", "data": GPTS}))[1]
        gateway = Gateway(store, {}, secret=secret, config=both(gpt, claude), require_key=True)
        async with Server(store, gateway, secret=secret, token=token) as server, httpx.AsyncClient() as client:
            for key in ("", "sk-other", attempt_key("other", "ro", "at")):
                for path in ("/v1/models", "/v1/models/gpt-5"):
                    headers = {"authorization": f"Bearer {key}"} if key else {}
                    assert (await client.get(server.url + path, headers=headers)).status_code == 401
            assert not asked
            for key in (token, attempt_key(secret, "ro", "at")):
                reply = await client.get(f"{server.url}/v1/models", headers={"authorization": f"Bearer {key}"})
                assert "gpt-5" in [model["id"] for model in reply.json()["data"]]
            assert await has_model(server.url, token)
            assert not await has_model(server.url, None)
