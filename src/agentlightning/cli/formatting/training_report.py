"""The report of a training run as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import orjson
from rich.console import Console

from agentlightning.cli.output import Result, agl
from agentlightning.credit.rejection import describe_reasons
from agentlightning.evaluation.intervals import Gain
from agentlightning.training.export import holds_weights
from agentlightning.training.health.examination import failures_of, read_records
from agentlightning.training.persistence.run_dir import read_state
from agentlightning.training.report.result import TrainingResult
from agentlightning.util.printable import printable, printable_lines

LINES: Final = 6
"""Of a transcript, the last ones."""
WIDTH: Final = 300


def report_of(result: TrainingResult) -> Result:
    """The report, and the commands that lead on: to what the run changed, or to what is wrong with it, and to its
    weights."""
    gained = any(gain.tasks and gain.interval[0] > 0 for gain in result.held_out.values())
    after = agl("report" if gained else "doctor", result.run_dir)
    run, weights = result.run_dir, holds_weights(result.checkpoint)
    learned = agl("export", run, to="hf") if weights else agl("dashboard", run)
    return Result(result.as_json(), lambda console: print_result(result, console), [after, learned])


def print_result(result: TrainingResult, console: Console) -> None:
    """Print the report."""
    console.print()
    for mode, gain in result.held_out.items():
        console.print(f"held-out reward, {mode:<8} {_shown(gain)}, {gain.tasks} tasks)")
        if gain.missing_before or gain.missing_after:
            console.print(f"  {_missing(result, mode, gain)}")
    for number, stage in enumerate(result.stages, 1):
        for mode, gain in stage.held_out.items():
            console.print(f"  stage {number}, {stage.name}, {mode:<8} {_shown(gain)})")
    learned, left_out = f"{result.rollouts} rollouts", result.rejected_rollouts
    if (own := result.recorded) is not None:
        learned, left_out = f"{own.algorithm} on {own.sessions} sessions", own.left_out
    learned += f", {result.failed_rollouts} failed" if result.failed_rollouts else ""
    learned += f", left out: {describe_reasons(left_out)}" if left_out else ""
    console.print(
        f"{result.steps} steps, {learned}, {result.seconds:.1f} s"
        + (f"; {result.rollbacks} rollbacks" if result.rollbacks else "")
        + (f"; best checkpoint from step {result.best_step}" if result.best_step else "")
    )
    for warning in result.warnings:
        console.print(f"warning: {warning}", style="yellow")
    print_closing(result, console)
    if result.prompts:
        print_prompt_diff(result.diff(), console)
    for name, path in (("checkpoint", result.checkpoint), ("curve", result.curve), ("run", result.run_dir)):
        if path is None:
            continue
        console.print(f"{name:<11} {path}")


def _shown(gain: Gain) -> str:
    low, high = gain.interval
    return f"{gain.before:.3f} -> {gain.after:.3f}   gain {gain.gain:+.3f}  (95% interval {low:+.3f} to {high:+.3f}"


def print_prompt_diff(diff: str, console: Console) -> None:
    """What has changed in the prompts of a run."""
    console.print(printable_lines(diff) or "the prompts have not changed")


def print_closing(result: TrainingResult, console: Console) -> None:
    """What a result has beside its warnings: groups without a spread, failures by cause, two transcripts."""
    records, _ = read_records(result.run_dir / "metrics.jsonl")
    groups, flat = sum(each.groups for each in records), sum(each.groups_without_spread for each in records)
    if flat:
        console.print(f"groups without spread: {flat} of {groups}, within which all rewards were equal")
    if result.failed_rollouts:
        for each in failures_of(result.run_dir / "store.db", read_state(result.run_dir), []):
            console.print(f"failed: {each.count:>5}  {printable(each.cause)}  {printable(each.example)}")
    for name, row in best_and_worst(result.run_dir):
        reward = "none" if row["reward"] is None else f"{row['reward']:.3f}"
        console.print(f"{name} of the last validation, reward {reward}  ({row['rollout_id']})")
        for line in str(row["conversation"]).splitlines()[-LINES:]:
            console.print(f"  {printable(line)[:WIDTH]}")


def best_and_worst(run_dir: Path) -> list[tuple[str, dict[str, Any]]]:
    """The transcripts with the highest and the lowest reward of the last validation; none where all are equal."""
    path = run_dir / "transcripts.jsonl"
    rows = [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    last = [row for row in rows if row["step"] == rows[-1]["step"] and row["reward"] is not None]
    if not last:
        return []
    best, worst = max(last, key=lambda row: row["reward"]), min(last, key=lambda row: row["reward"])
    return [("best", best), ("worst", worst)] if best["reward"] > worst["reward"] else [("one", best)]


def _missing(result: TrainingResult, mode: str, gain: Gain) -> str:
    counts = (("before", gain.missing_before), ("after", gain.missing_after))
    parts = [
        f"{describe_reasons(result.missing.get(f'{when}-{mode}', {})) or f'{count} missing'} {when}"
        for when, count in counts
        if count
    ]
    return f"tasks without a reward: {'; '.join(parts)}. The means leave them out; the interval allows them any reward"
