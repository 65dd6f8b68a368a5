"""A run that is interrupted and resumed through the trainer continues the runs of its trackers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

import agentlightning as agl
from agentlightning.errors import ExtensionError
from agentlightning.training import tracking as module
from agentlightning.training.tracking import TrackedRun, Transcript
from agentlightning.util.progress import Progress

pytestmark = pytest.mark.slow


class Recorder:
    """A tracker that remembers what it was told, over all of its runs."""

    package: ClassVar[str] = "recorder"
    started: ClassVar[list[TrackedRun]] = []
    events: ClassVar[list[tuple[Any, ...]]] = []

    def start(self, run: TrackedRun) -> str:
        self.started.append(run)
        return run.tracker_run or f"own-{len(self.started)}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.events.append(("log", step, metrics["reward"]))

    def transcripts(self, step: int, rows: Sequence[Transcript]) -> None:
        self.events.append(("transcripts", step, len(rows)))

    def result(self, step: int, result: Mapping[str, Any], curve: Path | None) -> None:
        self.events.append(("result", step, curve is not None and curve.exists()))

    def close(self, *, finished: bool) -> None:
        self.events.append(("close", finished))


class Measure(agl.Algorithm):
    """Three steps without a model; `fails_after` so many it raises."""

    total_steps = 3
    learns_weights = False
    fails_after = 99

    async def run(self, training: Any) -> None:
        while training.step < self.total_steps:
            if training.step >= self.fails_after:
                raise RuntimeError("the machine went away")
            collected = await training.collect(tasks=2, group_size=1, temperature=1.0)
            await training.finish_step(collected, {"reward": (training.step + 1) / 10})


async def agent(task: dict[str, Any]) -> float:
    await asyncio.sleep(0)
    return task["number"] / 10


def test_a_resumed_run_continues_the_same_run_of_its_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "check_installed", lambda config: None)
    monkeypatch.setattr(module, "load_tracker", lambda name: Recorder())
    monkeypatch.setattr(Recorder, "started", [])
    monkeypatch.setattr(Recorder, "events", [])
    settings = agl.TrainConfig(tracking={"trackers": ["tensorboard"], "project": "words"}, evaluation={"every": 1})
    tasks = [{"number": number} for number in range(6)]
    broken = Measure()
    broken.fails_after = 2
    options: dict[str, Any] = {"progress": Progress(enabled=False)}
    first = agl.Trainer(settings, algorithm=broken, run_dir=tmp_path / "run", **options)
    with pytest.raises(ExtensionError, match="went away"):
        first.fit(agent, tasks[:2], tasks[2:4], held_out_dataset=tasks[4:])
    again = agl.Trainer.resume(tmp_path / "run", algorithm=Measure(), **options)
    again.fit(agent)
    begun, continued = Recorder.started
    assert (begun.tracker_run, begun.step, begun.project) == (None, 0, "words")
    assert (continued.tracker_run, continued.step) == ("own-1", 2)
    assert [each for each in Recorder.events if each[0] == "log"] == [("log", n, n / 10) for n in (1, 2, 3)]
    assert [each[1] for each in Recorder.events if each[0] == "transcripts"] == [1, 2, 3]
    assert [each for each in Recorder.events if each[0] in ("close", "result")] == [
        ("close", False),
        ("result", 3, True),
        ("close", True),
    ]
