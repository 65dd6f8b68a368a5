"""Tool calls and errors become the steps of a trajectory."""

from __future__ import annotations

from typing import Any

from agentlightning import span as names
from agentlightning.assemble import trajectory
from agentlightning.span import Span
from agentlightning.trajectory import Step


def span(sequence: int, name: str, status: str = "UNSET", message: str | None = None, **attributes: Any) -> Span:
    return Span(
        "ro-1",
        "at-1",
        name,
        start_time=0.0,
        sequence_id=sequence,
        span_id=f"s{sequence}",
        status_code=status,
        status_message=message,
        attributes=attributes,
    )


TOOL = {names.OPERATION_NAME: "execute_tool", names.TOOL_NAME: "search", names.TOOL_ARGUMENTS: '{"q": "tea"}'}
CALL = {
    names.OPERATION_NAME: "chat",
    names.RESPONSE_MODEL: "policy",
    names.PROMPT_TOKEN_IDS: [1],
    names.RESPONSE_TOKEN_IDS: [2],
    names.LOGPROBS: [-1.0],
    names.INPUT_MESSAGES: '[{"role": "user", "parts": []}]',
}


def test_tool_calls_and_errors_are_steps_in_the_stores_order() -> None:
    spans = [
        span(5, names.EXCEPTION, **{names.EXCEPTION_TYPE: "ValueError", names.EXCEPTION_MESSAGE: "no tea"}),
        span(1, "chat", **CALL),
        span(2, "execute_tool search", **TOOL, **{names.TOOL_RESULT: "green"}),
        span(3, "execute_tool search", "ERROR", "timed out", **TOOL),
        span(4, "chat", "ERROR", **(CALL | {names.ERROR_TYPE: "rate_limit"})),
        span(6, "invoke_agent", **{names.OPERATION_NAME: "invoke_agent"}),
        span(7, "execute_tool late", **TOOL, **{names.LATE: True}),
        span(8, "execute_tool of a judge", **TOOL, **{names.JUDGE: True}),
    ]
    found = trajectory("ro-1", "at-1", spans)
    assert found.steps == (
        Step("tool", "search", "s2", 2, arguments='{"q": "tea"}', result="green"),
        Step("tool", "search", "s3", 3, arguments='{"q": "tea"}', error="timed out"),
        Step("error", "chat", "s4", 4, error="rate_limit"),
        Step("error", names.EXCEPTION, "s5", 5, error="no tea"),
    )
    (call,) = found.transitions
    assert (call.model, call.messages) == ("policy", [{"role": "user", "parts": []}])


def test_a_tool_without_a_name_has_that_of_its_span_and_an_error_without_words_is_one() -> None:
    nameless = {names.OPERATION_NAME: "execute_tool"}
    (found,) = trajectory("ro-1", "at-1", [span(1, "execute_tool search", "ERROR", **nameless)]).steps
    assert (found.name, found.error) == ("execute_tool search", "error")
