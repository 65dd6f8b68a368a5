"""Promises of the routing table."""

import json

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.provider import Reply, ScriptedProvider, chat_answer
from tests.support.provider_streams import messages_answer

from agentlightning.engine.base import AdapterTable, AdapterView, AgentEngines
from agentlightning.errors import ConfigError
from agentlightning.gateway.config import GatewayConfig, Price, Provider, RouteRule
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.local import UpdateGates
from agentlightning.gateway.routing import AgentMatcher, Router
from agentlightning.gateway.upstream.call import ServerPool
from agentlightning.testing import ScriptedEngine
from agentlightning.transport import Transport
from agentlightning.util.settings import load_settings

ENGINES = {name: ScriptedEngine([], model=name) for name in ("policy", "reference")}


def providers(**options):
    them = Provider(name="them", base_urls=("http://host/v1",), **options)
    return {"them": ServerPool(them, Transport)}


def table(*rules, engines=ENGINES, them=None, **options):
    return Router(
        engines, [RouteRule.model_validate(rule) for rule in rules], them or providers(), AgentMatcher(), **options
    )


def test_the_first_rule_that_fits_decides_and_engines_come_after_all_rules():
    routes = table(
        {"agent": "critic", "engine": "reference"},
        {"model": "gpt-4o", "provider": "them", "send_model": "gpt-4o-2024"},
        {"model": "gpt-*", "provider": "them"},
        {"model": "policy", "agent": "judge-?", "provider": "them", "send_model": "big"},
    )
    assert routes.resolve("policy", "critic").engine is ENGINES["reference"]
    assert routes.resolve("policy", "writer").engine is ENGINES["policy"]
    assert routes.resolve("policy").engine is ENGINES["policy"]
    exact, pattern = routes.resolve("gpt-4o"), routes.resolve("gpt-5")
    assert (exact.name, exact.send_model, exact.servers.provider.name) == ("gpt-4o", "gpt-4o-2024", "them")
    assert (pattern.name, pattern.send_model) == ("gpt-5", "gpt-5")
    assert routes.resolve("policy", "judge-1").send_model == "big"
    assert routes.models == ("policy", "reference", "gpt-4o")


def test_a_judge_reaches_other_models_of_a_training_run_and_not_its_policy():
    from agentlightning.gateway.callers import Caller

    routes = table(default_model="policy", accept_any_model=True)
    judge, body = {"x-agentlightning-judge": "at-1"}, {"model": "gpt-5", "messages": []}
    assert routes.resolve_call("chat/completions", {}, Caller(), body).route.name == "policy"
    assert (
        routes.resolve_call("chat/completions", judge, Caller(), {**body, "model": "reference"}).route.name
        == "reference"
    )
    with pytest.raises(ApiError, match="asked the policy that is being trained") as caught:
        routes.resolve_call("chat/completions", judge, Caller(), body)
    assert (caught.value.status, caught.value.code) == (409, "judge_as_agent")


def test_the_default_serves_calls_without_a_name_and_strangers_only_if_it_is_told_to():
    one = {"policy": ENGINES["policy"]}
    assert table(engines=one).resolve(None).name == "policy"
    with pytest.raises(ApiError, match="known: policy") as caught:
        table(engines=one).resolve("gpt-5")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert table(engines=one, accept_any_model=True).resolve("gpt-5").name == "policy"
    with pytest.raises(ApiError, match="names no model"):
        table().resolve(None)
    led = table({"model": "gpt-*", "provider": "them"}, default_model="gpt-5")
    assert (led.resolve(None).name, led.resolve(None).send_model) == ("gpt-5", "gpt-5")


def test_a_rule_may_be_for_callers_of_one_dialect():
    both = {name: ServerPool(Provider(name=name, base_urls=("http://host/v1",)), Transport) for name in ("a", "o")}
    routes = table(
        {"model": "claude-*", "dialect": "anthropic", "provider": "a"},
        {"model": "claude-*", "provider": "o"},
        {"model": "only-messages", "dialect": "anthropic", "engine": "policy"},
        {"model": "reference", "dialect": "openai", "provider": "o"},
        them=both,
    )
    assert routes.resolve("claude-x", path="messages").servers.provider.name == "a"
    for path in ("chat/completions", "responses", "completions", "embeddings"):
        assert routes.resolve("claude-x", path=path).servers.provider.name == "o"
    assert routes.resolve("claude-x", path="messages").servers.provider.name == "a"
    assert routes.resolve("reference", path="messages").engine is ENGINES["reference"]
    assert routes.resolve("only-messages", path="messages").engine is ENGINES["policy"]
    with pytest.raises(ApiError, match="'only-messages' is not served here to callers of this dialect"):
        routes.resolve("only-messages", path="responses")
    assert routes.names("openai") == ["policy", "reference"]
    assert routes.names("anthropic") == ["policy", "reference", "only-messages"]


