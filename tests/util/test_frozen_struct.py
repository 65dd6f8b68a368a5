"""Spans, rollouts and attempts behave as the frozen dataclasses they are documented to be."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from typing import Any

import orjson
import pytest
from pydantic import BaseModel, ValidationError

from agentlightning.rollouts import Attempt, AttemptedRollout, EnqueueRolloutRequest, Rollout, RolloutConfig
from agentlightning.span import Span, SpanEvent
from agentlightning.util.frozen_struct import FrozenStruct

ATTEMPT = Attempt("ro-1", "at-1", 1, 2.0)
CLAIMED = AttemptedRollout("ro-1", {"question": [1]}, 1.0, config=RolloutConfig(max_attempts=3), attempt=ATTEMPT)
SPAN = Span("ro-1", "at-1", "work", 1.5, attributes={"a": [1]}, events=(SpanEvent("e", 1.0, {"b": 2}),))
ALL = [SPAN, SPAN.events[0], ATTEMPT, CLAIMED, Rollout("ro-1", None, 1.0), EnqueueRolloutRequest({"x": 1})]
every = pytest.mark.parametrize("value", ALL, ids=lambda value: type(value).__name__)


@every
def test_it_cannot_be_changed(value: FrozenStruct) -> None:
    with pytest.raises(AttributeError):
        setattr(value, dataclasses.fields(value)[0].name, "other")


@every
def test_it_survives_copying_and_the_way_to_another_process(value: FrozenStruct) -> None:
    copies = copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value)), dataclasses.replace(value)
    for again in copies:
        assert type(again) is type(value)
        assert again == value


@every
def test_the_tools_for_dataclasses_know_it(value: FrozenStruct) -> None:
    assert dataclasses.is_dataclass(value)
    made = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    assert type(value)(**made) == value
    assert dataclasses.asdict(value).keys() == made.keys()
    assert repr(value).startswith(f"{type(value).__name__}({next(iter(made))}=")


def test_a_changed_copy_leaves_the_first_alone() -> None:
    moved = dataclasses.replace(CLAIMED, status="running", attempt=dataclasses.replace(ATTEMPT, status="running"))
    assert (moved.status, moved.attempt.status, moved.input) == ("running", "running", {"question": [1]})
    assert (CLAIMED.status, CLAIMED.attempt.status) == ("queuing", "preparing")
    with pytest.raises(TypeError):
        dataclasses.replace(CLAIMED, colour="red")  # pyright: ignore


def test_no_two_share_what_they_were_not_given() -> None:
    first, second = (Span("ro-1", "at-1", "work", 1.0) for _ in range(2))
    first.attributes["changed"] = first.resource["changed"] = True
    assert (second.attributes, second.resource) == ({}, {})


def test_a_claimed_rollout_is_a_rollout_but_equal_to_none() -> None:
    fields = {field.name: getattr(CLAIMED, field.name) for field in dataclasses.fields(Rollout)}
    assert isinstance(CLAIMED, Rollout)
    assert Rollout(**fields) != CLAIMED
    assert not CLAIMED.finished


def test_orjson_writes_it() -> None:
    assert orjson.loads(orjson.dumps(SPAN)) == json.loads(json.dumps(dataclasses.asdict(SPAN)))


class Note(BaseModel):
    """What a user keeps a span in."""

    span: Span
    rollout: Rollout | None = None


def test_a_pydantic_model_holds_it_as_it_is_and_reads_it_from_json() -> None:
    note = Note(span=SPAN, rollout=Rollout("ro-1", {"x": 1}, 1.0, config=RolloutConfig(timeout_seconds=5)))
    assert note.span is SPAN
    assert Note.model_validate_json(note.model_dump_json()) == note
    plain: dict[str, Any] = {"rollout_id": "ro-1", "attempt_id": "at-1", "name": "work", "start_time": 1}
    assert Note.model_validate({"span": plain}).span == Span("ro-1", "at-1", "work", 1.0)
    with pytest.raises(ValidationError, match="start_time"):
        Note.model_validate({"span": plain | {"start_time": "soon"}})
