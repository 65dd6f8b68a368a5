"""Promises about what `emit_*` understands: the shapes of other frameworks, without importing one."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.tracing.messages import (
    is_message,
    message_text,
    messages_json,
    read_messages,
    read_result,
    read_tool_call,
    split_conversation,
)


def said(role: str, *parts: Any) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": p} if isinstance(p, str) else p for p in parts]}


def call(name: str, arguments: Any, call_id: str | None = None) -> dict[str, Any]:
    return {"type": "tool_call", "id": call_id, "name": name, "arguments": arguments}


def response(answer: Any, call_id: str | None = None) -> dict[str, Any]:
    return {"type": "tool_call_response", "id": call_id, "response": answer}


@dataclass
class LangChainMessage:
    """As langchain_core.messages.BaseMessage."""

    content: Any
    type: str
    tool_calls: list[Any] = field(default_factory=list)
    tool_call_id: str | None = None
    id: str | None = None
    name: str | None = None
    additional_kwargs: dict[str, Any] = field(default_factory=dict)
    response_metadata: dict[str, Any] = field(default_factory=dict)
    usage_metadata: dict[str, Any] | None = None

    def text(self) -> str:
        return str(self.content)


def test_text_is_a_message_of_the_role_it_is_given_as() -> None:
    assert read_messages("hi", "user") == [said("user", "hi")]
    assert read_result("hi").messages == [said("assistant", "hi")]


def test_langchain_messages() -> None:
    messages = [
        LangChainMessage("be brief", "system"),
        LangChainMessage("6 x 7?", "human"),
        LangChainMessage("", "ai", tool_calls=[{"name": "times", "args": {"a": 6}, "id": "c1", "type": "tool_call"}]),
        LangChainMessage("42", "tool", tool_call_id="c1", name="times"),
    ]
    expected = [
        said("system", "be brief"),
        said("user", "6 x 7?"),
        said("assistant", call("times", {"a": 6}, "c1")),
        said("tool", response("42", "c1")),
    ]
    assert read_messages(messages, "user") == expected
    assert read_messages(SimpleNamespace(to_messages=lambda: messages), "user") == expected
    assert read_messages([("system", "be brief"), ("human", "6 x 7?")], "user") == expected[:2]


def test_a_langchain_answer_says_its_model_and_tokens() -> None:
    answer = LangChainMessage(
        [{"type": "text", "text": "42"}],
        "ai",
        id="run-1",
        response_metadata={"model_name": "m-1", "finish_reason": "stop"},
        usage_metadata={"input_tokens": 5, "output_tokens": 2},
    )
    for value in (answer, SimpleNamespace(generations=[[SimpleNamespace(text="42", message=answer)]])):
        found = read_result(value)
        assert found.messages == [said("assistant", "42")]
        assert (found.model, found.input_tokens, found.output_tokens, found.finish_reasons) == ("m-1", 5, 2, ("stop",))
    assert read_result(SimpleNamespace(generations=[SimpleNamespace(text="42")])).messages == [said("assistant", "42")]


def openai_chat() -> dict[str, Any]:
    function = {"name": "times", "arguments": '{"a": 6}'}
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": function}]}
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    choices = [{"index": 0, "message": message, "finish_reason": "tool_calls"}]
    return {"id": "chatcmpl-1", "object": "chat.completion", "model": "gpt-x", "choices": choices, "usage": usage}


def as_object(value: Any) -> Any:
    """As the SDK hands it over."""
    if isinstance(value, dict):
        return SimpleNamespace(**{key: as_object(item) for key, item in value.items()})
    return [as_object(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("shape", [lambda value: value, as_object], ids=["dict", "object"])
def test_openai_chat_completions(shape: Any) -> None:
    found = read_result(shape(openai_chat()))
    (message,) = found.messages
    assert message["parts"] == [call("times", {"a": 6}, "c1")]
    assert (found.model, found.response_id, found.finish_reasons) == ("gpt-x", "chatcmpl-1", ("tool_calls",))
    assert (found.input_tokens, found.output_tokens) == (5, 2)


@pytest.mark.parametrize("shape", [lambda value: value, as_object], ids=["dict", "object"])
def test_openai_responses(shape: Any) -> None:
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "let me see"}]}
    items = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "easy"}]},
        answer,
        {"type": "function_call", "call_id": "c1", "name": "times", "arguments": '{"a": 6}'},
    ]
    usage = {"input_tokens": 5, "output_tokens": 2}
    found = read_result(shape({"id": "resp_1", "model": "gpt-x", "output": items, "usage": usage}))
    reasoning = {"type": "reasoning", "content": "easy"}
    assert found.messages == [said("assistant", reasoning, "let me see", call("times", {"a": 6}, "c1"))]
    assert (found.response_id, found.input_tokens) == ("resp_1", 5)
    given = [
        {"role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
        {"role": "user", "content": "6 x 7?"},
        items[2],
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
    ]
    assert read_messages(shape(given), "user") == [
        said("system", "be brief"),
        said("user", "6 x 7?"),
        said("assistant", call("times", {"a": 6}, "c1")),
        said("tool", response("42", "c1")),
    ]


@pytest.mark.parametrize("shape", [lambda value: value, as_object], ids=["dict", "object"])
def test_anthropic_messages(shape: Any) -> None:
    content = [
        {"type": "thinking", "thinking": "easy"},
        {"type": "text", "text": "let me see"},
        {"type": "tool_use", "id": "t1", "name": "times", "input": {"a": 6}},
    ]
    usage = {"input_tokens": 5, "output_tokens": 2}
    body = {"id": "msg_1", "type": "message", "role": "assistant", "model": "c-1", "content": content}
    answer = body | {"usage": usage, "stop_reason": "tool_use"}
    found = read_result(shape(answer))
    parts = [{"type": "reasoning", "content": "easy"}, "let me see"]
    (message,) = found.messages
    assert message["parts"][:2] == said("assistant", *parts)["parts"]
    assert (message["parts"][2]["name"], message["parts"][2]["id"]) == ("times", "t1")
    assert (found.model, found.finish_reasons, found.output_tokens) == ("c-1", ("tool_use",), 2)
    request = {
        "system": "be brief",
        "messages": [
            {"role": "user", "content": "6 x 7?"},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "42"}]},
        ],
    }
    expected = [said("system", "be brief"), said("user", "6 x 7?"), said("tool", response("42", "t1"))]
    assert read_messages(shape(request), "user") == expected


def test_autogen_messages() -> None:
    usage = SimpleNamespace(prompt_tokens=5, completion_tokens=2)
    text = SimpleNamespace(type="TextMessage", source="writer", content="42", models_usage=usage, metadata={})
    asked = SimpleNamespace(type="TextMessage", source="user", content="6 x 7?", models_usage=None, metadata={})
    assert read_messages([asked, text], "user") == [
        {**said("user", "6 x 7?"), "name": "user"},
        {**said("assistant", "42"), "name": "writer"},
    ]
    request = SimpleNamespace(id="c1", name="times", arguments='{"a": 6}')
    created = SimpleNamespace(
        finish_reason="function_calls", content=[request], usage=usage, cached=False, thought="hm"
    )
    found = read_result(created)
    assert found.messages == [said("assistant", {"type": "reasoning", "content": "hm"}, call("times", {"a": 6}, "c1"))]
    assert (found.input_tokens, found.finish_reasons) == (5, ("function_calls",))
    executed = SimpleNamespace(content="42", call_id="c1", name="times", is_error=False)
    core = SimpleNamespace(type="FunctionExecutionResultMessage", content=[executed])
    assert read_messages(core, "user") == [said("tool", response("42", "c1"))]
    assert read_result(SimpleNamespace(chat_message=text, inner_messages=[])).messages[0]["parts"][0]["content"] == "42"
    assert split_conversation(SimpleNamespace(messages=[asked, text], stop_reason="done")) == (
        [{**said("user", "6 x 7?"), "name": "user"}],
        text,
    )


def test_crewai_outputs() -> None:
    output = SimpleNamespace(raw="42", pydantic=None, json_dict=None, tasks_output=[], token_usage=None)
    assert read_result(output).messages == [said("assistant", "42")]
    assert read_result(SimpleNamespace(final_output="42")).messages == [said("assistant", "42")]


def test_images_and_unknown_parts_stay() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "http://x/a.png"}}, {"type": "audio", "data": "abc"}]
    (message,) = read_messages([{"role": "user", "content": parts}], "user")
    assert message["parts"] == [{"type": "uri", "modality": "image", "uri": "http://x/a.png"}, parts[1]]


def test_what_is_no_message_becomes_text_and_nothing_raises() -> None:
    class Broken:
        @property
        def role(self) -> str:
            raise RuntimeError("not today")

    for value in (7, object(), {"a": 1}, Broken(), [], None, b"bytes"):
        for found in (read_messages(value, "user"), read_result(value).messages):
            assert found[0]["parts"][0]["type"] == "text"
    assert read_tool_call(Broken()) is None
    assert not is_message(7)
    loop: dict[str, Any] = {"role": "user"}
    loop["messages"] = [loop]
    assert read_messages(loop, "user")


FIELDS = [
    "role",
    "content",
    "type",
    "parts",
    "tool_calls",
    "function",
    "messages",
    "output",
    "choices",
    "arguments",
    "name",
    "call_id",
    "text",
    "usage",
    "summary",
    "generations",
    "message",
    "image_url",
]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    max_leaves=12,
)


@given(values)
def test_any_value_becomes_messages_that_can_be_stored(value: Any) -> None:
    for messages in (read_messages(value, "user"), read_result(value).messages):
        assert messages
        assert all(isinstance(message["role"], str) and message["parts"] for message in messages)
        assert isinstance(messages_json(messages), str)
        assert isinstance(message_text(messages), str)
