"""Promises about which attempt a piece of code belongs to."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from agentlightning.errors import ConfigError
from agentlightning.span import AGENT_NAME, MESSAGE_BODY, Span
from agentlightning.tracing.emit import emit_message, track_agent
from agentlightning.tracing.scope import current_agent, current_scope, scope


class ListSink:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def put(self, spans: Sequence[Span]) -> None:
        self.spans.extend(spans)


def test_outside_of_any_attempt_there_is_no_scope() -> None:
    assert current_scope() is None
    assert current_agent() is None


def test_a_scope_ends_with_its_block_even_when_it_fails() -> None:
    def fail() -> None:
        with scope("ro", "at", ListSink()):
            assert current_scope() is not None
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert current_scope() is None


async def test_concurrent_agents_in_one_loop_never_see_one_another() -> None:
    sinks = [ListSink() for _ in range(20)]

    async def agent(number: int) -> None:
        with scope(f"ro-{number}", "at", sinks[number]):
            await asyncio.sleep(0)
            emit_message("first")
            await asyncio.gather(asyncio.to_thread(emit_message, "in a thread"), asyncio.create_task(speak()))

    async def speak() -> None:
        emit_message("in a task")

    await asyncio.gather(*map(agent, range(20)))
    for number, sink in enumerate(sinks):
        assert [span.rollout_id for span in sink.spans] == [f"ro-{number}"] * 3


def test_a_bare_thread_belongs_to_an_attempt_only_when_it_is_given_the_context() -> None:
    sink = ListSink()
    with scope("ro", "at", sink):
        context = contextvars.copy_context()
        for target in (lambda: emit_message("lost"), lambda: context.run(emit_message, "kept")):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
    assert [span.attributes[MESSAGE_BODY] for span in sink.spans] == ["kept"]


def test_spans_carry_the_innermost_tracked_agent() -> None:
    sink = ListSink()
    with scope("ro", "at", sink, agent="host"):
        emit_message("1")
        with track_agent("writer"):
            emit_message("2")
            with track_agent("critic"):
                emit_message("3")
            emit_message("4")
    assert [span.attributes[AGENT_NAME] for span in sink.spans] == ["host", "writer", "critic", "writer"]


def test_spans_carry_no_agent_where_none_is_named() -> None:
    sink = ListSink()
    with scope("ro", "at", sink):
        emit_message("1")
    assert AGENT_NAME not in sink.spans[0].attributes


def test_an_agent_without_a_name_is_refused() -> None:
    wrong: list[Any] = ["", 3, None]
    for name in wrong:
        with pytest.raises(ConfigError, match=f"track_agent\\({name!r}\\): the name is"), track_agent(name):
            pass
