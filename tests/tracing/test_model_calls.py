"""Promises about model calls, tool calls and steps that an agent reports itself."""

from __future__ import annotations

import asyncio
import json
import threading
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.assemble import calls, steps
from agentlightning.tracing import outbox
from agentlightning.tracing.scope import scope


@pytest.fixture(autouse=True)
def _own_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox.counters, "_counts", {})


def texts(span: agl.Span, side: str) -> list[tuple[str, str]]:
    messages = json.loads(span.attributes[f"gen_ai.{side}.messages"])
    return [(message["role"], message["parts"][0]["content"]) for message in messages]


def test_a_prompt_and_its_response_are_one_model_call(recorded: Any) -> None:
    with agl.track_agent("writer"):
        agl.emit_prompt("6 x 7?", model="m-1")
        agl.emit_response("42")
    (span,) = recorded
    assert (texts(span, "input"), texts(span, "output")) == ([("user", "6 x 7?")], [("assistant", "42")])
    assert (span.name, span.attributes["gen_ai.operation.name"]) == ("chat m-1", "chat")
    assert span.attributes["gen_ai.agent.name"] == "writer"
    assert span.start_time <= (span.end_time or 0)
    assert calls(recorded) == [span]


def test_both_at_once_are_the_same_call(recorded: Any) -> None:
    agl.emit_prompt([{"role": "system", "content": "brief"}, {"role": "user", "content": "6 x 7?"}], "42")
    (span,) = recorded
    assert texts(span, "input") == [("system", "brief"), ("user", "6 x 7?")]
    assert texts(span, "output") == [("assistant", "42")]


def test_agents_that_speak_in_turn_get_their_own_responses(recorded: Any) -> None:
    with agl.track_agent("a"):
        agl.emit_prompt("to a")
        with agl.track_agent("b"):
            agl.emit_prompt("to b")
            agl.emit_response("from b")
        agl.emit_response("from a")
    found = [(s.attributes["gen_ai.agent.name"], texts(s, "input")[0][1], texts(s, "output")[0][1]) for s in recorded]
    assert found == [("b", "to b", "from b"), ("a", "to a", "from a")]


def test_tasks_that_run_at_once_get_their_own_responses(recorded: Any) -> None:
    async def ask(name: str) -> None:
        agl.emit_prompt(name)
        await asyncio.sleep(0.001)
        agl.emit_response(name.upper())

    async def main() -> None:
        await asyncio.gather(*map(ask, "abcd"))

    asyncio.run(main())
    assert sorted((texts(s, "input")[0][1], texts(s, "output")[0][1]) for s in recorded) == [
        ("a", "A"),
        ("b", "B"),
        ("c", "C"),
        ("d", "D"),
    ]


def test_a_response_may_come_from_another_thread(recorded: Any) -> None:
    agl.emit_prompt("6 x 7?")
    thread = threading.Thread(target=copy_context().run, args=[agl.emit_response, "42"])
    thread.start()
    thread.join()
    assert texts(recorded[0], "output") == [("assistant", "42")]


def test_a_prompt_that_nothing_answers_is_recorded_and_counted(recorded: Any) -> None:
    with scope("ro-2", "at-2", recorded):
        agl.emit_prompt("first")
        agl.emit_prompt("second")
    assert [(span.name, span.rollout_id, texts(span, "input")[0][1]) for span in recorded] == [
        ("agentlightning.prompt", "ro-2", "first"),
        ("agentlightning.prompt", "ro-2", "second"),
    ]
    assert agl.recording_status().prompts_unanswered == 2
    assert calls(recorded) == []


def test_a_response_to_nothing_is_recorded_and_counted(recorded: Any) -> None:
    agl.emit_response("42")
    (span,) = recorded
    assert (span.name, texts(span, "output")) == ("agentlightning.response", [("assistant", "42")])
    assert agl.recording_status().responses_unprompted == 1


def test_a_completion_brings_its_model_and_tokens(recorded: Any) -> None:
    message = SimpleNamespace(role="assistant", content="42", tool_calls=None)
    completion = SimpleNamespace(
        id="chatcmpl-1",
        model="gpt-x",
        choices=[SimpleNamespace(message=message, finish_reason="stop")],
        usage=SimpleNamespace(prompt_tokens=5, completion_tokens=2),
    )
    agl.emit_prompt("6 x 7?")
    agl.emit_completion(completion)
    agl.emit_completion(completion, prompt="again?")
    for span, asked in zip(recorded, ("6 x 7?", "again?"), strict=True):
        assert texts(span, "input") == [("user", asked)]
        assert span.attributes["gen_ai.response.model"] == "gpt-x"
        assert span.attributes["gen_ai.usage.input_tokens"] == 5
        assert span.attributes["gen_ai.response.finish_reasons"] == ["stop"]


def test_a_completion_that_is_a_conversation_holds_its_prompt(recorded: Any) -> None:
    state = {"messages": [{"role": "user", "content": "6 x 7?"}, {"role": "assistant", "content": "42"}]}
    agl.emit_completion(state)
    (span,) = recorded
    assert (texts(span, "input"), texts(span, "output")) == ([("user", "6 x 7?")], [("assistant", "42")])