async def test_one_model_name_goes_to_the_provider_that_speaks_as_its_caller_does(serve):
    def counted(seen):
        return (
            Reply({"input_tokens": 7})
            if seen.path.endswith("count_tokens")
            else Reply(messages_answer([{"type": "text", "text": "Salut."}]))
        )

    async with ScriptedProvider(counted) as native, ScriptedProvider([Reply(chat_answer("Hello."))]) as other:
        config = {
            "providers": [
                {"name": "native", "dialect": "anthropic", "base_urls": [native.url]},
                {"name": "other", "base_urls": [f"{other.url}/v1"]},
            ],
            "routes": [{"dialect": "anthropic", "provider": "native"}, {"provider": "other"}],
        }
        service = await serve([], config=GatewayConfig.model_validate(config))
        asked = {"model": "claude-x", "messages": [{"role": "user", "content": "hi"}]}
        said = await (await service.anthropic()).messages.create(**asked, max_tokens=9)
        count = await (await service.anthropic()).messages.count_tokens(**asked)
        heard = await (await service.client()).chat.completions.create(**asked)
    assert (said.content[0].text, count.input_tokens) == ("Salut.", 7)
    assert heard.choices[0].message.content == "Hello."
    assert (len(native.seen), len(other.seen)) == (2, 1)


def test_a_price_of_the_rule_wins_over_the_providers():
    them = providers(price=Price(input=1))
    routes = table(
        {"model": "a", "provider": "them", "price": {"input": 2}}, {"model": "b", "provider": "them"}, them=them
    )
    assert (routes.resolve("a").price.input, routes.resolve("b").price.input) == (2, 1)


def test_a_provider_that_says_its_model_is_asked_for_that_one():
    routes = table({"provider": "them"}, them=providers(model="their-name"), default_model="policy")
    assert (routes.resolve("mine").name, routes.resolve("mine").send_model) == ("mine", "their-name")
    assert routes.resolve(None).name == "their-name"


@settings(max_examples=25)
@given(st.text(max_size=20), st.none() | st.text(max_size=20))
def test_whatever_is_asked_for_is_served_or_refused(model, agent):
    routes = table({"model": "[a-f]*", "agent": "*x*", "provider": "them"}, default_model="policy")
    try:
        assert routes.resolve(model, agent).name
    except ApiError as api_error:
        assert api_error.status == 404  # noqa: PT017  some names fit


@pytest.mark.parametrize(
    ("rules", "options", "said"),
    [
        (
            [{"engine": "nobody"}],
            {},
            "rule 1 .* leads to the engine 'nobody', which is not here; known: policy, reference",
        ),
        ([], {"default_model": "nobody"}, "default_model='nobody' is not served; use one of policy, reference"),
        ([], {"accept_any_model": True}, "needs a default_model"),
    ],
)
def test_a_rule_or_default_that_leads_nowhere_is_said_at_the_start(rules, options, said):
    with pytest.raises(ConfigError, match=said):
        table(*rules, **options)


# -- from a file ------------------------------------------------------------------------------------------------------

TOML = """
default_model = "gpt-5"

[[providers]]
name = "them"
base_urls = ["http://host/v1/"]
api_key_env = "THEIR_KEY"
price = { input = 1.25, output = 10.0 }

[[routes]]
model = "gpt-*"
provider = "them"

[budget]
rollout_dollars = 0.5
"""


