"""Promises about what an agent can say, and how rewards are read back."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from agentlightning import span as names
from agentlightning.errors import ConfigError, RewardError
from agentlightning.span import Span
from agentlightning.tracing.emit import (
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
    operation,
)
from agentlightning.tracing.rewards import find_final_reward, find_reward_spans, get_reward_value
from agentlightning.tracing.scope import scope

# -- rewards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "read"),
    [(-0.25, -0.25), (1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (np.array([0.5]), 0.5), (Fraction(1, 4), 0.25)],
)
def test_any_number_is_a_reward(recorded: Any, value: Any, read: float) -> None:
    emit_reward(value)
    assert get_reward_value(recorded[0]) == read
    assert recorded[0].name == names.REWARD
    assert recorded[0].attributes == {names.EVALUATION_NAME: "reward", names.SCORE_VALUE: read}


def test_a_reward_may_be_for_one_agent(recorded: Any) -> None:
    emit_reward(0.5, agent="writer")
    assert recorded[0].attributes[names.REWARD_AGENT] == "writer"
    assert find_final_reward(recorded) is None, "it is not that of the rollout"
    with pytest.raises(RewardError, match="name the agent as track_agent does"):
        emit_reward(0.5, agent="")


def test_a_reward_may_have_named_dimensions(recorded: Any) -> None:
    emit_reward({"correctness": 1, "format": 0.5}, name="judge")
    assert recorded[0].attributes == {
        names.EVALUATION_NAME: "judge",
        names.REWARD_VALUES: {"correctness": 1.0, "format": 0.5},
    }
    assert get_reward_value(recorded[0]) == {"correctness": 1.0, "format": 0.5}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "emit_reward gave nan, which cannot be learned from"),
        (-math.inf, "emit_reward gave -inf, which cannot be learned from"),
        ("0.5", "emit_reward gave '0.5', which is not a reward"),
        (None, "which is not a reward: give a number, a dict of numbers by name, or none at all"),
        ([1.0], r"emit_reward gave \[1.0\]"),
        (np.zeros(2), "emit_reward"),
        (10**400, "emit_reward gave inf"),
        ({}, "emit_reward gave {}"),
        ({"format": math.nan}, r"emit_reward\['format'\] gave nan"),
        ({"format": "good"}, "emit_reward gave {'format': 'good'}"),
        ({1: 0.5}, "emit_reward gave {1: 0.5}"),
    ],
)
def test_what_is_no_finite_number_is_refused_by_name(recorded: Any, value: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        emit_reward(value)
    assert recorded == []


@given(st.floats(-names.MAX_REWARD, names.MAX_REWARD))
def test_a_reward_reads_back_exactly(value: float) -> None:
    kept: list[Span] = []

    class Sink:
        def put(self, spans: Any) -> None:
            kept.extend(spans)

    with scope("ro", "at", Sink()):
        emit_reward(value)
        emit_reward({"part": value})
    assert [get_reward_value(span) for span in kept] == [value, {"part": value}]


def test_the_last_reward_is_the_final_one_and_a_missing_one_is_none(recorded: Any) -> None:
    assert find_final_reward(recorded) is None
    emit_reward(0.5)
    emit_message("more work")
    emit_reward(0.0)
    emit_message("done")
    assert find_final_reward(recorded) == 0.0
    assert [get_reward_value(span) for span in find_reward_spans(recorded)] == [0.5, 0.0]


def test_what_a_superseded_attempt_writes_is_no_reward(recorded: Any) -> None:
    emit_reward(0.5)
    late = replace(recorded[0], attributes={**recorded[0].attributes, names.SCORE_VALUE: 9.0, names.SUPERSEDED: True})
    assert find_final_reward([*recorded, late]) == 0.5


def test_an_evaluation_without_a_score_is_no_reward() -> None:
    span = Span("ro", "at", names.REWARD, 0.0, attributes={names.EVALUATION_NAME: "judge"})
    assert find_reward_spans([span]) == []


# -- messages, objects, exceptions, annotations ----------------------------------------------------------------------


class Point(BaseModel):
    x: int


@dataclass
class Pair:
    left: int
    right: Point


def test_a_message_is_text(recorded: Any) -> None:
    emit_message("grüß dich")
    assert recorded[0].name == names.MESSAGE
    assert recorded[0].attributes == {names.MESSAGE_BODY: "grüß dich"}
    with pytest.raises(ConfigError, match="not dict; use emit_object"):
        emit_message({"a": 1})


def test_an_object_is_kept_as_json(recorded: Any) -> None:
    for value in ({"a": [1, None]}, Point(x=1), Pair(1, Point(x=2))):
        emit_object(value)
    assert [json.loads(span.attributes[names.OBJECT_JSON]) for span in recorded] == [
        {"a": [1, None]},
        {"x": 1},
        {"left": 1, "right": {"x": 2}},
    ]
    assert recorded[0].attributes[names.OBJECT_TYPE] == "builtins.dict"
    assert recorded[1].attributes[names.OBJECT_TYPE].endswith("test_emit.Point")


@pytest.mark.parametrize("value", [object(), {"a": {1, 2}}, math.nan, [float("inf")], Point])
def test_an_object_with_no_json_form_is_refused(recorded: Any, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"emit_object\(.*cannot be written as JSON"):
        emit_object(value)
    assert recorded == []


def test_an_exception_is_kept_with_its_traceback(recorded: Any) -> None:
    try:
        raise KeyError("tool")
    except KeyError as error:
        emit_exception(error)
    span = recorded[0]
    assert (span.name, span.status_code) == (names.EXCEPTION, "ERROR")
    assert span.attributes[names.EXCEPTION_TYPE] == "KeyError"
    assert span.attributes[names.EXCEPTION_MESSAGE] == "'tool'"
    assert "test_an_exception_is_kept" in span.attributes[names.EXCEPTION_STACKTRACE]


def test_an_annotation_is_flattened(recorded: Any) -> None:
    emit_annotation({"user": {"plan": "free", "age": 3}, "tags": ["a", 1]})
    assert recorded[0].name == names.ANNOTATION
    assert recorded[0].attributes == {"user.plan": "free", "user.age": 3, "tags": '["a", 1]'}
    with pytest.raises(ConfigError, match="is empty"):
        emit_annotation({})


def test_further_attributes_are_recorded_and_change_nothing_of_what_is_said(recorded: Any) -> None:
    more = {"step": {"number": 2}, names.MESSAGE_BODY: "other", names.SCORE_VALUE: 9.0}
    emit_reward(0.5, attributes=more)
    emit_message("text", more)
    emit_object([1], attributes=more)
    emit_exception(ValueError("no"), attributes=more)
    assert [span.attributes["step.number"] for span in recorded] == [2] * 4
    assert get_reward_value(recorded[0]) == 0.5
    assert recorded[1].attributes[names.MESSAGE_BODY] == "text"


def test_what_is_not_propagated_is_checked_and_not_recorded(recorded: Any) -> None:
    emit_reward(1.0, propagate=False)
    emit_message("text", propagate=False)
    emit_object([1], propagate=False)
    emit_exception(ValueError("no"), propagate=False)
    emit_annotation({"a": 1}, propagate=False)
    with operation("step", propagate=False) as step:
        step.set_input(1)
        step.set_output(2)
    assert operation(lambda: 3, propagate=False)() == 3
    assert recorded == []
    with pytest.raises(RewardError):
        emit_reward(math.nan, propagate=False)


def test_one_of_several_rewards_may_be_the_one_that_counts(recorded: Any) -> None:
    emit_reward({"speed": 0.2, "task": 1}, primary_key="task")
    assert get_reward_value(recorded[0]) == 1.0
    kept = {name: value for name, value in recorded[0].attributes.items() if name.startswith("agentlightning.reward.")}
    assert kept == {
        "agentlightning.reward.0.name": "task",
        "agentlightning.reward.0.value": 1.0,
        "agentlightning.reward.1.name": "speed",
        "agentlightning.reward.1.value": 0.2,
    }
    for reward in ({"speed": 0.2}, 0.2):
        with pytest.raises(RewardError, match="primary_key='task'"):
            emit_reward(reward, primary_key="task")


def test_what_is_no_exception_is_refused(recorded: Any) -> None:
    with pytest.raises(ConfigError, match="takes an exception, not str; use emit_message"):
        emit_exception("x")  # type: ignore[arg-type]
    assert recorded == []
