"""The state of a run as `agl status` prints it, of this machine or of a server elsewhere."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentlightning.training.health.examination import Examination, examine, read_records
from agentlightning.training.health.step_record import StepRecord
from agentlightning.training.persistence.checkpoints import prompts_of
from agentlightning.training.persistence.run_dir import RunState


def status_record(run_dir: Path) -> tuple[dict[str, Any], list[float | None]]:
    """The state of a run, and its rewards by step. Raises ConfigError for a directory that holds no run, ResumeError
    for a state that cannot be read."""
    found = examine(run_dir)
    records, _ = read_records(run_dir / "metrics.jsonl")
    return record_of(found, records), [each.reward for each in records]


def record_of(found: Examination, records: Sequence[StepRecord]) -> dict[str, Any]:
    """The state of a run as JSON values."""
    state = found.state
    validated = next((each for each in reversed(records) if each.validation), None)
    # The settings say nothing of the steps of an algorithm object, nor of one of `Trainer.train`.
    total = None if state.algorithm or state.recorded else _total_steps(found.run_dir)
    left = None if found.status == "finished" else seconds_left(state, total)
    start = {
        name.removeprefix("before-"): (known, len(each))
        for name, each in state.evaluations.items()
        if name.startswith("before-") and (known := [value for value in each if value is not None])
    }
    return {
        "run_dir": str(found.run_dir),
        "status": found.status,
        "step": state.step,
        "steps": total,
        "seconds": round(state.seconds, 1),
        "seconds_left": None if left is None else round(left, 1),
        **_reward_figures([each.reward for each in records]),
        "start": {mode: sum(known) / len(known) for mode, (known, _) in start.items()},
        "start_tasks": {mode: (len(known), tasks) for mode, (known, tasks) in start.items()},
        "validation": dict(validated.validation) if validated else {},
        "validated_at": validated.step if validated else None,
        "tokens_per_second": records[-1].tokens_per_second if records else None,
        "sessions": None if state.recorded is None else state.recorded.sessions,
        "rollouts": state.rollouts,
        "failed_rollouts": state.failed_rollouts,
        "rejected_rollouts": dict(state.rejected),
        "failures": [asdict(each) for each in found.failures],
        "warnings": dict(state.warnings),
        **prompts_of(found.run_dir, "checkpoint" if found.status == "finished" else state.checkpoint),
    }


def seconds_left(state: RunState, total: int | None) -> float | None:
    """By the mean time of the steps so far; None where it cannot be known."""
    return state.seconds / state.step * max(0, total - state.step) if total and state.step else None


def _total_steps(run_dir: Path) -> int | None:
    """The steps of the whole run; None where its settings do not say."""
    try:
        settings = tomllib.loads((run_dir / "config.toml").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    steps = settings.get("algorithm", {}).get("steps")
    return steps if isinstance(steps, int) else None


def _reward_figures(rewards: Sequence[float | None]) -> dict[str, float | None]:
    """The last, the first and the best reward of the steps that have one."""
    known = [each for each in rewards if each is not None] or [None]
    return {"reward": known[-1], "first_reward": known[0], "best_reward": max(known, key=lambda each: each or 0.0)}
