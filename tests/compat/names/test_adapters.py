"""Adapters as code of 0.3 uses them."""

from __future__ import annotations

import json
from typing import Any

import pytest

import agentlightning as agl


def call(number: int, agent: str) -> agl.Span:
    text = json.dumps([{"role": "user", "parts": [{"type": "text", "content": "hi"}]}])
    answer = json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": f"answer {number}"}]}])
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.agent.name": agent,
        "gen_ai.response.id": f"chatcmpl-{number}",
        "gen_ai.input.messages": text,
        "gen_ai.output.messages": answer,
        "agentlightning.prompt_token_ids": [1, 2],
        "agentlightning.response_token_ids": [3],
        "agentlightning.logprobs": [-0.5],
    }
    return agl.Span("ro-1", "at-1", "chat", 0.0, span_id=f"{number:016x}", sequence_id=number, attributes=attributes)


def reward(number: int, value: float) -> agl.Span:
    attributes = {"gen_ai.evaluation.score.value": value}
    name = "gen_ai.evaluation.result"
    return agl.Span("ro-1", "at-1", name, 0.0, span_id=f"{number:016x}", sequence_id=number, attributes=attributes)


SPANS = [call(1, "writer"), reward(2, 0.25), reward(3, 0.5), call(4, "critic"), call(5, "writer"), reward(6, 1.0)]


def test_each_model_call_is_a_triplet_with_the_first_reward_after_it() -> None:
    found = agl.TracerTraceToTriplet().adapt(SPANS)
    assert [each.reward for each in found] == [0.25, None, 1.0]
    assert found[0].prompt == {"token_ids": [1, 2], "messages": [{"role": "user", "content": "hi"}]}
    assert found[0].response["token_ids"] == [3]
    assert found[0].response["logprobs"] == [-0.5]
    assert found[0].metadata == {"response_id": "chatcmpl-1", "agent_name": "writer"}


def test_an_adapter_can_be_called_and_selects_agents() -> None:
    assert [each.reward for each in agl.TracerTraceToTriplet(agent_match="^writ")(SPANS)] == [0.25, 1.0]


def test_arguments_without_a_place_say_what_is_done_instead() -> None:
    with pytest.raises(agl.errors.ConfigError, match="found by their attributes"):
        agl.TracerTraceToTriplet(llm_call_match="openai")
    with pytest.raises(TypeError, match="nonsense"):
        agl.TracerTraceToTriplet(nonsense=1)


def test_each_model_call_is_a_conversation() -> None:
    found = agl.TraceToMessages().adapt(SPANS)
    assert [each["messages"][-1]["content"] for each in found] == ["answer 1", "answer 4", "answer 5"]
    assert found[0]["messages"][0] == {"role": "user", "content": "hi"}
