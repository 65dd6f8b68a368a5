"""`agl store`: what a user types, and what comes back."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agentlightning.cli import store as verbs
from agentlightning.cli.main import build
from agentlightning.rollouts import Attempt, Rollout
from agentlightning.server.app import Server
from agentlightning.span import OPERATION_NAME, PROMPT_TOKEN_IDS, REQUEST_MODEL, Span
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.store.types import RolloutRecord
from agentlightning.training.persistence.run_dir import RunDir, RunState

pytestmark = pytest.mark.integration

Agl = Callable[..., Result]
DAY = 86400.0


@pytest.fixture
def agl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Agl:
    """Runs `agl store ...` in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGL_TOKEN", raising=False)
    app = build()
    return lambda *words, **options: CliRunner().invoke(app, ["store", *words], **options)


def record(number: int, age_days: float) -> RolloutRecord:
    rollout_id, attempt_id = f"ro-{number}", f"at-{number}"
    end = time.time() - age_days * DAY
    attributes = {PROMPT_TOKEN_IDS: list(range(2000)), "text": f"{number}" * 1000}
    return RolloutRecord(
        Rollout(rollout_id, "task", end - 2, status="succeeded", mode="train", end_time=end, queue="train"),
        (Attempt(rollout_id, attempt_id, 1, end - 1, "succeeded", end),),
        (Span(rollout_id, attempt_id, "chat", end - 1, end, 1, "", f"s{number}", attributes=attributes),),
    )


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with ten rollouts that finished 1 to 10 days ago, and one that waits."""
    path = tmp_path_factory.mktemp("store") / "some.db"

    async def fill() -> None:
        store = LightningStore(path)
        await store.add_records([record(age, age) for age in range(10, 0, -1)])
        await store.enqueue_rollout("waits", mode="val")
        await store.update_queue("val", 5)
        await store.close()

    asyncio.run(fill())
    return path


@pytest.fixture
def path(filled: Path, tmp_path: Path) -> str:
    """A copy of it."""
    return str(shutil.copy(filled, tmp_path))


def answer(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_stats_shows_what_there_is(agl: Agl, path: str) -> None:
    result = agl("stats", "--store", path)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["rollouts", "11", "1", "queuing", "10", "succeeded"] in lines
    assert ["spans", "10"] in lines
    assert "queue val: 1 waiting, 0 open of at most 5" in result.stdout


def test_what_an_agent_wrote_moves_no_cursor_and_is_shown_as_it_is(agl: Agl) -> None:
    rollout = Rollout("ro-1", "say \x1b[2J :fire: [red]", 0.0, status="failed", end_time=1.0)
    error = {"type": "KeyError", "message": "\x1b]0;title\x07"}
    attempt = Attempt(rollout.rollout_id, "at-1", 1, 0.0, "failed", 1.0, metadata={"error": error})
    ids = rollout.rollout_id, "at-1"
    spans = [Span(*ids, "name\nattempt 2 at-2 succeeded\x9b1A", 0.0, sequence_id=1, span_id="1")]
    call = {OPERATION_NAME: "chat", REQUEST_MODEL: "m"}
    spans.append(Span(*ids, "chat \x1b[1A", 0.0, sequence_id=2, span_id="2", attributes=call))

    async def fill() -> None:
        store = LightningStore("written.db")
        await store.add_records([RolloutRecord(rollout, (attempt,), tuple(spans))])
        await store.close()

    asyncio.run(fill())
    for verb in ("show", "list"):
        lines = agl(verb, "--store", "written.db").output.splitlines()
        assert all(line.isprintable() for line in lines), lines
        assert any(r"say \x1b[2J :fire: [red]" in line for line in lines)
        assert any(r"\x1b]0;title\x07" in line for line in lines)
    assert any(
        r"name\nattempt 2 at-2 succeeded\x9b1A" in line
        for line in agl("show", "--store", "written.db").output.splitlines()
    )


def test_a_failure_without_a_message_has_its_line_in_the_list(agl: Agl) -> None:
    async def fill() -> None:
        store = LightningStore("silent.db")
        started = await store.start_rollout("a task")
        failed = {"error": {"type": "ValueError", "message": ""}}
        await store.update_attempt(started.rollout_id, started.attempt.attempt_id, status="failed", metadata=failed)
        await store.close()

    asyncio.run(fill())
    done = agl("list", "--store", "silent.db")
    assert (done.exit_code, "ValueError" in done.stdout) == (0, True), done.output


def test_stats_for_machines(agl: Agl, path: str) -> None:
    found = answer(agl("stats", "--store", path, "--json"))
    assert found["statistics"]["rollouts.succeeded"] == 10
    assert found["statistics"]["bytes"] > 0
    assert {"name": "val", "limit": 5, "waiting": 1, "open": 0} in found["queues"]


def test_the_default_store_is_that_of_the_directory(agl: Agl, path: str) -> None:
    result = agl("stats")
    assert result.exit_code == 2
    assert "/.agentlightning/store.db; give --store PATH or URL" in result.stderr
    assert not Path(".agentlightning").exists()
    Path(".agentlightning").mkdir()
    Path(path).rename(".agentlightning/store.db")
    assert answer(agl("stats", "--json"))["statistics"]["spans"] == 10


def test_a_variable_names_the_store_where_no_option_does(
    agl: Agl, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Any
) -> None:
    monkeypatch.setenv("AGL_STORE", path)
    assert answer(agl("stats", "--json"))["statistics"]["spans"] == 10
    served = InMemoryLightningStore()
    monkeypatch.setenv("AGL_STORE", hub.serve(served))
    assert answer(agl("stats", "--json"))["statistics"]["spans"] == 0
    assert answer(agl("stats", "--store", path, "--json"))["statistics"]["spans"] == 10
    asyncio.run(served.close())


def test_pruning_asks_first_where_somebody_can_answer(agl: Agl, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["prune", "--store", path, "--keep", "3"]
    result = agl(*asked)
    assert result.exit_code == 2
    assert "7 rollouts with 7 spans" in result.stderr
    assert "confirm with --yes, or add --dry-run" in result.stderr

    class Terminal:
        def isatty(self) -> bool:
            return True

    class Sys:
        stdin = Terminal()

    monkeypatch.setattr(verbs, "sys", Sys)
    declined = agl(*asked, input="n\n")
    assert declined.exit_code == 1
    assert "nothing was removed" in declined.output
    assert answer(agl("stats", "--store", path, "--json"))["statistics"]["rollouts.succeeded"] == 10
    assert agl(*asked, input="y\n").exit_code == 0
    assert answer(agl("stats", "--store", path, "--json"))["statistics"]["rollouts.succeeded"] == 3


def test_pruning_by_age_keeps_what_is_younger(agl: Agl, path: str) -> None:
    planned = answer(agl("prune", "--store", path, "--older-than", "5.5d", "--dry-run", "--json"))
    assert planned["dry_run"] is True
    assert (planned["rollouts"], planned["spans"]) == (5, 5)
    removed = answer(agl("prune", "--store", path, "--older-than", "132h", "--yes", "--json"))
    assert removed == planned | {"dry_run": False}
    assert "nothing to remove" in agl("prune", "--store", path, "--older-than", "5.5d").stdout
    counts = answer(agl("stats", "--store", path, "--json"))["statistics"]
    assert (counts["rollouts.succeeded"], counts["rollouts.queuing"], counts["spans"]) == (5, 1, 5)


def test_pruning_by_size_keeps_the_newest(agl: Agl, path: str, tmp_path: Path) -> None:
    assert answer(agl("prune", "--store", path, "--max-size", "0", "--yes", "--json"))["rollouts"] == 10
    assert answer(agl("stats", "--store", path, "--json"))["statistics"]["spans"] == 0


def test_pruning_the_store_of_a_run_spares_what_the_run_has_not_used_yet(agl: Agl, tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    run_dir.write_state(RunState(run_id="ro", step=3, checkpoint="checkpoints/step-000003"))
    run_dir.checkpoint(3).mkdir(parents=True)
    learned = {"revision": 0, "state": {"replay": {"task": ["ro-train-000002-0000"]}}}
    (run_dir.checkpoint(3) / "algorithm.json").write_text(json.dumps(learned))

    async def fill() -> None:
        store = LightningStore(run_dir.path / "store.db")
        names: Any = (
            "train-000002-0000",
            "train-000003-0000",
            "train-000004-0000",
            "train-000004-0001",
            "validation-000004-0000",
        )
        await store.add_records([record(name, 5) for name in names])
        await store.close()

    asyncio.run(fill())
    prune = ["prune", "--store", str(run_dir.path / "store.db"), "--keep", "0", "--yes", "--json"]
    assert answer(agl(*prune))["rollouts"] == 1
    assert answer(agl(*prune))["rollouts"] == 0
    (run_dir.path / "report.json").write_text("{}")
    assert answer(agl(*prune))["rollouts"] == 0, "a finished run is being extended"
    run_dir.close()
    assert answer(agl(*prune))["rollouts"] == 4


def test_vacuum_gives_space_back(agl: Agl, path: str) -> None:
    answer(agl("prune", "--store", path, "--keep", "0", "--yes", "--json"))
    sizes = answer(agl("vacuum", "--store", path, "--json"))
    assert sizes["bytes"] < sizes["bytes_before"]
    assert "now" in agl("vacuum", "--store", path).stdout


@pytest.mark.parametrize("name", ["all.jsonl", "all.jsonl.gz"])
def test_an_export_is_imported_elsewhere(agl: Agl, path: str, name: str) -> None:
    exported = answer(agl("export", name, "--store", path, "--json"))
    counts = {"resources": 0, "rollouts": 11, "spans": 10, "keys_left_out": 0}
    assert exported == {"file": name, "bytes": os.path.getsize(name), **counts}
    imported = answer(agl("import", name, "--store", "other.db", "--json"))
    assert imported == {"file": name, "resources": 0, "rollouts": 11, "known": 0}
    again = agl("import", name, "--store", "other.db")
    assert f"0 rollouts and 0 resources imported from {name}; 11 were already there" in again.stdout


@pytest.mark.parametrize(("name", "leads_on"), [("all.jsonl", True), ("all.parquet", False)])
def test_an_export_leads_on_to_its_import_where_there_is_one(agl: Agl, path: str, name: str, leads_on: bool) -> None:
    assert ("agl store import" in agl("export", name, "--store", path).stdout) == leads_on


def test_some_rollouts_are_exported(agl: Agl, path: str) -> None:
    result = agl("export", "some.jsonl", "--store", path, "--status", "queuing", "--mode", "val", "--queue", "val")
    assert "1 rollouts with 0 spans and 0 resources in some.jsonl" in result.stdout
    assert "exists" in agl("export", "some.jsonl", "--store", path).stderr
    assert answer(agl("export", "some.jsonl", "--store", path, "--force", "--json"))["rollouts"] == 11


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prune"], "say what to remove: --older-than 30d"),
        (["prune", "--older-than", "soon"], "'soon' is not a duration"),
        (["prune", "--max-size", "big"], "'big' is not a size"),
        (["prune", "--keep", "-1"], "Invalid value for '--keep'"),
        (["export", "all.csv"], "ends in .jsonl, .jsonl.gz, .parquet"),
        (["export", "all.jsonl", "--status", "happy"], "--status 'happy' is not one of queuing"),
        (["import", "all.parquet"], "Parquet is for other programs to read"),
        (["import", "absent.jsonl"], "there is no file 'absent.jsonl'"),
        (["stats", "--server", "http://127.0.0.1:1"], "give only one of them"),
    ],
)
def test_what_cannot_work_is_refused_by_name(agl: Agl, path: str, words: list[str], message: str) -> None:
    result = agl(*words, "--store", path)
    assert result.exit_code == 2
    assert message in result.stderr


async def test_every_verb_works_on_a_server(agl: Agl, path: str) -> None:
    store = LightningStore(path)
    async with Server(store, secret="s", token="right") as server:

        async def ask(*words: str) -> dict[str, Any]:
            given = ("--server", server.url, "--token", "right", "--json")
            return answer(await asyncio.to_thread(agl, *words, *given))

        assert (await ask("export", "all.jsonl"))["rollouts"] == 11
        assert (await ask("prune", "--keep", "4", "--yes"))["rollouts"] == 6
        assert (await ask("vacuum"))["bytes"] > 0
        assert (await ask("stats"))["statistics"]["spans"] == 4
        assert await ask("import", "all.jsonl") == {"file": "all.jsonl", "resources": 0, "rollouts": 6, "known": 5}
        refused = await asyncio.to_thread(agl, "stats", "--server", server.url, "--token", "wrong")
        assert refused.exit_code == 1
        assert "token" in refused.stderr
    await store.close()


def test_a_place_that_cannot_be_written_is_named(agl: Agl, path: str) -> None:
    Path("blocked").write_text("a file, not a folder")
    result = agl("export", "blocked/all.jsonl", "--store", path)
    assert result.exit_code == 2
    assert "blocked/all.jsonl cannot be written" in result.stderr


def test_what_may_take_long_says_what_it_does_beside_its_result(agl: Agl, path: str) -> None:
    exported = agl("export", "second.jsonl", "--store", path)
    assert "exporting rollouts ..." in exported.stderr
    assert "exporting" not in exported.stdout
    assert "importing rollouts ..." in agl("import", "second.jsonl", "--store", "other.db").stderr
    assert "pruning 10 rollouts ..." in agl("prune", "--keep", "0", "--yes", "--store", path).stderr
    assert "vacuuming ..." in agl("vacuum", "--store", path).stderr


def test_importing_nothing_makes_no_store(agl: Agl) -> None:
    assert agl("import", "absent.jsonl", "--store", "new.db").exit_code == 2
    assert not Path("new.db").exists()


def test_a_store_in_memory_is_refused(agl: Agl) -> None:
    assert "an in-memory store ends with its process" in agl("stats", "--store", ":memory:").stderr
