"""Promises about recording only what is marked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.store.types import RolloutRecord
from agentlightning.tracing.tracer import tracer

Read = Callable[..., list[RolloutRecord]]


def messages(record: RolloutRecord) -> list[str]:
    return [s.attributes["agentlightning.message.body"] for s in record.spans if s.name == "agentlightning.message"]


def test_from_the_first_mark_on_only_marked_code_is_recorded(recorded: Read) -> None:
    with agl.track_session():
        agl.emit_message("before")
        with agl.track_critical_path():
            agl.emit_message("marked")
            with agl.operation("step"):
                pass
        agl.emit_message("after")
        with agl.operation("unmarked"):
            pass
        agl.emit_reward(1.0)
    (record,) = recorded()
    assert messages(record) == ["before", "marked"]
    assert [span.name for span in record.spans].count("agentlightning.operation") == 1
    assert agl.find_final_reward(record.spans) == 1.0
    assert agl.recording_status().spans_unmarked == 2


def test_a_session_may_record_marked_code_alone_from_its_start(recorded: Read) -> None:
    with agl.track_session(only_marked=True):
        agl.emit_message("before")
        with agl.track_critical_path():
            agl.emit_message("marked")
    assert messages(recorded()[0]) == ["marked"]


def test_other_sessions_are_not_affected(recorded: Read) -> None:
    with agl.track_session("a"), agl.track_critical_path():
        agl.emit_message("marked")
    with agl.track_session("b"):
        agl.emit_message("all")
    assert [messages(record) for record in recorded()] == [["marked"], ["all"]]


def test_outside_of_any_session_a_block_is_one(recorded: Read) -> None:
    with pytest.raises(ValueError, match="seven"), agl.track_critical_path():
        agl.emit_annotation({"value": int("seven")})
    (record,) = recorded()
    assert (record.rollout.status, [s.name for s in record.spans]) == ("failed", ["agentlightning.exception"])


def test_a_block_within_itself_is_part_of_the_same_session(recorded: Read) -> None:
    block = agl.track_critical_path()
    with block, block:
        agl.emit_message("marked")
    (record,) = recorded()
    assert (record.rollout.status, messages(record)) == ("succeeded", ["marked"])


def test_functions_are_marked_by_decoration(recorded: Read) -> None:
    @agl.track_critical_path
    def sync(text: str) -> str:
        agl.emit_message(text)
        return text

    @agl.track_critical_path()
    async def later(text: str) -> None:
        await asyncio.sleep(0)
        agl.emit_message(text)

    async def main() -> None:
        async with agl.track_session(), agl.track_critical_path():
            pass
        with agl.track_session(only_marked=True):
            await asyncio.gather(later("a"), later("b"))
            agl.emit_message("not marked")
            sync("c")

    asyncio.run(main())
    assert sorted(messages(recorded()[1])) == ["a", "b", "c"]


def test_spans_of_other_libraries_count_as_marked_by_where_they_end(recorded: Read) -> None:
    with agl.track_session(only_marked=True):
        tracer().start_span("outside").end()
        with agl.track_critical_path():
            tracer().start_span("inside").end()
    assert [span.name for span in recorded()[0].spans] == ["inside"]


def test_the_snippet_of_the_vision_runs(recorded: Read) -> None:
    prompt, text, name, args, result = "6 x 7?", "42", "times", {"a": 6, "b": 7}, 42
    step, m, r = "check", {"role": "user", "content": "sure?"}, "yes"
    with agl.track_session():  # fmt: skip
        with agl.track_agent("writer"):
            agl.emit_prompt(prompt); agl.emit_response(text)  # fmt: skip  # noqa: E702
            agl.emit_tool_call(name, args, result); agl.emit_step(step); agl.emit_message(m); agl.emit_completion(r)  # noqa: E702  # fmt: skip
        agl.emit_reward({"correctness": 1.0, "format": 0.5})
    with agl.track_critical_path(): ...  # fmt: skip
    instrumentation: Any = agl.track_all()
    instrumentation.stop()
    first, second = recorded()
    assert [span.name for span in first.spans] == [
        "chat",
        "execute_tool times",
        "agentlightning.operation",
        "agentlightning.message",
        "agentlightning.response",
        "gen_ai.evaluation.result",
    ]
    assert second.rollout.status == "succeeded"
