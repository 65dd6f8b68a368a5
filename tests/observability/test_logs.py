"""The log: ids where they belong, JSON that machines read, no secrets, and what was slow."""

import json
import logging
import sys

import orjson
import pytest

from agentlightning.attempt_address import attempt_key
from agentlightning.observability import logs
from agentlightning.store import InMemoryLightningStore
from agentlightning.store.instrumented import CallRecord, instrument


@pytest.fixture
def write():
    """Format one record as the log would."""

    def write(formatter, message, *args, **extra):
        record = logging.LogRecord("agentlightning.x", logging.WARNING, "x.py", 1, message, args, None)
        record.__dict__.update(extra)
        return formatter.format(record)

    return write


def test_a_json_line_has_the_message_the_level_and_the_ids(write):
    line = json.loads(write(logs.JsonFormatter(), "took %d", 3, rollout_id="ro-1", status=200))
    assert (line["message"], line["level"], line["rollout_id"], line["status"]) == ("took 3", "warning", "ro-1", 200)
    assert line["time"].endswith("+00:00")


def test_everything_inside_about_is_about_its_ids(write):
    with logs.about(rollout_id="ro-1"), logs.about(attempt_id="at-1", worker_id=None):
        line = json.loads(write(logs.JsonFormatter(), "x"))
    assert {"rollout_id": "ro-1", "attempt_id": "at-1"}.items() <= line.items()
    assert "worker_id" not in line
    assert "rollout_id" not in json.loads(write(logs.JsonFormatter(), "x"))


def test_text_is_for_people(write):
    text = write(logs.TextFormatter(), "it is late", worker_id="w1", seconds=0.123456)
    assert text.endswith("WARNING it is late (worker_id=w1, seconds=0.123)")


def test_what_agents_say_stays_on_its_line_and_moves_no_cursor(write):
    said = "it failed: \n12:00:00 WARNING all is well\x1b[2J\x9b1A\u202e\r"
    text = write(logs.TextFormatter(), "%s", said, worker_id="w\n1")
    assert text.isprintable()
    assert r"it failed: \n12:00:00 WARNING all is well\x1b[2J" in text
    try:
        raise ValueError(said)
    except ValueError:
        record = logging.LogRecord("agentlightning.x", logging.WARNING, "x.py", 1, "so", (), sys.exc_info())
    first, *others = logs.TextFormatter().format(record).split("\n")
    assert first.endswith("so")
    assert others
    assert all(line.startswith("    ") and line.isprintable() for line in others)


def test_what_cannot_be_json_is_logged_all_the_same(write):
    assert json.loads(write(logs.JsonFormatter(), "x", method=object()))["method"].startswith("<object")


@pytest.mark.parametrize("formatter", [logs.JsonFormatter, logs.TextFormatter])
def test_no_key_no_token_and_no_password_reaches_a_log(write, formatter):
    key = attempt_key("s", "ro-1", "at-1")
    message = f"{key} and Authorization: Bearer abc.def, hunter2, postgresql://me:swordfish@db/x"
    text = write(formatter("hunter2"), message)
    assert not [secret for secret in (key, "abc.def", "hunter2", "swordfish") if secret in text]
    assert "postgresql://" in text
    assert "@db/x" in text


def test_configure_writes_our_log_to_stderr(capsys):
    root, ours = logging.getLogger(), logging.getLogger("agentlightning")
    before = root.handlers[:], root.level, ours.level
    try:
        logs.configure("json")
        ours.info("hello")
        logging.getLogger("other").info("not wanted")
        logging.getLogger("other").warning("wanted")
    finally:
        root.handlers[:], root.level = before[0], before[1]
        ours.setLevel(before[2])
    lines = [orjson.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == ["hello", "wanted"]


async def test_failures_cancellations_and_limits_are_logged_with_their_ids(caplog):
    bare = InMemoryLightningStore()
    store = instrument(bare, [logs.ChangeLog()])
    failed = await store.start_rollout("a task")
    ids = failed.rollout_id, failed.attempt.attempt_id
    cancelled = await store.enqueue_rollout("another")
    with caplog.at_level(logging.INFO, "agentlightning.observability.logs"):
        error = {"type": "ValueError", "message": "no idea" + 1000 * "!"}
        await store.update_attempt(*ids, status="failed", metadata={"error": error})
        await store.requeue_rollout(failed.rollout_id, "again")
        await store.cancel_rollout(cancelled.rollout_id)
        await store.update_queue("train", 3)
        await store.update_queue("train", None)
    await bare.close()
    texts = [record.getMessage() for record in caplog.records]
    assert texts[0].startswith("an attempt ended as failed: ValueError: no idea!")
    assert len(texts[0]) <= logs.MAX_MESSAGE
    assert texts[1:] == [
        "a rollout was requeued",
        "a rollout was cancelled",
        "the queue 'train' is limited to 3 open rollouts",
        "the queue 'train' is unlimited",
    ]
    assert (caplog.records[0].rollout_id, caplog.records[0].attempt_id) == ids


def slow_call(seconds=1.0, method="add_many_spans", **options):
    return CallRecord(method, options, seconds)


def test_a_slow_call_is_mentioned_with_its_method_and_ids(caplog):
    log = logs.SlowLog(0.5)
    log.on_end(slow_call(0.4))
    log.on_end(slow_call(0.6, "update_attempt", rollout_id="ro-1", attempt_id="at-1"))
    log.request_ended("/v1/agl/spans", "GET", 200, 0.7)
    first, second = caplog.records
    assert "600 ms for update_attempt" in first.getMessage()
    assert (first.rollout_id, first.attempt_id) == ("ro-1", "at-1")
    assert "GET /v1/agl/spans took 700 ms" in second.getMessage()


def test_waiting_is_not_slow(caplog):
    logs.SlowLog(0.5).on_end(slow_call(60, "wait_for_rollouts"))
    assert not caplog.records


def test_a_slow_minute_does_not_flood_the_log(caplog, monkeypatch):
    log, now = logs.SlowLog(0.5), [0.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    for _ in range(100):
        log.on_end(slow_call())
    assert len(caplog.records) == logs.SLOW_LINES
    now[0] = 60.0
    log.on_end(slow_call())
    assert caplog.records[-1].unreported == 100 - logs.SLOW_LINES
