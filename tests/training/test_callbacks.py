"""A callback of one's own takes part in a run, its state survives a kill, and what it does wrong is said by name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import ConfigError, ExtensionError, ResumeError, TrainingStopped
from agentlightning.training.callbacks import FinishedStep, restore, saved
from agentlightning.util.progress import Progress

pytestmark = pytest.mark.integration

CODE = """
import os, signal
from dataclasses import dataclass, field

import agentlightning as agl
from agentlightning.training.tracking import Tracker

class MeasureConfig(agl.config.AlgorithmConfig):
    steps: int = 4

class Measure(agl.Algorithm[MeasureConfig]):
    config_class = MeasureConfig
    learns_weights = False

    @property
    def total_steps(self):
        return self.config.steps

    async def run(self, training):
        while training.step < self.total_steps:
            collected = await training.collect(tasks=2, group_size=1)
            await training.finish_step(collected, {"reward": 0.5})

@dataclass
class Seen:
    rollouts: int = 0
    points: set[str] = field(default_factory=set)
    best: float | None = None

class Count(agl.Callback[Seen]):
    state_class = Seen

    async def on_start(self):
        self.run.note(f"{self.state.rollouts} rollouts were seen")

    async def on_batch(self, collected):
        self.state.rollouts += len(collected.trajectories)

    async def on_validation(self, results):
        self.state.points.add("validation")

    async def on_step(self, step):
        self.state.points.add("step")
        self.state.best = max(self.state.best or 0.0, step.line["reward"])
        return {"seen": self.state.rollouts}

    async def on_step_end(self, step):
        if os.environ.get("KILL_AT") == str(step.line["step"]):
            os.kill(os.getpid(), signal.SIGKILL)

    async def on_end(self, result):
        self.run.note(f"the end, {sorted(self.state.points)}")
        return result

class Breaks(agl.Callback):
    async def on_step(self, step):
        if step.line["step"] == 2 and os.environ.get("BREAKS"):
            raise KeyError("no such metric")

class Words(agl.Callback):
    async def on_step(self, step):
        return {"words": "many"}

class Infinite(agl.Callback[Seen]):
    state_class = Seen
    async def on_step(self, step):
        self.state.best = float("inf")

class Count2(Count):
    name = "Count"

class Refuses(agl.Callback):
    def __init__(self):
        raise LookupError("no board")

class Board(Tracker):
    def start(self, run):
        with open("began", "w"):
            return "board"
    def log(self, step, metrics):
        pass

class Closes(agl.Callback):
    async def close(self):
        with open("closed", "a") as file:
            file.write("once")

async def agent(task):
    return task["n"] / 10
"""
SETTINGS = """
agent = "lab_callbacks:agent"

[run]
callbacks = ["lab_callbacks.py:Count"]

[algorithm]
type = "lab_callbacks:Measure"

[data]
train = "tasks.jsonl"

[evaluation]
every = 2
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "lab_callbacks.py").write_text(CODE)
    (tmp_path / "settings.toml").write_text(SETTINGS)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(9)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("lab_callbacks", None)


