"""curve.png is drawn again while a run trains, at most every half minute, and a failure ends nothing."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentlightning.algorithms.training import Collected
from agentlightning.training import tracking
from agentlightning.training.callbacks import FinishedStep
from agentlightning.training.tracking import CURVE_SECONDS, Curve

pytest.importorskip("matplotlib")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Lines:
    """A run directory with so many steps."""

    def __init__(self, path: Path, steps: int) -> None:
        self.path, self.steps, self.reads = path, steps, 0

    def training(self) -> Any:
        return SimpleNamespace(directory=self.path, run_dir=self, learner=object())

    def read_metrics(self) -> list[dict[str, Any]]:
        self.reads += 1
        return [{"step": step, "reward": step / 10} for step in range(1, self.steps + 1)]


STEP = FinishedStep(Collected(()), {})


def drawn(curve: Curve, path: Path) -> bytes:
    thread = curve._thread
    assert thread is not None
    thread.join()
    return path.read_bytes()


@pytest.mark.slow
async def test_the_picture_follows_the_steps_and_not_more_often_than_every_half_minute(tmp_path: Path):
    clock, path, run = Clock(), tmp_path / "curve.png", Lines(tmp_path, 3)
    curve = Curve(run.training(), clock)
    await curve.on_step_end(STEP)
    assert not path.exists(), "the run has just begun"
    clock.now += CURVE_SECONDS
    await curve.on_step_end(STEP)
    first = drawn(curve, path)
    assert first.startswith(b"\x89PNG")
    clock.now += CURVE_SECONDS - 1
    await curve.on_step_end(STEP)
    assert run.reads == 1, "it is not time"
    clock.now, run.steps = clock.now + 1, 9
    await curve.on_step_end(STEP)
    assert drawn(curve, path) != first
    await curve.close()
    clock.now += CURVE_SECONDS
    await curve.on_step_end(STEP)
    assert run.reads == 2, "the run is over"
    assert os.listdir(tmp_path) == ["curve.png"]


async def test_a_picture_that_cannot_be_drawn_is_said_once_and_not_tried_again(tmp_path: Path, monkeypatch, caplog):
    def broken(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(tracking, "draw_curve", broken)
    clock = Clock()
    curve = Curve(Lines(tmp_path, 2).training(), clock)
    for _ in range(3):
        clock.now += CURVE_SECONDS
        await curve.on_step_end(STEP)
        if curve._thread is not None:
            curve._thread.join()
    assert len(caplog.records) == 1
    assert "is not drawn while the run goes on: OSError: no space left on device" in caplog.text
