"""Promises about the promotion gate's decisions: a version that loses is not promoted, and one that gains is."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from agentlightning.algorithms.training import Collected
from agentlightning.config import GateConfig, RewardGuard
from agentlightning.training.callbacks import FinishedStep
from agentlightning.training.governance import Gate, GateState, Guard, GuardState
from agentlightning.training.persistence.run_dir import KeptCheckpoint, RunState, Tasks
from agentlightning.trajectory import Trajectory


class Warned:
    """A run as the guard sees it."""

    def __init__(self) -> None:
        self.state = RunState("run")
        self.warnings: dict[str, str] = {}

    def warn(self, name: str, text: str) -> None:
        self.warnings[name] = text


def batch(*rewards: Any) -> Collected:
    weights = {"correct": 1.0}
    found = (Trajectory(f"ro-{i}", "at", (), each, group="g", weights=weights) for i, each in enumerate(rewards))
    return Collected(tuple(found))


async def test_dimensions_that_are_to_agree_are_compared_and_those_that_no_reward_has_are_named() -> None:
    run: Any = Warned()
    opposed = batch(*({"correct": share / 8, "short": 1 - share / 8} for share in range(8)))
    for agree, found, warning in (
        (("correct", "short"), 1.0, None),
        (("correct", "shrt"), None, "'correct' and 'shrt', and no reward of the batch has both (correct, short), so"),
    ):
        guard = Guard(run, RewardGuard(agree=agree))
        guard.state = GuardState()
        await guard.on_batch(opposed)
        assert (await guard.on_step(FinishedStep(opposed, {}))).get("reward_disagreement") == found
        assert warning is None or warning in run.warnings["guard_agree"]
        assert bool(run.warnings) == bool(warning)
    await guard.on_batch(batch(0.5, 1.0))
    assert "has both (they are plain numbers)" in run.warnings["guard_agree"]


START = [0.4 + 0.03 * place for place in range(16)]


@dataclass
class Parts:
    """The parts of a run that the gate acts on: it writes a checkpoint, returns to one and records."""

    state: RunState
    version: None = None
    returned: list[str] = field(default_factory=list[str])
    records: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    tasks: Any = field(default_factory=lambda: Tasks([], validation=["a task"], held_out=[]))
    collector: Any = field(default_factory=lambda: SimpleNamespace(store=None))

    async def keep(self) -> KeptCheckpoint:
        return {"directory": f"step-{self.state.step}", "step": self.state.step, "version": None}

    async def rollback(self, directory: str, version: int | None = None) -> None:
        self.returned.append(directory)

    async def decided(self, action: Any, *, reason: str, **fields: Any) -> None:
        self.records.append((action, reason))

    def return_to(self, kept: KeptCheckpoint) -> None: ...

    def write_state(self) -> None: ...

    @property
    def checkpoints(self) -> Parts:
        return self


async def decided(start: Any, later: Any, **config: Any) -> tuple[bool, Parts, GateState]:
    parts: Any = Parts(RunState("run"))
    gate = Gate(parts, GateConfig(**config), parts, parts)
    measured: Any = AsyncMock(side_effect=[list(start), list(later)])
    gate.state, gate.measure = GateState(), measured
    await gate.on_start()
    parts.state.step = 10
    return bool((await gate.decide(FinishedStep(Collected(()), {})))["gate_promoted"]), parts, gate.state


LOSSES: dict[str, tuple[list[float], list[float | None], float]] = {
    "0.15 on each of 16 tasks": (START, [score - 0.15 for score in START], 0.0),
    "a little on each of 16 tasks": (START, [score - 0.01 for score in START], 0.0),
    "graded losses on each": (START, [score - 0.02 - 0.01 * (place % 5) for place, score in enumerate(START)], 0.0),
    "12 of 64 solved tasks": ([1.0] * 64, [0.0] * 12 + [1.0] * 52, 0.0),
    "more than the margin": (START, [score - 0.15 for score in START], 0.05),
    "on another scale": ([100.0 * score for score in START], [100 * score - 3 for score in START], 0.0),
    "every second task crashes": ([1.0] * 16, [None, 1.0] * 8, 0.0),
}


@pytest.mark.parametrize(("start", "later", "margin"), LOSSES.values(), ids=LOSSES)
async def test_a_version_that_loses_is_replaced(start: Any, later: Any, margin: float) -> None:
    promoted, parts, state = await decided(start, later, margin=margin)
    assert not promoted
    assert parts.returned == ["step-0"]
    assert state.guard_scores["promoted"] == start
    assert state.gate_rejections == 1
    assert [action for action, _ in parts.records] == ["promoted", "rejected"]
    assert "loses to" in parts.records[-1][1]


PASSES: dict[str, tuple[list[float], list[float | None], float]] = {
    "better on each task": (START, [score + 0.15 for score in START], 0.0),
    "equal": (START, list(START), 0.0),
    "as many better as worse": ([0.0, 1.0] * 8, [1.0, 0.0] * 8, 0.0),
    "within the margin": (START, [score - 0.04 for score in START], 0.05),
    "worse on three of sixteen": ([1.0] * 16, [0.0] * 3 + [1.0] * 13, 0.0),
}


@pytest.mark.parametrize(("start", "later", "margin"), PASSES.values(), ids=PASSES)
async def test_a_version_that_does_not_lose_is_promoted(start: Any, later: Any, margin: float) -> None:
    promoted, parts, state = await decided(start, later, margin=margin)
    assert promoted
    assert parts.returned == []
    assert state.guard_scores["promoted"] == later
