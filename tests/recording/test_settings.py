"""Promises about recording in production: sampling, redaction, retention."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.store.types import RolloutRecord
from agentlightning.tracing.tracer import tracer

Read = Callable[..., list[RolloutRecord]]


def test_sessions_are_sampled_as_wholes_and_the_kept_ones_hold_their_rate(recorded: Read) -> None:
    agl.configure_recording(sampling_rate=0.25)
    for number in range(400):
        with agl.track_session(number):
            agl.emit_message("first")
            agl.emit_reward(1.0)
    kept = recorded()
    status = agl.recording_status()
    assert 40 < len(kept) < 180  # 100 expected, with a standard deviation of 8.7
    assert (status.sessions, status.sessions_sampled_out) == (len(kept), 400 - len(kept))
    assert all(len(record.spans) == 2 for record in kept)
    assert all(record.rollout.metadata["sampling_rate"] == 0.25 for record in kept)


def test_without_sampling_no_rate_is_recorded_and_with_none_nothing_is(recorded: Read, tmp_path: Path) -> None:
    agl.configure_recording(sampling_rate=0)
    with agl.track_session() as session:
        agl.emit_reward(1.0)
    assert session.rollout_id
    assert not (tmp_path / ".agentlightning").exists()
    agl.configure_recording()
    with agl.track_session():
        pass
    assert "sampling_rate" not in recorded()[0].rollout.metadata


def without_secrets(attributes: dict[str, Any]) -> dict[str, Any]:
    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items()}
        return value.replace("hunter2", "***") if isinstance(value, str) else value

    return {key: clean(value) for key, value in attributes.items() if key != "secret"}


def test_nothing_of_what_the_hook_removes_reaches_the_store(recorded: Read, tmp_path: Path) -> None:
    agl.configure_recording(redact=without_secrets)

    def agent() -> None:
        with agl.track_session({"password": "hunter2"}, metadata={"u": "hunter2"}):
            agl.emit_prompt("my password is hunter2", "hunter2, understood")
            agl.emit_annotation({"secret": "hunter2", "public": "yes"})
            with tracer().start_as_current_span("request") as span:
                span.add_event("note", {"text": "hunter2"})
            recorded()  # an open session is written by other calls than one that has ended
            raise ValueError("hunter2 is wrong")

    with pytest.raises(ValueError, match="hunter2"):
        agent()
    (record,) = recorded()
    assert record.rollout.input == {"password": "***"}
    assert record.rollout.metadata == {"u": "***", "session": ""}
    assert record.attempts[0].metadata["error"]["message"] == "*** is wrong"
    assert "my password is ***" in record.spans[0].attributes["gen_ai.input.messages"]
    assert "secret" not in record.spans[1].attributes
    assert record.spans[1].attributes["public"] == "yes"
    assert record.spans[2].events[0].attributes["text"] == "***"
    assert record.spans[3].status_message == "ValueError: *** is wrong"
    assert "hunter2" not in repr(record)
    agl.flush_recording()
    stored = b"".join(path.read_bytes() for path in (tmp_path / ".agentlightning").iterdir())
    assert b"hunter2" not in stored


def test_what_a_failing_hook_was_called_for_is_not_stored(recorded: Read, caplog: pytest.LogCaptureFixture) -> None:
    def fragile(attributes: dict[str, Any]) -> dict[str, Any]:
        if "hunter2" in repr(attributes):
            raise RuntimeError("cannot decide")
        return attributes

    agl.configure_recording(redact=fragile)
    with agl.track_session("hunter2", name="kept"):
        agl.emit_message("hunter2")
        agl.emit_message("fine")
    with pytest.raises(ValueError, match="hunter2"), agl.track_session("fine"):
        raise ValueError("hunter2")
    first, second = recorded()
    assert (first.rollout.input, first.rollout.metadata) == (None, {"session": "kept"})
    assert [span.attributes["agentlightning.message.body"] for span in first.spans] == ["fine"]
    error = second.attempts[0].metadata["error"]
    assert error == {"type": "ValueError", "message": "", "traceback": ""}
    assert (second.spans, second.rollout.status) == ((), "failed")
    status = agl.recording_status()
    assert (status.redactions_failed, status.spans_dropped) == (4, 2)
    assert len([r for r in caplog.records if "redact failed" in r.message]) == 1
    agl.configure_recording(redact=lambda attributes: None)  # type: ignore[arg-type, return-value]
    with agl.track_session():
        agl.emit_message("dropped")
    assert recorded()[2].spans == ()


def test_what_exceeds_the_retention_is_removed(recorded: Read) -> None:
    for number in range(5):
        with agl.track_session(number):
            pass
        recorded()
    agl.configure_recording(retention=agl.Retention(max_rollouts=2))
    with agl.track_session(5):
        pass
    deadline = time.monotonic() + 30
    while asyncio.run(recorded_inputs()) != [4, 5]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


async def recorded_inputs() -> list[Any]:
    """In one query: what a first query lists may be removed before a second one reads it."""
    assert agl.flush_recording()
    store = agl.LightningStore()
    try:
        return [rollout.input for rollout in await store.query_rollouts()]
    finally:
        await store.close()


def test_the_store_that_is_configured_is_the_default(recorded: Read, tmp_path: Path) -> None:
    agl.configure_recording(store=tmp_path / "default.db")
    with agl.track_session("default"):
        pass
    with agl.track_session("named", store=tmp_path / "named.db"):
        pass
    assert [record.rollout.input for record in recorded(tmp_path / "default.db")] == ["default"]
    assert [record.rollout.input for record in recorded(tmp_path / "named.db")] == ["named"]


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"sampling_rate": 1.5}, "sampling_rate=1.5 is no probability"),
        ({"sampling_rate": float("nan")}, "sampling_rate=nan"),
        ({"sampling_rate": True}, "sampling_rate=True"),
        ({"redact": "names"}, "redact='names' cannot be called"),
        ({"retention": 7}, "retention=7"),
        ({"store": 7}, "store=7"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(wrong: Any, word: str) -> None:
    with pytest.raises(agl.errors.ConfigError, match=word):
        agl.configure_recording(**wrong)
