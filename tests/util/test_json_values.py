"""An integer of any size stays itself: in JSON, between processes, in a store and over HTTP."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.support.store_hub import StoreHub

from agentlightning.rollouts import Attempt, AttemptedRollout
from agentlightning.runner.hosts.messages import FrameDecoder, Job, encode
from agentlightning.span import Span
from agentlightning.store import LightningStore
from agentlightning.util.json_values import dumps, loads, recorded_objects

LARGE = 2**70
VALUE: dict[str, Any] = {"a": LARGE, "b": [-LARGE, {"c": 2**64}, 1.5, 2**63, None, True, "x"]}


@pytest.mark.parametrize("value", [VALUE, LARGE, [10**300], {"exact": 2**64 - 1}, {"float": 1e30}])
def test_what_is_written_is_read(value: Any) -> None:
    assert loads(dumps(value)) == value == json.loads(dumps(value))
    assert loads(dumps(value).decode()) == value
    assert dumps({"z": LARGE, "a": value}, option=orjson.OPT_SORT_KEYS).startswith(b'{"a"')


def test_values_behind_a_default_are_written_too() -> None:
    @dataclasses.dataclass
    class Record:
        n: int

    written = dumps([LARGE, Record(LARGE)], dataclasses.asdict, orjson.OPT_PASSTHROUGH_DATACLASS)
    assert loads(written) == [LARGE, {"n": LARGE}]
    with pytest.raises(TypeError, match="not JSON serializable"):
        dumps([LARGE, object()])


@pytest.mark.parametrize("text", [b"", b"[1,]", b"NaN", b'{"a": }', b"\xff", b"1" * 5000])
def test_what_is_no_json_is_refused_as_before(text: bytes) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        loads(text)


def test_a_job_reaches_its_host_as_it_is() -> None:
    rollout = AttemptedRollout("ro-1", VALUE, 0.0, attempt=Attempt("ro-1", "at-1", 1, 0.0))
    frame = encode(Job(rollout, {"llm": {"sampling_parameters": VALUE}}, "http://h", {}))
    (job,) = FrameDecoder[Job](Job).feed(frame)
    assert (job.rollout.input, job.resources) == (VALUE, {"llm": {"sampling_parameters": VALUE}})


@pytest.mark.parametrize("place", ["file", "server"])
async def test_a_store_keeps_it(place: str, tmp_path: Path, hub: StoreHub) -> None:
    own = LightningStore(tmp_path / "s.db")
    store = own if place == "file" else LightningStore(hub.serve(own))
    try:
        rollout = await store.enqueue_rollout(VALUE, metadata={"m": LARGE})
        (found,) = await store.dequeue_many_rollouts(1)
        assert (found.input, found.metadata["m"]) == (VALUE, LARGE)
        await store.add_span(Span(found.rollout_id, found.attempt.attempt_id, "s", 1.0, attributes={"n": LARGE}))
        (kept,) = await store.query_spans(rollout.rollout_id)
        assert kept.attributes["n"] == LARGE
    finally:
        if store is not own:
            await store.close()
        await own.close()


@pytest.mark.parametrize(
    ("recorded", "found"),
    [
        ('[{"a": 1}, 2, {"b": null}]', [{"a": 1}, {"b": None}]),
        ([{"a": 1}, "text"], [{"a": 1}]),
        (b'[{"a": 18446744073709551617}]', [{"a": 2**64 + 1}]),
        ('[{"a": NaN}]', [{"a": pytest.approx(float("nan"), nan_ok=True)}]),
        ('{"a": 1}', []),
        ("[", []),
        (None, []),
    ],
)
def test_a_recorded_list_is_read_in_whatever_form_it_came(recorded: object, found: list[dict[str, object]]) -> None:
    assert recorded_objects(recorded) == found
