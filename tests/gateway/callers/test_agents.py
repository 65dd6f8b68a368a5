"""Which agent speaks."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agentlightning import span as names
from agentlightning.errors import ConfigError
from agentlightning.gateway.callers import read_baggage
from agentlightning.gateway.config import AgentRule, GatewayConfig
from agentlightning.gateway.routing import AgentMatcher
from agentlightning.testing import ScriptedEngine

SYSTEM = "You are a writer of short poems. Today is Monday."
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
IN_EVERY_DIALECT = {
    "chat": {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hi"}], "tools": [TOOL]},
    "chat, developer": {
        "messages": [{"role": "developer", "content": [{"type": "text", "text": SYSTEM}]}],
        "tools": [TOOL],
    },
    "responses": {"instructions": SYSTEM, "input": "hi", "tools": [{"type": "function", "name": "look_up"}]},
    "responses, in its input": {
        "input": [{"role": "system", "content": [{"type": "input_text", "text": SYSTEM}]}],
        "tools": [{"type": "function", "name": "look_up"}],
    },
    "messages": {"system": SYSTEM, "messages": [], "tools": [{"name": "look_up", "input_schema": {}}]},
    "messages, in blocks": {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.abc"},
            {"type": "text", "text": SYSTEM},
        ],
        "tools": [{"name": "look_up", "input_schema": {}}],
    },
}


@pytest.mark.parametrize("dialect", IN_EVERY_DIALECT)
def test_an_agent_is_known_by_its_system_prompt_in_every_dialect(dialect):
    agents = AgentMatcher(
        [AgentRule(name="critic", contains="a critic"), AgentRule(name="writer", contains="a writer")]
    )
    assert agents.identify({}, IN_EVERY_DIALECT[dialect]).name == "writer"


def test_an_agent_nobody_named_has_the_same_key_in_every_dialect():
    keys = {AgentMatcher().identify({}, asked).key for asked in IN_EVERY_DIALECT.values()}
    assert len(keys) == 1
    assert keys != {None}


def test_unnamed_agents_are_distinguished_by_their_prompts_and_tools():
    first = {"messages": [{"role": "system", "content": "You plan."}, {"role": "user", "content": "a"}]}
    later = {"messages": [*first["messages"], {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]}
    other = {"messages": [{"role": "system", "content": "You write."}]}
    keys = [AgentMatcher().identify({}, asked).key for asked in (first, later, other, first | {"tools": [TOOL]})]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
    assert AgentMatcher().identify({}, {"messages": [{"role": "user", "content": "a"}]}).key is None


def test_the_order_in_which_a_client_lists_its_tools_means_nothing():
    tools = [{"name": "b"}, {"name": "a"}, {"type": "web_search"}]
    assert len({AgentMatcher().identify({}, {"tools": given}).key for given in (tools, tools[::-1])}) == 1


def test_the_header_is_believed_first_then_baggage_then_the_model_name_then_the_prompt():
    agents = AgentMatcher([AgentRule(name="by-prompt", contains="writer"), AgentRule(name="by-model", models=("w",))])
    header, baggage = {"x-agentlightning-agent": "by-header"}, {"baggage": "x=1, agentlightning.agent=by%20baggage;p"}
    asked = {"system": SYSTEM, "model": "w"}
    known = agents.identify(header | baggage, asked)
    assert known.name == "by-header"
    assert known.ignored == ("agent 'by baggage' of the baggage", "agent 'by-model' of the model name")
    assert agents.identify(baggage, asked).name == "by baggage"
    assert agents.identify({}, asked).name == "by-model"
    assert agents.identify({}, {"system": SYSTEM}).name == "by-prompt"
    assert agents.identify({}, {"system": "You count."}).name is None


def test_a_model_name_may_start_with_an_agent():
    served, agents = {"policy", "gemini@002"}, AgentMatcher()
    assert agents.alias("writer@policy", served) == ("writer", "policy")
    assert agents.alias("writer@", served) == ("writer", None)
    assert agents.alias("a@b@policy", served) == ("a@b", "policy")
    assert agents.alias("gemini@002", served) == (None, "gemini@002")
    assert agents.alias("claude@20240620", served) == (None, "claude@20240620")
    assert agents.alias("@policy", served) == (None, "@policy")
    assert agents.alias(None, served) == (None, None)


def test_a_configured_model_name_means_an_agent_and_the_model_that_serves_it():
    agents = AgentMatcher(
        [AgentRule(name="writer", models=("gpt-w",), serve="policy"), AgentRule(name="judge", models=("j",))]
    )
    assert agents.alias("gpt-w") == ("writer", "policy")
    assert agents.alias("j") == ("judge", None)
    assert agents.alias("j", {"j"}) == ("judge", "j")


def test_a_pattern_can_take_the_name_from_the_prompt():
    agents = AgentMatcher([AgentRule(matches=r'Your internal name is "(?P<agent>[^"]+)"')])
    assert agents.identify({}, {"system": 'Help.\nYour internal name is "root".'}).name == "root"
    assert agents.identify({}, {"system": "Help."}).name is None


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"name": "a"}, "nothing identifies the calls"),
        ({"contains": "x"}, "without a name"),
        ({"matches": "(x)"}, r"\(\?P<agent>"),
        ({"name": "a", "matches": "("}, "not a regular expression"),
        ({"name": "a", "contains": "x", "serve": "p"}, "no models"),
        ({"name": "a", "colour": "x"}, "Extra inputs"),
    ],
)
def test_a_rule_that_cannot_work_says_why(rule, message):
    with pytest.raises(ValidationError, match=message):
        AgentRule(**rule)


def test_a_model_name_cannot_mean_two_agents():
    with pytest.raises(ConfigError, match="'m' belongs to two agents"):
        AgentMatcher([AgentRule(name="a", models=("m",)), AgentRule(name="b", models=("m",))])


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["role", "content", "text", "name"]), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=60)
@given(
    st.dictionaries(st.sampled_from(["model", "system", "instructions", "messages", "input", "tools"]), ANYTHING),
    st.text(max_size=40),
)
@example({"messages": [{"role": []}]}, "")
def test_every_request_can_be_examined(asked, header):
    agents = AgentMatcher([AgentRule(name="a", contains="b", matches="c")])
    agents.identify({"baggage": header, "x-agentlightning-agent": header}, asked)


def test_baggage_is_read_as_it_is_specified():
    assert read_baggage("a=1,b = two%2C%20three ; property=4,, =5,c=,d") == {"a": "1", "b": "two, three"}


def test_who_speaks_is_found_out_anew_where_anything_that_says_so_differs():
    agents = AgentMatcher([AgentRule(name="poet", contains="verse")])
    system = {"role": "system", "content": "Write verse."}
    asked = {"model": "m", "messages": [system]}
    seen = [
        agents.identify(headers, body, served)
        for headers, body, served in [
            ({}, asked, ()),
            ({}, asked, ()),
            ({"x-agentlightning-agent": "critic"}, asked, ()),
            ({"baggage": "agentlightning.agent=editor"}, asked, ()),
            ({}, asked | {"model": "writer@m"}, ("m",)),
            ({}, asked | {"model": "writer@m"}, ("m", "writer@m")),
            ({}, asked | {"tools": [{"type": "function", "function": {"name": "add"}}]}, ()),
            ({}, asked | {"messages": [system | {"content": "Write prose."}]}, ()),
        ]
    ]
    assert [(agent.name, agent.model) for agent in seen] == [
        *(("poet", "m"), ("poet", "m"), ("critic", "m")),
        ("editor", "m"),
        *(("writer", "m"), ("poet", "writer@m"), ("poet", "m"), (None, "m")),
    ]
    assert len({agent.key for agent in seen}) == 3


NAMED_BEFORE_ITS_MODEL = {
    "an alias before its run has joined": ("writer@policy", "policy", "writer"),
    "an alias that joins as a model of its own": ("writer@scripted", "writer@scripted", None),
    "a rule for a model that joins": ("fast", "fast", "quick"),
    "an alias whose agent has an @": ("a@b@policy", "policy", "a@b"),
}


@pytest.mark.parametrize("case", NAMED_BEFORE_ITS_MODEL)
async def test_a_model_name_means_what_the_models_of_the_moment_make_of_it(serve, case):
    """Runs join and leave: what a name meant at its first call holds for that call alone."""
    name, model, agent = NAMED_BEFORE_ITS_MODEL[case]
    service = await serve(
        ["before", "after"], config=GatewayConfig(agents=(AgentRule(name="quick", models=("fast",)),))
    )
    client, body = await service.http(), {"model": name, "messages": [{"role": "system", "content": SYSTEM}]}
    headers, gateway = {"authorization": f"Bearer {service.key}"}, service.gateway

    async def call():
        reply = await client.post(f"{service.base_url}/chat/completions", json=body, headers=headers)
        span = (await service.spans())[-1].attributes
        return reply.status_code, span.get(names.RESPONSE_MODEL), span.get(names.AGENT_NAME)

    before = await call()
    gateway.add_policy(model, ScriptedEngine(["joined"] * 2, model=model), GatewayConfig())
    for _ in range(2):
        assert await call() == (200, model, agent)
    gateway.remove_policy(model)
    assert await call() == before
