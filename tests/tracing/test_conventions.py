"""Promises about what is read from other conventions. The examples are as the published conventions have them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning import span as names
from agentlightning.span import SpanEvent
from agentlightning.tracing import conventions
from agentlightning.tracing.conventions import complete


def read(attributes: dict[str, Any], *events: SpanEvent, name: str = "work") -> dict[str, Any]:
    """What is added; JSON is read for easier comparison. What was there is unchanged."""
    before = dict(attributes)
    complete(name, attributes, events)
    assert {key: attributes[key] for key in before} == before
    added = {key: value for key, value in attributes.items() if key not in before}
    return {key: json.loads(value) if key in conventions.STRUCTURED else value for key, value in added.items()}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "content": content}


CALL = {"type": "tool_call", "id": "call_1", "name": "calculator", "arguments": {"expression": "6*7"}}
ASKED = {"role": "user", "parts": [text("What is 6 x 7?")]}


# -- OpenTelemetry GenAI ---------------------------------------------------------------------------------------------


def test_the_current_convention_is_ours_and_nothing_is_added() -> None:
    messages = json.dumps([ASKED])
    assert (
        read({"gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai", names.INPUT_MESSAGES: messages}) == {}
    )
    assert read({"http.request.method": "POST"}) == {}


def test_older_names_of_opentelemetry() -> None:
    given = {
        "gen_ai.system": "openai",
        "gen_ai.usage.prompt_tokens": 11,
        "gen_ai.usage.completion_tokens": "5",
        "gen_ai.openai.request.seed": 7,
    }
    assert read(given) == {
        names.PROVIDER_NAME: "openai",
        names.INPUT_TOKENS: 11,
        names.OUTPUT_TOKENS: 5,
        names.REQUEST_SEED: 7,
    }


def test_what_is_there_already_stays() -> None:
    given = {
        "gen_ai.system": "old",
        "gen_ai.provider.name": "new",
        "gen_ai.usage.prompt_tokens": 1,
        names.INPUT_TOKENS: 2,
    }
    assert read(given) == {}


def test_messages_in_span_events() -> None:
    calls = json.dumps([{"id": "call_1", "function": {"name": "calculator", "arguments": '{"expression": "6*7"}'}}])
    message = json.dumps({"role": "assistant", "content": "42"})
    events = (
        SpanEvent("gen_ai.system.message", 1.0, {"gen_ai.system": "openai", "content": "Be brief."}),
        SpanEvent("gen_ai.user.message", 1.0, {"content": "What is 6 x 7?"}),
        SpanEvent("gen_ai.assistant.message", 1.0, {"role": "assistant", "tool_calls": calls}),
        SpanEvent("gen_ai.tool.message", 1.0, {"id": "call_1", "content": "42"}),
        SpanEvent("gen_ai.choice", 1.0, {"index": 0, "finish_reason": "stop", "message": message}),
        SpanEvent("something else", 1.0, {}),
    )
    assert read({}, *events) == {
        names.INPUT_MESSAGES: [
            {"role": "system", "parts": [text("Be brief.")]},
            ASKED,
            {"role": "assistant", "parts": [CALL]},
            {"role": "tool", "parts": [{"type": "tool_call_response", "id": "call_1", "response": "42"}]},
        ],
        names.OUTPUT_MESSAGES: [{"role": "assistant", "parts": [text("42")], "finish_reason": "stop"}],
    }


def test_messages_in_the_event_of_the_details() -> None:
    event = SpanEvent(conventions.DETAILS, 1.0, {names.INPUT_MESSAGES: [ASKED], "other": 1})
    assert read({}, event) == {names.INPUT_MESSAGES: [ASKED]}


def test_structured_messages_become_json_text() -> None:
    attributes: dict[str, Any] = {names.INPUT_MESSAGES: [ASKED]}
    complete("chat", attributes)
    assert json.loads(attributes[names.INPUT_MESSAGES]) == [ASKED]


# -- Traceloop -------------------------------------------------------------------------------------------------------


def test_traceloops_model_call() -> None:
    given = {
        "gen_ai.system": "OpenAI",
        "llm.request.type": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": json.dumps(
            [{"type": "text", "text": "What is 6 x 7?"}, {"type": "image_url", "image_url": {"url": "http://i"}}]
        ),
        "gen_ai.prompt.1.role": "assistant",
        "gen_ai.prompt.1.tool_calls.0.id": "call_1",
        "gen_ai.prompt.1.tool_calls.0.name": "calculator",
        "gen_ai.prompt.1.tool_calls.0.arguments": '{"expression": "6*7"}',
        "gen_ai.prompt.2.role": "tool",
        "gen_ai.prompt.2.content": "42",
        "gen_ai.prompt.2.tool_call_id": "call_1",
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.content": "It is 42.",
        "gen_ai.completion.0.finish_reason": "tool_calls",
        "llm.request.functions.0.name": "calculator",
        "llm.request.functions.0.description": "Calculates",
        "llm.request.functions.0.parameters": '{"type": "object"}',
    }
    image = {"type": "uri", "modality": "image", "uri": "http://i"}
    assert read(given) == {
        names.OPERATION_NAME: "chat",
        names.PROVIDER_NAME: "OpenAI",
        names.INPUT_MESSAGES: [
            {"role": "user", "parts": [text("What is 6 x 7?"), image]},
            {"role": "assistant", "parts": [CALL]},
            {"role": "tool", "parts": [{"type": "tool_call_response", "id": "call_1", "response": "42"}]},
        ],
        names.OUTPUT_MESSAGES: [{"role": "assistant", "parts": [text("It is 42.")], "finish_reason": "tool_call"}],
        names.TOOL_DEFINITIONS: [
            {"type": "function", "name": "calculator", "description": "Calculates", "parameters": {"type": "object"}}
        ],
    }


@pytest.mark.parametrize(
    ("kind", "operation", "names_it", "takes", "gives"),
    [
        ("workflow", "invoke_workflow", conventions.WORKFLOW_NAME, names.OPERATION_INPUT, names.OPERATION_OUTPUT),
        ("agent", "invoke_agent", names.AGENT_NAME, names.OPERATION_INPUT, names.OPERATION_OUTPUT),
        ("tool", "execute_tool", names.TOOL_NAME, names.TOOL_ARGUMENTS, names.TOOL_RESULT),
        ("task", None, names.OPERATION_LABEL, names.OPERATION_INPUT, names.OPERATION_OUTPUT),
    ],
)
@pytest.mark.parametrize("family", ["traceloop", "agentops"])
def test_steps_of_traceloop_and_agentops(
    family: str, kind: str, operation: str | None, names_it: str, takes: str, gives: str
) -> None:
    given = {
        f"{family}.span.kind": kind,
        f"{family}.entity.name": "plan",
        f"{family}.entity.input": '{"a": 1}',
        f"{family}.entity.output": "2",
    }
    expected = {names_it: "plan", takes: '{"a": 1}', gives: "2"}
    assert read(given) == expected | ({} if operation is None else {names.OPERATION_NAME: operation})


def test_agentops_names_of_agents_and_operations() -> None:
    assert read({"agent.name": "writer", "operation.name": "draft"}) == {
        names.AGENT_NAME: "writer",
        names.OPERATION_LABEL: "draft",
    }
    given = {"agentops.span.kind": "tool", "tool.name": "search", "tool.parameters": "{}", "tool.result": "found"}
    assert read(given) == {
        names.OPERATION_NAME: "execute_tool",
        names.TOOL_NAME: "search",
        names.TOOL_ARGUMENTS: "{}",
        names.TOOL_RESULT: "found",
    }


# -- OpenInference ---------------------------------------------------------------------------------------------------


def test_openinferences_model_call() -> None:
    message = "llm.input_messages"
    given = {
        "openinference.span.kind": "LLM",
        "llm.system": "openai",
        "llm.provider": "azure",
        "llm.model_name": "m",
        "llm.token_count.prompt": 11,
        "llm.token_count.completion": 5,
        "llm.token_count.total": 16,
        "llm.finish_reason": "stop",
        "llm.invocation_parameters": '{"temperature": 0.5, "max_tokens": 10, "stop": "END", "odd": 1}',
        f"{message}.0.message.role": "user",
        f"{message}.0.message.contents.0.message_content.type": "text",
        f"{message}.0.message.contents.0.message_content.text": "What is 6 x 7?",
        f"{message}.0.message.contents.1.message_content.type": "image",
        f"{message}.0.message.contents.1.message_content.image.image.url": "http://i",
        f"{message}.1.message.role": "tool",
        f"{message}.1.message.tool_call_id": "call_1",
        f"{message}.1.message.content": "42",
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.tool_calls.0.tool_call.id": "call_1",
        "llm.output_messages.0.message.tool_calls.0.tool_call.function.name": "calculator",
        "llm.output_messages.0.message.tool_calls.0.tool_call.function.arguments": '{"expression": "6*7"}',
        "llm.tools.0.tool.json_schema": '{"type": "function"}',
        "input.value": '{"messages": []}',
        "output.value": "{}",
        "session.id": "s1",
    }
    image = {"type": "uri", "modality": "image", "uri": "http://i"}
    assert read(given) == {
        names.OPERATION_NAME: "chat",
        names.PROVIDER_NAME: "azure",
        names.REQUEST_MODEL: "m",
        names.INPUT_TOKENS: 11,
        names.OUTPUT_TOKENS: 5,
        names.FINISH_REASONS: ["stop"],
        names.REQUEST_TEMPERATURE: 0.5,
        names.REQUEST_MAX_TOKENS: 10,
        names.REQUEST_STOP: ["END"],
        names.INPUT_MESSAGES: [
            {"role": "user", "parts": [text("What is 6 x 7?"), image]},
            {"role": "tool", "parts": [{"type": "tool_call_response", "id": "call_1", "response": "42"}]},
        ],
        names.OUTPUT_MESSAGES: [{"role": "assistant", "parts": [CALL]}],
        names.TOOL_DEFINITIONS: [{"type": "function"}],
        conventions.CONVERSATION_ID: "s1",
    }


def test_more_than_ten_messages_stay_in_order() -> None:
    keys = {f"llm.input_messages.{number}.message.content": str(number) for number in range(12)}
    found = read(dict(sorted(keys.items())))[names.INPUT_MESSAGES]
    assert [message["parts"][0]["content"] for message in found] == [str(number) for number in range(12)]


def test_a_model_call_known_only_by_its_bodies() -> None:
    given = {
        "openinference.span.kind": "LLM",
        "input.value": json.dumps({"model": "m", "messages": [{"role": "user", "content": "What is 6 x 7?"}]}),
        "output.value": json.dumps(
            {"choices": [{"message": {"role": "assistant", "content": "42"}, "finish_reason": "stop"}]}
        ),
    }
    assert read(given) == {
        names.OPERATION_NAME: "chat",
        names.INPUT_MESSAGES: [ASKED],
        names.OUTPUT_MESSAGES: [{"role": "assistant", "parts": [text("42")], "finish_reason": "stop"}],
    }


def test_other_spans_of_openinference() -> None:
    tool = {"openinference.span.kind": "TOOL", "tool.name": "search", "input.value": "{}", "tool.parameters": "schema"}
    assert read(tool) == {names.OPERATION_NAME: "execute_tool", names.TOOL_NAME: "search", names.TOOL_ARGUMENTS: "{}"}
    assert read({"openinference.span.kind": "CHAIN", "input.value": "a", "output.value": "b"}) == {
        names.OPERATION_INPUT: "a",
        names.OPERATION_OUTPUT: "b",
    }


def test_prompts_and_choices_of_completions() -> None:
    given = {"llm.prompts.0.prompt.text": "Once", "llm.choices.0.completion.text": "upon"}
    assert read(given) == {
        names.INPUT_MESSAGES: [{"role": "user", "parts": [text("Once")]}],
        names.OUTPUT_MESSAGES: [{"role": "assistant", "parts": [text("upon")]}],
    }


def test_langsmiths_whole_prompt() -> None:
    given = {
        "gen_ai.prompt": json.dumps({"messages": [{"role": "user", "content": "What is 6 x 7?"}]}),
        "gen_ai.completion": "42",
    }
    assert read(given) == {
        names.INPUT_MESSAGES: [ASKED],
        names.OUTPUT_MESSAGES: [{"role": "assistant", "parts": [text("42")]}],
    }


# -- Agent Lightning -------------------------------------------------------------------------------------------------


def test_our_own_dimensions_travel_as_text() -> None:
    attributes: dict[str, Any] = {names.REWARD_VALUES: '{"format": 0.5}'}
    assert complete(names.REWARD, attributes) == names.REWARD
    assert attributes == {names.REWARD_VALUES: {"format": 0.5}}


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        (
            {
                "agentlightning.reward.0.name": "correct",
                "agentlightning.reward.0.value": 1.0,
                "agentlightning.reward.1.name": "style",
                "agentlightning.reward.1.value": 0.5,
            },
            "correct",
            1.0,
        ),
        ({"reward": 0.25}, "reward", 0.25),
        ({"agentops.task.output": '{"type": "reward", "value": 0.5}'}, "reward", 0.5),
    ],
)
def test_rewards_of_0x_are_rewards(given: dict[str, Any], name: str, value: float) -> None:
    attributes = dict(given)
    assert complete(names.ANNOTATION, attributes) == names.REWARD
    assert (attributes[names.EVALUATION_NAME], attributes[names.SCORE_VALUE]) == (name, value)
    assert attributes[conventions.ORIGINAL_NAME] == names.ANNOTATION


@pytest.mark.parametrize(
    "given",
    [
        {"agentlightning.reward.0.value": float("nan")},
        {"agentlightning.reward.0.value": True},
        {"agentlightning.reward.0.name": "no value"},
        {"agentops.task.output": '{"type": "reward", "value": null}'},
        {"agentops.task.output": "plain"},
        {"note": "no reward at all"},
    ],
)
def test_what_is_no_finite_number_is_no_reward(given: dict[str, Any]) -> None:
    attributes = dict(given)
    assert complete(names.ANNOTATION, attributes) == names.ANNOTATION
    assert names.SCORE_VALUE not in attributes


def test_an_annotation_of_another_library_is_no_reward() -> None:
    assert complete("work", {"reward": 1.0}) == "work"


def test_token_ids_of_0x() -> None:
    assert read({"prompt_token_ids": [1, 2], "response_token_ids": [3]}) == {
        names.PROMPT_TOKEN_IDS: [1, 2],
        names.RESPONSE_TOKEN_IDS: [3],
    }
    given = {"llm.hosted_vllm.prompt_token_ids": "[1, 2]", "llm.hosted_vllm.response_token_ids": "[[3, 4]]"}
    assert read(given) == {names.PROMPT_TOKEN_IDS: [1, 2], names.RESPONSE_TOKEN_IDS: [3, 4]}
    assert read({"prompt_token_ids": "[1, 2.5]", "response_token_ids": "no"}) == {}


# -- anything at all -------------------------------------------------------------------------------------------------

TABLES = (conventions.ALIASES, conventions.COUNTS, conventions.LISTS, conventions.TOKENS)
SOURCES = [source for table in TABLES for sources in table.values() for source in sources]
SOURCES += [source for sources, _ in conventions.BY_OPERATION for source in sources]
SOURCES += [*conventions.KINDS, *conventions.WHOLE, *conventions.STRUCTURED, "llm.invocation_parameters", "reward"]
PREFIXES = [*conventions.FAMILIES, conventions.REWARD_FAMILY]
PATHS = ["0", "0.role", "0.content", "0.message.role", "0.tool_calls.0.name", "0.value", "1.a.b"]
FIELDS = ["role", "content", "message", "messages", "tool_calls", "function", "parts", "a"]
BODIES = [*conventions.EVENT_BODIES, "role", "tool_calls", "finish_reason", *conventions.STRUCTURED]

KEYS = st.sampled_from([*SOURCES, names.REWARD_VALUES]) | st.builds(
    lambda prefix, rest: prefix + rest,
    st.sampled_from(PREFIXES),
    st.text("01.aem", max_size=6) | st.sampled_from(PATHS),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3),
    max_leaves=6,
)
MIXED = VALUES | VALUES.map(json.dumps)
EVENTS = st.builds(
    SpanEvent,
    st.sampled_from([*conventions.EVENTS, conventions.DETAILS, "other"]),
    st.just(1.0),
    st.dictionaries(st.sampled_from(BODIES), MIXED, max_size=3),
)


@settings(max_examples=80)
@given(st.dictionaries(KEYS, MIXED, max_size=6), st.lists(EVENTS, max_size=3), st.booleans())
def test_nothing_raises_and_no_attribute_is_lost(
    attributes: dict[str, Any], events: list[SpanEvent], annotates: bool
) -> None:
    before = dict(attributes)
    complete(names.ANNOTATION if annotates else "work", attributes, tuple(events))
    assert set(before) <= set(attributes)
    for key, value in before.items():
        if key not in (*conventions.STRUCTURED, names.REWARD_VALUES):  # these change their form, not their content
            assert attributes[key] is value


def test_deeply_nested_texts_are_left_as_they_came() -> None:
    for deep in ("[" * 900 + "]" * 900, '{"message":' * 900 + "1" + "}" * 900, '{"messages":[' * 400 + "]}" * 400):
        given = {"gen_ai.prompt": deep, "prompt_token_ids": deep, "llm.invocation_parameters": deep}
        attributes: dict[str, Any] = dict(given)
        complete("work", attributes)
        assert {key: attributes[key] for key in given} == given