def train(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "agl"), "train", *arguments]
    env = {**os.environ, **variables, "COLUMNS": "200"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_its_state_is_what_it_was_when_a_run_that_was_killed_resumes(folder: Path) -> None:
    killed = train("--config", "settings.toml", "--run", "run", "run.checkpoint_every=2", KILL_AT="3")
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    assert [line["seen"] for line in lines(folder)] == [2, 4, 6]
    state = json.loads((folder / "run" / "state.json").read_text())
    own = state["callbacks"]["Count"]
    assert own | {"points": sorted(own["points"])} == {"rollouts": 4, "points": ["step", "validation"], "best": 0.5}
    resumed = train("--resume", "run")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    said = resumed.stdout + resumed.stderr
    assert "4 rollouts were seen" in said, "the third step, which is done again, was not"
    assert "the end, ['step', 'validation']" in said
    assert [line["seen"] for line in lines(folder)] == [2, 4, 6, 8]


def test_one_that_raises_is_named_with_its_file_and_the_run_goes_on_once_it_is_mended(folder: Path) -> None:
    own = 'run.callbacks=["lab_callbacks:Breaks", "lab_callbacks.py:Count"]'
    failed = train("--config", "settings.toml", "--run", "run", own, BREAKS="1")
    assert failed.returncode == 1
    text = failed.stdout + failed.stderr
    assert f"callback lab_callbacks:Breaks ({folder / 'lab_callbacks.py'}) failed with KeyError" in text
    assert "continue with  agl train --resume" in text
    assert [line["step"] for line in lines(folder)] == [1]
    resumed = train("--resume", "run")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [line["seen"] for line in lines(folder)] == [2, 4, 6, 8]


def fit(folder: Path, callbacks: Sequence[Any], steps: int = 1, sections: Any = None, **run: Any) -> agl.TrainingResult:
    from lab_callbacks import Measure, agent  # type: ignore[import-not-found]

    config = agl.TrainConfig(evaluation={"every": 0}, run=run, **(sections or {}))
    made: Any = Measure(steps=steps)
    trainer = agl.Trainer(
        config, algorithm=made, run_dir=folder / "run", callbacks=callbacks, progress=Progress(enabled=False)
    )
    return trainer.fit(agent, [{"n": n} for n in range(9)])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Words", "lab_callbacks:Words .* failed with ValueError: could not convert string to float: 'many'"),
        ("Infinite", "lab_callbacks:Infinite .* failed with ValueError: Out of range float"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(folder: Path, name: str, said: str) -> None:
    with pytest.raises(ExtensionError, match=said):
        fit(folder, [f"lab_callbacks:{name}"])


def test_one_that_cannot_be_made_leaves_no_run_at_a_tracker(folder: Path) -> None:
    tracked = {"tracking": {"trackers": ["lab_callbacks:Board"]}}
    with pytest.raises(ExtensionError, match=r"lab_callbacks:Refuses .* failed with LookupError: no board"):
        fit(folder, ["lab_callbacks:Refuses"], sections=tracked)
    assert not (folder / "began").exists()
    fit(folder, [], sections=tracked)
    assert (folder / "began").exists()


def test_an_object_is_given_again_to_resume_and_two_have_two_names(folder: Path) -> None:
    import lab_callbacks as lab  # type: ignore[import-not-found]

    with pytest.raises(ConfigError, match="two callbacks of the run are called 'Count'"):
        fit(folder, [lab.Count, lab.Count2()])
    assert not (folder / "run").exists()
    fit(folder, [lab.Count()])
    with pytest.raises(ResumeError, match=r"callbacks that are objects; give them again: .*callbacks=\[...\]"):
        agl.Trainer.resume(folder / "run", changes={"algorithm.steps": 2}).fit(lab.agent)
    again = agl.Trainer.resume(folder / "run", changes={"algorithm.steps": 2}, callbacks=[lab.Count()])
    assert again.fit(lab.agent).steps == 2
    assert [line["seen"] for line in lines(folder)] == [2, 4]
    with pytest.raises(ConfigError, match=r"callbacks"):
        agl.Trainer(callbacks=[object()])  # type: ignore[list-item]


def test_it_is_closed_once_whether_the_run_ends_or_cannot_begin(folder: Path) -> None:
    import lab_callbacks as lab  # type: ignore[import-not-found]

    fit(folder, [lab.Closes])
    assert (folder / "closed").read_text() == "once"
    (folder / "closed").unlink()
    (folder / "run").rename(folder / "earlier")
    with pytest.raises(ConfigError, match="two callbacks"):
        fit(folder, [lab.Closes, lab.Count, lab.Count2()])
    assert (folder / "closed").read_text() == "once"


def test_a_state_of_another_form_is_named(folder: Path) -> None:
    from lab_callbacks import Count  # type: ignore[import-not-found]

    made = Count()
    restore(made, {"rollouts": 3, "points": ["step"], "gone": 1})
    assert saved(made) == {"rollouts": 3, "points": ["step"], "best": None}
    with pytest.raises(ResumeError, match=r"callback lab_callbacks:Count \(.*\) cannot be read: Expected `int`"):
        restore(made, {"rollouts": "three"})


@pytest.mark.parametrize("saves", [True, False])
def test_it_may_have_a_checkpoint_written_when_none_is_due(folder: Path, saves: bool) -> None:
    class Stops(agl.Callback[Any]):
        async def on_step(self, step: FinishedStep) -> None:
            if step.line["step"] == 2:
                step.saves, step.stop = saves, "enough"

    with pytest.raises(TrainingStopped, match="enough"):
        fit(folder, [Stops()], steps=4, checkpoint_every=100)
    checkpoint = json.loads((folder / "run" / "state.json").read_text())["checkpoint"]
    assert (checkpoint == "checkpoints/step-000002") is saves