def test_a_file_in_toml_and_one_in_json_say_the_same(tmp_path):
    (tmp_path / "routes.toml").write_text(TOML)
    config = load_settings(GatewayConfig, toml=tmp_path / "routes.toml")
    assert config.providers[0].base_urls == ("http://host/v1",)
    assert (config.providers[0].price.output, config.budget.rollout_dollars) == (10, 0.5)
    (tmp_path / "routes.json").write_text(config.model_dump_json())
    assert load_settings(GatewayConfig, toml=tmp_path / "routes.json") == config


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (
            "[[providers]]\nname='a'\nbase_url='http://h'",
            r"unknown setting providers\.0\.base_url .*nearest known one is providers\.0\.base_urls",
        ),
        ("[[providers]]\nname='a'\nbase_urls=['host']", r"providers\.0\.base_urls .*'host' is no URL"),
        ("[[routes]]\nmodel='a'", r"routes\.0 .*names an engine or a provider"),
        ("[[routes]]\nprovider='b'", "routes.0 leads to the provider 'b'; known: none"),
        (
            "[[providers]]\nname='a'\nbase_urls=['http://h']\n[[providers]]\nname='a'\nbase_urls=['http://h']",
            "two providers",
        ),
        ("[budget]\ndollars=-1", r"budget\.dollars = -1"),
        ("budgets=1", "unknown setting budgets"),
    ],
)
def test_a_mistake_in_the_file_names_its_place(written, said, tmp_path):
    (tmp_path / "routes.toml").write_text(written)
    with pytest.raises(ConfigError, match=said):
        load_settings(GatewayConfig, toml=tmp_path / "routes.toml")


# -- over HTTP --------------------------------------------------------------------------------------------------------


async def test_models_and_agents_go_where_the_table_says(serve):
    async with ScriptedProvider(lambda seen: Reply(chat_answer(f"{seen.json['model']} says hi."))) as provider:
        config = GatewayConfig.model_validate(
            {
                "providers": [{"name": "them", "base_urls": [f"{provider.url}/v1"]}],
                "routes": [
                    {"model": "scripted", "agent": "critic", "provider": "them", "send_model": "judge"},
                    {"model": "big", "provider": "them"},
                ],
            }
        )
        service = await serve(["Ours."], config=config)
        client = await service.client()
        assert [model.id async for model in await client.models.list()] == ["scripted", "big"]

        async def said(model, **headers):
            messages = [{"role": "user", "content": "hi"}]
            reply = await client.chat.completions.create(model=model, messages=messages, extra_headers=headers)
            return reply.choices[0].message.content

        assert await said("big") == "big says hi."
        assert await said("scripted", **{"x-agentlightning-agent": "critic"}) == "judge says hi."
        assert await said("scripted") == "Ours."
        with pytest.raises(openai.NotFoundError, match="known: scripted, big"):
            await said("small")
        assert json.loads(provider.seen[0].body)["model"] == "big"


class EngineOfAgents(AgentEngines, ScriptedEngine):
    """Answers the writer with an adapter."""

    table = AdapterTable(views={"policy:writer": "writer"}, agents={"writer": "policy:writer"})

    def __init__(self):
        super().__init__(lambda messages: "own", model="policy")


def test_an_agent_is_answered_by_its_own_adapter_whatever_name_it_asks_for():
    engine = EngineOfAgents()
    routes = table({"model": "gpt-4o", "provider": "them"}, engines={"policy": engine}, accept_any_model=True)
    writer = routes.resolve("policy", "writer")
    assert (writer.name, writer.engine) == ("policy:writer", engine.views["policy:writer"])
    assert routes.resolve("any-model", "writer").engine is writer.engine
    assert routes.resolve("policy:writer").engine is writer.engine, "also by the name of the adapter"
    assert routes.resolve("policy", "editor").engine is engine
    assert routes.resolve("gpt-4o", "writer").servers.provider.name == "them", "routes to elsewhere hold for it too"
    assert routes.models == ("policy", "policy:writer", "gpt-4o")
    led = table({"model": "helper", "engine": "policy"}, engines={"policy": engine})
    assert led.resolve("helper", "writer").engine is writer.engine
    with pytest.raises(ConfigError, match="two engines are called 'policy:writer'"):
        table(engines={"policy": engine, "policy:writer": ScriptedEngine([], model="policy:writer")})


def test_adapters_of_an_engine_share_its_gate():
    engine, gates = EngineOfAgents(), UpdateGates()
    assert gates.of(AdapterView(engine, "policy:writer", "writer")) is gates.of(engine)
    assert gates.of(ENGINES["reference"]) is not gates.of(engine)
