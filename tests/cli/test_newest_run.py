"""The newest run is the one that verbs are about where none is named, and each verb ends with commands that work."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import agentlightning as agl
from agentlightning.cli.main import build
from agentlightning.util.progress import Progress

pytestmark = pytest.mark.integration

AGENT = """
def solve(task):
    if task["n"] == 3:
        raise LookupError("no page 3")
    return task["n"] / 10

def lower(task):
    return 0.1

def score(task, output):
    return 0.5
"""


class Measure(agl.Algorithm[Any]):
    """Two steps without a model."""

    total_steps = 2
    learns_weights = False

    async def run(self, training: agl.Training) -> None:
        while training.step < self.total_steps:
            collected = await training.collect(tasks=2, group_size=2, temperature=1.0)
            await training.finish_step(collected, {"reward": 0.25 + training.step / 2})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two finished runs, of which `second` wrote last, and no other store."""
    place = tmp_path_factory.mktemp("place")
    (place / "agent.py").write_text(AGENT)
    tasks = [{"n": n} for n in range(8)]
    before = Path.cwd()
    os.chdir(place)
    try:
        for name, agent in (("second", "agent.py:solve"), ("first", "agent.py:lower")):
            config = agl.TrainConfig(agent=agent, runner={"max_attempts": 1, "max_failed_share": 1.0})
            trainer = agl.Trainer(config, algorithm=Measure(), run_dir=f"runs/{name}", progress=Progress(enabled=False))
            trainer.fit(None, tasks, tasks[4:], held_out_dataset=tasks[:4])
    finally:
        os.chdir(before)
    os.utime(place / "runs" / "first" / "state.json", (1, 1))
    return place


@pytest.fixture(autouse=True)
def inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.delenv("AGL_STORE", raising=False)


def call(*words: str) -> Result:
    return CliRunner().invoke(build(), list(words))


def after(done: Result) -> list[str]:
    """The commands that a verb ends with."""
    lines = done.stdout.rstrip("\n").splitlines()
    at = next((number for number, line in enumerate(lines) if line.startswith("next  ")), len(lines))
    return [line[6:] for line in lines[at:]]


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("report",),
        ("doctor",),
        ("eval", "--limit", "2"),
        ("export", "--to", "openai-jsonl"),
        ("export",),
        ("store", "stats"),
        ("store", "list"),
        ("store", "show"),
        ("store", "export", "all.jsonl", "--force"),
        ("credit", "compare"),
    ],
    ids=" ".join,
)
def test_the_newest_run_is_the_default_and_is_named_in_one_line(words: tuple[str, ...]) -> None:
    own = "run" if words[0] in ("eval", "store", "credit") else ""
    place = [f"--{own}", "runs/second"] if own else ["runs/second"]
    named, found = call(*words, *place), call(*words)
    assert found.stderr.splitlines()[0] == "run: runs/second, the newest"
    assert "the newest" not in named.stderr
    shown = [re.sub(r"\d+ s elapsed", "", each.stdout) for each in (found, named)]
    assert (found.exit_code, shown[0]) == (named.exit_code, shown[1])
    assert (
        call(*words, *["runs/first" if each == "runs/second" else each for each in place]).stdout != "" or named.stderr
    )


def test_without_a_run_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (("status",), ("report",), ("doctor",), ("export",)):
        done = call(*words)
        assert (done.exit_code, "there is no run below runs; give the directory of a run" in done.stderr) == (2, True)
    assert "give --agent and --data, --env, or --run RUN" in call("eval").stderr
    assert "give --store PATH or URL" in call("store", "list").stderr


def test_a_store_that_is_named_or_of_recorded_commands_comes_before_the_newest_run(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rollouts(*words: str) -> int:
        return json.loads(call("store", "list", "--json", "--limit", "1000", *words).stdout)["matching"]

    newest = rollouts()
    assert newest > 1
    monkeypatch.setenv("AGL_STORE", str(tmp_path / "other.db"))
    assert call("run", "--", "true").exit_code == 0
    assert rollouts() == 1
    monkeypatch.delenv("AGL_STORE")
    assert rollouts("--store", str(tmp_path / "other.db")) == 1
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to(place / "runs")
    assert rollouts() == newest
    assert call("run", "--", "true").exit_code == 0
    assert rollouts() == 1, "that of `agl run`"
    assert rollouts("--run", "runs/second") == newest


@pytest.mark.parametrize(
    ("words", "verbs"),
    [
        (("status", "runs/second"), ["agl report runs/second"]),
        (("report", "runs/second"), ["agl dashboard runs/second"]),
        (("doctor", "runs/second"), ["agl store list --run runs/second --status failed"]),
        (("doctor", "runs/first"), ["agl dashboard runs/first"]),
        (("compare", "runs/second", "runs/first"), ["agl report runs/second"]),
        (("eval", "--run", "runs/second"), ["agl report runs/second"]),
        (
            ("eval", "--agent", "agent.py:solve", "--data", "tasks of mine.jsonl"),
            ["agl train --dry-run --agent agent.py:solve --data 'tasks of mine.jsonl'"],
        ),
        (("export", "runs/second", "--to", "openai-jsonl"), None),
        (("store", "stats"), ["agl store list --store runs/second/store.db"]),
        (("store", "show"), ["agl store list --store runs/second/store.db --sort reward"]),
        (("store", "export", "copy.jsonl", "--force"), ["agl store import copy.jsonl --store copy.db"]),
        (("store", "import", "copy.jsonl", "--store", "copy.db"), ["agl store list --store copy.db"]),
        (("store", "prune", "--store", "copy.db", "--keep", "3", "--yes"), ["agl store vacuum --store copy.db"]),
        (("store", "vacuum", "--store", "copy.db"), ["agl store stats --store copy.db"]),
        (
            ("rescore", "--reward", "agent.py:score", "--run", "runs/second", "--dry-run"),
            ["agl rescore --reward agent.py:score --run runs/second"],
        ),
        (
            ("rescore", "--reward", "agent.py:score", "--store", "copy.db"),
            ["agl store list --sort reward --store copy.db"],
        ),
        (("init", "mine", "--kind", "command"), ["cd mine", "agl train --dry-run", "agl train"]),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_a_verb_ends_with_commands_that_lead_on(words: tuple[str, ...], verbs: list[str] | None, place: Path) -> None:
    if "tasks of mine.jsonl" in words:
        Path(words[-1]).write_text('{"n": 1}\n{"n": 2}\n')
    done = call(*words)
    assert verbs is None or after(done) == verbs, done.output
    for command in after(done):
        program, verb, *arguments = [*shlex.split(command), ""]
        if program == "agl" and verb not in ("train", "dashboard", "sft"):
            followed = call(verb, *arguments[:-1])
            assert followed.exit_code in (0, 1), (command, followed.output)
            assert "Traceback" not in followed.output


def test_programs_are_given_no_commands() -> None:
    done = call("status", "runs/second", "--json")
    assert "next" not in done.stdout
    assert json.loads(done.stdout)
