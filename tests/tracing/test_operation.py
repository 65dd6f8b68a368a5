"""Promises of `operation`: steps are recorded, and the code that makes them works as before."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from agentlightning import span as names
from agentlightning.errors import ConfigError
from agentlightning.tracing.emit import emit_message, operation


def test_a_decorated_function_works_as_before_and_is_recorded(recorded: Any) -> None:
    @operation
    def search(query: str, *, limit: int = 3) -> list[str]:
        """Find it."""
        return [query] * limit

    assert search("a", limit=2) == ["a", "a"]
    assert (search.__name__, search.__doc__) == ("search", "Find it.")
    span = recorded[0]
    assert span.name == names.OPERATION
    assert span.attributes[names.OPERATION_LABEL].endswith("search")
    assert json.loads(span.attributes[names.OPERATION_INPUT]) == {"query": "a", "limit": 2}
    assert json.loads(span.attributes[names.OPERATION_OUTPUT]) == ["a", "a"]


async def test_async_functions_are_recorded_for_as_long_as_they_run(recorded: Any) -> None:
    @operation(name="look up")
    async def search(query: str) -> str:
        await asyncio.sleep(0.01)
        emit_message(query)
        return query.upper()

    assert await asyncio.gather(search("a"), search("b")) == ["A", "B"]
    operations = {span.span_id: span for span in recorded if span.name == names.OPERATION}
    assert [json.loads(span.attributes[names.OPERATION_OUTPUT]) for span in operations.values()] == ["A", "B"]
    for message in (span for span in recorded if span.name == names.MESSAGE):
        parent = operations[message.parent_id]
        assert json.loads(parent.attributes[names.OPERATION_INPUT]) == {"query": message.attributes[names.MESSAGE_BODY]}


async def test_a_block_is_recorded_with_what_it_was_given(recorded: Any) -> None:
    with operation("plan") as step:
        step.set_input("question")
        step.set_output({"plan": 1})
    async with operation(name="act") as step:
        step.set_input(1, 2, self="me")
    plan, act = recorded
    assert json.loads(plan.attributes[names.OPERATION_INPUT]) == "question"
    assert json.loads(plan.attributes[names.OPERATION_OUTPUT]) == {"plan": 1}
    assert json.loads(act.attributes[names.OPERATION_INPUT]) == [1, 2, {"self": "me"}]


def test_keywords_of_an_operation_are_its_attributes(recorded: Any) -> None:
    @operation(category="compute", limits={"calls": 3})
    def work() -> int:
        return 1

    assert work() == 1
    with operation("plan", category="think"):
        pass
    assert recorded[0].attributes["category"] == "compute"
    assert recorded[0].attributes["limits.calls"] == 3
    assert recorded[1].attributes["category"] == "think"
    assert recorded[1].attributes[names.OPERATION_LABEL] == "plan"


def test_a_failing_operation_is_recorded_and_still_fails(recorded: Any) -> None:
    @operation
    def divide(a: int, b: int) -> float:
        return a / b

    with pytest.raises(ZeroDivisionError):
        divide(1, 0)
    span = recorded[0]
    assert (span.status_code, span.attributes[names.ERROR_TYPE]) == ("ERROR", "ZeroDivisionError")
    assert json.loads(span.attributes[names.OPERATION_INPUT]) == {"a": 1, "b": 0}
    assert [event.name for event in span.events] == ["exception"]


def test_values_without_json_never_break_the_operation(recorded: Any) -> None:
    class Rude:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    loop: list[Any] = []
    loop.append(loop)

    @operation
    def touch(*values: Any) -> Any:
        return values[0]

    for value in (Rude(), object(), math.nan, loop, {(1, 2): 3}, "x" * 10_000):
        assert touch(value) is value
    for span in recorded:
        json.loads(span.attributes[names.OPERATION_INPUT])
        json.loads(span.attributes[names.OPERATION_OUTPUT])
    assert len(recorded) == 6


def test_a_wrong_call_fails_as_it_would_have(recorded: Any) -> None:
    @operation
    def one(a: int) -> int:
        return a

    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        one()  # type: ignore[call-arg]


def test_a_step_that_is_not_open_says_so() -> None:
    step = operation("plan")
    with pytest.raises(ConfigError, match="'plan' is not open"):
        step.set_output(1)


def test_recursive_operations_nest(recorded: Any) -> None:
    @operation
    def count(n: int) -> int:
        return 0 if n == 0 else 1 + count(n - 1)

    assert count(3) == 3
    assert [span.parent_id for span in recorded][:-1] == [span.span_id for span in recorded][1:]
