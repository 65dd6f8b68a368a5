"""A run and a database of an earlier version are resumed and opened without a loss.

`make_fixtures.py` says which version made the archives, and how.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from typer.testing import CliRunner

import agentlightning as agl
from agentlightning.cli.main import build

FIXTURES = Path(__file__).parent / "fixtures"
AGL = str(Path(sys.executable).parent / "agl")
TOKENS = ("agentlightning.prompt_token_ids", "agentlightning.response_token_ids", "agentlightning.logprobs")

Unpack = Callable[[str], dict[str, Any]]


@pytest.fixture
def unpack(tmp_path: Path) -> Unpack:
    """Put the files of an archive into `tmp_path`; returns what the version that made them read from them."""

    def unpack(name: str) -> dict[str, Any]:
        with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
            archive.extractall(tmp_path, filter="data")
        return json.loads((tmp_path / "expected.json").read_bytes())

    return unpack


def as_json(value: Any) -> Any:
    return orjson.loads(orjson.dumps(value, default=lambda model: model.model_dump(mode="json")))


# -- a database --------------------------------------------------------------------------------------------------------


async def test_a_database_reads_as_it_did(unpack: Unpack, tmp_path: Path) -> None:
    expected = unpack("database")
    store = agl.LightningStore(tmp_path / "store.db")
    assert as_json(await store.query_rollouts()) == expected["rollouts"]
    for rollout_id, attempts in expected["attempts"].items():
        assert as_json(await store.query_attempts(rollout_id)) == attempts
        assert as_json(await store.query_spans(rollout_id)) == expected["spans"][rollout_id]
    assert as_json(await store.query_resources()) == expected["resources"]
    assert as_json(await store.query_workers()) == expected["workers"]
    assert as_json(await store.query_queues()) == expected["queues"]
    assert expected["statistics"].items() <= (await store.statistics()).items()
    await store.close()


def test_the_database_holds_every_state_and_tokens(unpack: Unpack) -> None:
    """So that the test above is about all of them."""
    expected = unpack("database")
    rollouts = {each["status"] for each in expected["rollouts"]}
    attempts = {each["status"] for several in expected["attempts"].values() for each in several}
    spans = [each["attributes"] for several in expected["spans"].values() for each in several]
    assert rollouts == {"queuing", "preparing", "running", "succeeded", "failed", "cancelled", "requeuing"}
    assert attempts == {"preparing", "running", "succeeded", "failed", "timeout", "unresponsive"}
    assert {each["status"] for each in expected["workers"]} == {"busy", "idle"}
    calls = [each for each in spans if TOKENS[0] in each]
    assert [len(calls[2][name]) for name in TOKENS] == [1500 + 2 * 23, 20, 20]
    assert {key for each in spans for key in each} >= {"agentlightning.superseded", "agentlightning.reward.values"}


async def test_what_waits_in_a_database_is_claimed_and_finished(unpack: Unpack, tmp_path: Path) -> None:
    unpack("database")
    store = agl.LightningStore(tmp_path / "store.db")
    claimed = await store.dequeue_many_rollouts(9, "w-new", queues=["train"])
    assert [each.rollout_id for each in claimed] == ["ro-urgent", "ro-leased", "ro-queued"]
    assert await store.dequeue_rollout("w-new", queues=["paused"]) is None
    again = await store.dequeue_rollout("w-new", queues=["test"])
    assert again is not None
    assert (again.rollout_id, again.attempt.sequence_id) == ("ro-requeuing", 2)
    ids = again.rollout_id, again.attempt.attempt_id
    await store.add_span(agl.Span(*ids, "work", start_time=1.0, attributes={TOKENS[0]: [1, 2, 3]}))
    await store.update_attempt(*ids, status="succeeded")
    (done,) = await store.wait_for_rollouts(rollout_ids=[again.rollout_id], timeout=10)
    assert done.status == "succeeded"
    assert [each.status for each in await store.query_attempts(again.rollout_id)] == ["failed", "succeeded"]
    running = await store.get_latest_attempt("ro-running")
    assert running is not None
    span = await store.add_span(agl.Span("ro-running", running.attempt_id, "more", start_time=1.0))
    assert span.sequence_id == 7
    await store.update_attempt("ro-running", running.attempt_id, status="failed")
    requeued = await store.get_rollout_by_id("ro-running")
    assert requeued is not None
    assert requeued.status == "requeuing"
    await store.close()


async def test_calls_that_were_answered_are_not_done_again(unpack: Unpack, tmp_path: Path, hub: Any) -> None:
    expected = unpack("database")
    store = agl.LightningStore(tmp_path / "store.db")
    async with httpx.AsyncClient(base_url=hub.serve(store) + "/v1/agl", verify=False) as http:
        for call in expected["answered"]:
            head = {"content-type": "application/json", "idempotency-key": call["key"]}
            reply = await http.post(call["path"], content=call["sent"], headers=head)
            assert (reply.status_code, reply.json()) == (call["status"], call["answer"])
    assert len(await store.query_rollouts()) == len(expected["rollouts"])
    assert len(await store.query_resources()) == len(expected["resources"])
    await store.close()


# -- a run -------------------------------------------------------------------------------------------------------------


def agl_train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENAI_API_KEY": "sk-of-its-user"}
    command = [AGL, "train", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)


def leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their full names."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value if not isinstance(value, list) else tuple(value)


def test_the_settings_of_a_run_are_understood(unpack: Unpack, tmp_path: Path) -> None:
    expected = unpack("run")
    shown = CliRunner().invoke(build(), ["train", "--resume", str(tmp_path / "run"), "--print-config"])
    assert shown.exit_code == 0, shown.output
    before = dict(leaves(tomllib.loads((tmp_path / "run" / "config.toml").read_text())))
    assert before.pop("algorithm.credit") == "uniform", "which is read as an alias of group_relative"
    assert before.items() <= dict(leaves(tomllib.loads(shown.stdout))).items()
    assert before["algorithm.steps"] == expected["report"]["steps"] == 3


@pytest.mark.slow
def test_a_run_goes_on_where_it_was(unpack: Unpack, tmp_path: Path) -> None:
    """With its weights, its optimiser, its metrics and what it measured at the start."""
    before = unpack("run")["report"]
    run = tmp_path / "run"
    lines = (run / "metrics.jsonl").read_bytes().splitlines()
    again = agl_train(tmp_path, "--resume", "run", "--json", f"runner.cwd={tmp_path}")
    assert again.returncode == 0, again.stderr
    finished = json.loads(again.stdout.splitlines()[-1])
    assert finished["held_out"] == before["held_out"], "nothing was left to do"
    assert (finished["steps"], finished["rollouts"]) == (3, 48)

    more = agl_train(tmp_path, "--resume", "run", "--json", "algorithm.steps=5")
    assert more.returncode == 0, more.stderr
    report = json.loads(more.stdout.splitlines()[-1])
    assert (report["steps"], report["rollouts"], report["failed_rollouts"]) == (5, 80, 0)
    for mode, gain in report["held_out"].items():
        assert gain["before"] == before["held_out"][mode]["before"]
    metrics = (run / "metrics.jsonl").read_bytes().splitlines()
    assert metrics[: len(lines)] == lines
    assert [json.loads(line)["step"] for line in metrics] == [1, 2, 3, 4, 5]
    state = json.loads((run / "state.json").read_bytes())
    assert (state["step"], state["checkpoint"]) == (5, "checkpoints/step-000005")