def test_a_tool_call_is_a_step_of_the_trajectory(recorded: Any) -> None:
    agl.emit_tool_call("search", {"query": "tea"}, ["a page"])
    agl.emit_tool_call("search", {"query": "tea"}, error=TimeoutError("no answer"))
    agl.emit_tool_call({"id": "c1", "function": {"name": "times", "arguments": '{"a": 6}'}}, result="42")
    found = [(s.kind, s.name, s.arguments, s.result, s.error) for s in steps(_numbered(recorded))]
    assert found == [
        ("tool", "search", '{"query": "tea"}', '["a page"]', None),
        ("tool", "search", '{"query": "tea"}', None, "TimeoutError: no answer"),
        ("tool", "times", '{"a": 6}', "42", None),
    ]
    assert recorded[2].attributes["gen_ai.tool.call.id"] == "c1"
    with pytest.raises(agl.errors.ConfigError, match="give the name of the tool"):
        agl.emit_tool_call(7)
    with pytest.raises(agl.errors.ConfigError, match="names no tool"):
        agl.emit_tool_call("")


def _numbered(spans: list[agl.Span]) -> list[agl.Span]:
    from dataclasses import replace

    return [replace(span, sequence_id=number) for number, span in enumerate(spans, 1)]


def test_a_step_has_a_name_an_input_and_an_output(recorded: Any) -> None:
    agl.emit_step("plan", {"goal": 1}, ["search"], attributes={"depth": 2})
    (span,) = recorded
    assert span.name == "agentlightning.operation"
    assert span.attributes["agentlightning.operation.name"] == "plan"
    assert json.loads(span.attributes["agentlightning.operation.input"]) == {"goal": 1}
    assert json.loads(span.attributes["agentlightning.operation.output"]) == ["search"]
    assert span.attributes["depth"] == 2


def test_an_action_of_a_framework_is_a_tool_call(recorded: Any) -> None:
    action = SimpleNamespace(tool="search", tool_input={"q": "tea"}, log="I search")
    agl.emit_step((action, "a page"))
    agl.emit_step(SimpleNamespace(tool="search", tool_input="tea", result="a page", thought="hm"))
    assert [(s.attributes["gen_ai.tool.name"], s.attributes["gen_ai.tool.call.result"]) for s in recorded] == [
        ("search", "a page"),
        ("search", "a page"),
    ]


def test_a_message_of_a_framework_is_recorded_with_its_text(recorded: Any) -> None:
    agl.emit_message([{"role": "user", "content": "6 x 7?"}, SimpleNamespace(type="ai", content="42")])
    assert [span.attributes["agentlightning.message.body"] for span in recorded] == ["6 x 7?", "42"]
    assert json.loads(recorded[1].attributes["agentlightning.message.json"])["role"] == "assistant"


def sides(span: agl.Span) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    output = json.loads(span.attributes["gen_ai.output.messages"])
    return json.loads(span.attributes["gen_ai.input.messages"]), output[0]["parts"][0]


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        ((("sql", {"query": "SELECT 1"}, [[1]]), {}), {"query": "SELECT 1"}),
        ((("sql", "SELECT 1", [[1]]), {}), {"input": "SELECT 1"}),
        ((("sql", '{"query": "SELECT 1"}'), {"error": ValueError("no table")}), {"query": "SELECT 1"}),
        ((({"id": "c1", "function": {"name": "sql", "arguments": '{"query": 1}'}},), {}), {"query": 1}),
        ((("sql",), {}), None),
    ],
)
def test_a_tool_call_answers_the_prompt_before_it(recorded: Any, said: Any, arguments: Any) -> None:
    agl.emit_prompt("How many users?", model="m")
    agl.emit_tool_call(*said[0], **said[1])
    agl.emit_reward(1.0)
    call, tool, _ = recorded
    assert (call.name, tool.name) == ("chat m", "execute_tool sql")
    messages, part = sides(call)
    assert messages[0]["parts"][0]["content"] == "How many users?"
    assert (part["type"], part["name"], part["arguments"]) == ("tool_call", "sql", arguments)
    assert calls(recorded) == [call]
    assert agl.recording_status().prompts_unanswered == 0


def test_an_action_of_a_framework_answers_it_too_and_the_result_is_in_the_next_prompt(recorded: Any) -> None:
    with agl.track_agent("sql"):
        agl.emit_prompt("How many users?")
        agl.emit_step((SimpleNamespace(tool="sql", tool_input={"query": "SELECT 1"}), "1"))
        agl.emit_tool_call("sql", {"query": "SELECT 2"}, "2")
        agl.emit_response("two")
        agl.emit_response("nothing asked for this")
    found = calls(recorded)
    assert [[message["role"] for message in sides(span)[0]] for span in found] == [
        ["user"],
        ["user", "assistant", "tool"],
        ["user", "assistant", "tool", "assistant", "tool"],
    ]
    assert sides(found[2])[1]["content"] == "two"
    assert agl.recording_status().responses_unprompted == 1


def test_a_tool_call_of_another_agent_answers_nothing(recorded: Any) -> None:
    with agl.track_agent("writer"):
        agl.emit_prompt("Write.")
        with agl.track_agent("critic"):
            agl.emit_tool_call("search", {"query": "tea"})
        agl.emit_response("written")
    assert [span.name for span in recorded] == ["execute_tool search", "chat"]
    assert len(sides(recorded[1])[0]) == 1
