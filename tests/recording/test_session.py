"""Promises about sessions: rollouts that the user's own code makes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.observability.metrics import Metrics
from agentlightning.recording.recorder import SESSION_QUEUE
from agentlightning.store.instrumented import instrument
from agentlightning.store.types import RolloutRecord
from agentlightning.tracing.otlp.exporter import OtlpExporter
from agentlightning.tracing.scope import scope
from agentlightning.tracing.tracer import tracer

Read = Callable[..., list[RolloutRecord]]


def messages(record: RolloutRecord) -> list[str]:
    return [s.attributes["agentlightning.message.body"] for s in record.spans if s.name == "agentlightning.message"]


def test_a_block_is_a_rollout_that_has_succeeded(recorded: Read) -> None:
    with agl.track_session({"question": "6 x 7"}, name="calculator", metadata={"user": 3}, mode="val") as session:
        agl.emit_message("thinking")
        agl.emit_reward(0.5)
    (record,) = recorded()
    rollout, attempt = record.rollout, record.attempts[0]
    assert (rollout.rollout_id, attempt.attempt_id) == (session.rollout_id, session.attempt_id)
    assert (rollout.input, rollout.status, rollout.mode) == ({"question": "6 x 7"}, "succeeded", "val")
    assert rollout.metadata == {"user": 3, "session": "calculator"}
    assert rollout.queue == SESSION_QUEUE
    assert attempt.status == "succeeded"
    assert rollout.start_time <= record.spans[0].start_time <= (rollout.end_time or 0)
    assert agl.find_final_reward(record.spans) == 0.5
    assert [span.sequence_id for span in record.spans] == [1, 2]


def test_what_the_block_raises_is_its_failure_and_reaches_the_caller(recorded: Read) -> None:
    with pytest.raises(ValueError, match="seven"), agl.track_session():
        int("seven")
    (record,) = recorded()
    assert (record.rollout.status, record.attempts[0].status) == ("failed", "failed")
    error = record.attempts[0].metadata["error"]
    assert (error["type"], "seven" in error["message"], "int(" in error["traceback"]) == ("ValueError", True, True)
    assert record.spans[-1].name == "agentlightning.exception"


@pytest.mark.parametrize(("code", "status"), [(0, "succeeded"), (None, "succeeded"), (3, "failed")])
def test_a_program_that_exits_has_succeeded_by_its_exit_code(recorded: Read, code: Any, status: str) -> None:
    with pytest.raises(SystemExit), agl.track_session():
        raise SystemExit(code)
    assert recorded()[0].rollout.status == status


def test_an_open_session_is_running_in_the_store(recorded: Read) -> None:
    with agl.track_session("a"):
        agl.emit_message("first")
        (record,) = recorded()
        assert (record.rollout.status, record.rollout.input, messages(record)) == ("running", "a", ["first"])
        agl.emit_message("second")
    (record,) = recorded()
    assert (record.rollout.status, messages(record)) == ("succeeded", ["first", "second"])


def test_a_span_that_ends_after_its_session_was_written_is_stored_too(recorded: Read) -> None:
    with agl.track_session("a") as session:
        agl.emit_message("within")
        late = tracer().start_span("late")
    assert recorded()[0].rollout.status == "succeeded"
    late.end()
    (record,) = recorded()
    assert (record.rollout.rollout_id, record.rollout.status) == (session.rollout_id, "succeeded")
    assert [span.name for span in record.spans] == ["agentlightning.message", "late"]
    assert (agl.recording_status().spans_written, agl.recording_status().sessions_written) == (2, 1)


def test_tasks_of_asyncio_each_have_the_session_they_opened(recorded: Read) -> None:
    async def agent(name: str) -> None:
        async with agl.track_session(name):
            await asyncio.sleep(0)
            await asyncio.gather(asyncio.to_thread(agl.emit_message, name), asyncio.sleep(0.001))

    async def main() -> None:
        await asyncio.gather(*(agent(name) for name in "abc"))

    asyncio.run(main())
    assert {(r.rollout.input, *messages(r)) for r in recorded()} == {("a", "a"), ("b", "b"), ("c", "c")}


def test_a_bare_thread_is_carried_into_the_session(recorded: Read) -> None:
    with agl.track_session(), agl.track_agent("writer"):
        threads = [threading.Thread(target=agl.carry_session(agl.emit_message), args=[text]) for text in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(agl.carry_session(agl.emit_message), "cd"))
    (record,) = recorded()
    assert sorted(messages(record)) == ["a", "b", "c", "d"]
    assert {span.attributes["gen_ai.agent.name"] for span in record.spans} == {"writer"}


def test_nested_agents_speak_under_their_own_names(recorded: Read) -> None:
    with agl.track_session(), agl.track_agent("planner"):
        agl.emit_message("plan")
        with agl.track_agent("writer"):
            agl.emit_message("draft")
        agl.emit_message("check")
    names = [span.attributes["gen_ai.agent.name"] for span in recorded()[0].spans]
    assert names == ["planner", "writer", "planner"]


def test_a_session_within_another_is_part_of_it(recorded: Read) -> None:
    with agl.track_session("outer") as outer, agl.track_session("inner", name="step") as inner:
        agl.emit_message("within")
        assert inner.rollout_id == outer.rollout_id
    (record,) = recorded()
    assert record.rollout.input == "outer"
    assert record.spans[0].attributes["agentlightning.session.task"] == "inner"
    assert record.spans[0].attributes["agentlightning.session.name"] == "step"


def test_in_an_attempt_of_a_runner_a_session_makes_no_rollout_of_its_own(tmp_path: Path) -> None:
    class Sink(list[agl.Span]):
        def put(self, spans: Any) -> None:
            self.extend(spans)

    sink = Sink()
    with scope("ro-1", "at-1", sink), agl.track_session() as session:
        agl.emit_reward(1.0)
    assert (session.rollout_id, [span.rollout_id for span in sink]) == ("ro-1", ["ro-1"])
    assert not (tmp_path / ".agentlightning").exists()


def test_a_decorated_function_makes_a_session_for_each_call(recorded: Read) -> None:
    @agl.track_session
    def add(a: int, b: int = 2) -> int:
        """Adds."""
        agl.emit_reward(float(a))
        return a + b

    @agl.track_session(name="slow", metadata={"k": 1})
    async def add_later(a: int) -> int:
        await asyncio.sleep(0)
        return a + 1

    assert (add(1), add(3, b=1), asyncio.run(add_later(5)), add.__doc__) == (3, 4, 6, "Adds.")
    found = [(r.rollout.input, r.rollout.metadata) for r in recorded()]
    assert [task for task, _ in found] == [{"a": 1}, {"a": 3, "b": 1}, {"a": 5}]
    assert found[2][1] == {"k": 1, "session": "slow"}
    assert found[0][1]["session"].endswith("add")


def test_a_task_is_kept_as_it_was_at_the_start(recorded: Read) -> None:
    task = {"numbers": [1]}
    with agl.track_session(task):
        task["numbers"].append(2)
    with agl.track_session(object()):
        pass
    with agl.track_session({"score": float("nan"), "text": "\ud83d"}):
        pass
    first, second, third = recorded()
    assert first.rollout.input == {"numbers": [1]}
    assert "object object" in second.rollout.input
    assert third.rollout.status == "succeeded"


def test_what_is_emitted_after_the_end_is_not_recorded(recorded: Read, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with agl.track_session():
            later = asyncio.create_task(asyncio.sleep(0.01))
            later.add_done_callback(lambda _: agl.emit_message("late"))
        await later

    asyncio.run(main())
    assert messages(recorded()[0]) == []


def test_arguments_of_the_wrong_kind_are_refused_by_name() -> None:
    wrong: Any
    for wrong, word in (({"store": 3}, "store=3"), ({"metadata": "x"}, "metadata='x'"), ({"name": 1}, "name=1")):
        with pytest.raises(agl.errors.ConfigError, match=word):
            agl.track_session(**wrong)
    with pytest.raises(agl.errors.ConfigError, match="mode='live'"):
        agl.track_session(mode="live")  # pyright: ignore
    with pytest.raises(agl.errors.ConfigError, match="has not begun"):
        _ = agl.track_session().rollout_id
    session = agl.track_session()
    with session, pytest.raises(agl.errors.ConfigError, match="used once"):
        session.__enter__()

    def stream() -> Any:
        yield 1

    with pytest.raises(agl.errors.ConfigError, match=r"generator .*stream.*loop that consumes it"):
        agl.track_session(stream)


def test_the_store_is_the_one_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Read) -> None:
    with agl.track_session("by path", store=tmp_path / "other.db"):
        pass
    monkeypatch.setenv("AGL_STORE", str(tmp_path / "hub"))
    (tmp_path / "hub").mkdir()
    with agl.track_session("by variable"):
        pass
    given = agl.LightningStore(tmp_path / "third.db")
    with agl.track_session("by object", store=given):
        pass
    assert [r.rollout.input for r in recorded(tmp_path / "other.db")] == ["by path"]
    assert [r.rollout.input for r in recorded()] == ["by variable"]
    assert (tmp_path / "hub" / "store.db").exists()
    assert [r.rollout.input for r in recorded(given)] == ["by object"]
    asyncio.run(given.close())


def test_opening_a_store_finds_the_sessions_that_have_just_ended() -> None:
    with agl.track_session("now"):
        agl.emit_reward(1.0)
    store = agl.LightningStore()
    assert [r.input for r in asyncio.run(store.query_rollouts())] == ["now"]
    asyncio.run(store.close())


def test_a_remote_store_gets_the_same(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = agl.LightningStore(tmp_path / "served.db")
    monkeypatch.setenv("AGL_STORE", hub.serve(served))
    with agl.track_session("remote"):
        agl.emit_message("open")
        assert agl.flush_recording()
    with agl.track_session("whole"):
        agl.emit_reward(1.0)
    assert agl.flush_recording()
    client = agl.LightningStore()
    assert isinstance(client, agl.LightningStoreClient)
    found = asyncio.run(served.query_rollouts())
    assert [(r.input, r.status) for r in found] == [("remote", "succeeded"), ("whole", "succeeded")]
    assert json.dumps(asyncio.run(served.statistics()))
    asyncio.run(client.close())
    agl.flush_recording()


def test_a_session_over_a_server_is_sent_on_and_counted_as_any_other(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[agl.Span] = []
    exporter = OtlpExporter("http://127.0.0.1:9")
    monkeypatch.setattr(exporter, "put", sent.extend)
    bare = agl.LightningStore(tmp_path / "served.db")
    metrics = Metrics(bare)
    monkeypatch.setenv("AGL_STORE", hub.serve(instrument(bare, [exporter, metrics])))
    for task in ("whole", "flushed"):
        with agl.track_session(task):
            agl.emit_reward(1.0)
            if task == "flushed":
                assert agl.flush_recording()
                agl.emit_message("and more")
    assert agl.flush_recording()
    assert [span.name for span in sent].count("gen_ai.evaluation.result") == 2
    kept = asyncio.run(bare.statistics())["spans"]
    assert len(sent) == kept > 2
    assert f"agentlightning_spans_received_total {float(kept)}" in asyncio.run(metrics.render()).decode()
    asyncio.run(bare.close())
    agl.flush_recording()


def test_postgresql_gets_the_same(postgres_store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_STORE", postgres_store_url)
    with agl.track_session("on postgres"):
        agl.emit_reward(1.0)
    store = agl.LightningStore()
    assert [(r.input, r.status) for r in asyncio.run(store.query_rollouts())] == [("on postgres", "succeeded")]
    asyncio.run(store.close())


def test_counters_tell_what_was_recorded(recorded: Read) -> None:
    for _ in range(3):
        with agl.track_session():
            agl.emit_reward(1.0)
    recorded()
    status = agl.recording_status()
    assert (status.sessions, status.sessions_written, status.spans_written) == (3, 3, 3)
    assert (status.sessions_lost, status.spans_dropped, status.waiting, status.problem) == (0, 0, 0, "")
