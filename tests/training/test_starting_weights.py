"""The weights that a run started from are kept for the losses that compare with them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentlightning.errors import ConfigError
from agentlightning.training.persistence.run_dir import RunDir, RunState
from agentlightning.training.run import TrainingRun


class FakeLearner:
    def __init__(self) -> None:
        self.starts_at_base = False
        self.saved: list[Path] = []

    async def save(self, directory: Path) -> None:
        await asyncio.to_thread(directory.mkdir)
        self.saved.append(directory)


def run_in(run_dir: RunDir, step: int = 0) -> TrainingRun:
    parts: dict[str, Any] = dict.fromkeys(("config", "algorithm", "tasks", "collector", "source", "progress"))
    parts["checkpoints"] = SimpleNamespace(learner=FakeLearner())
    return TrainingRun(run_dir=run_dir, state=RunState("r", step=step), total_steps=9, **parts)


async def test_a_copy_is_written_once_before_the_first_update(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    run = run_in(run_dir)
    assert await run.starting_weights() == await run.starting_weights() == run_dir.path / "reference"
    assert len(run.learner.saved) == 1  # type: ignore[union-attr]
    assert await run_in(run_dir, step=5).starting_weights() == run_dir.path / "reference", "a resumed run has them"
    run_dir.close()


async def test_with_adapters_the_weights_below_them_are_the_start_and_nothing_is_written(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    for made in (False, True):
        if made:
            run_dir.start.mkdir()
        run = run_in(run_dir, step=5)
        run.learner.starts_at_base = True  # type: ignore[union-attr]
        assert await run.starting_weights() is None
        assert run.learner.saved == []  # type: ignore[union-attr]
    run_dir.close()


async def test_the_policy_after_its_warm_start_needs_no_copy(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    run_dir.start.mkdir()
    assert await run_in(run_dir, step=5).starting_weights() == run_dir.start
    run_dir.close()


async def test_weights_that_were_not_kept_are_asked_for_by_name(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"in its first 5 steps\. Set algorithm\.reference"):
        await run_in(run_dir, step=5).starting_weights()
    run_dir.close()
