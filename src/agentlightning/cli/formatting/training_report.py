"""The report of a training run as text."""

from __future__ import annotations

from rich.console import Console

from agentlightning.credit.rejection import describe_reasons
from agentlightning.evaluation.intervals import Gain
from agentlightning.training.report.result import TrainingResult


def print_result(result: TrainingResult, console: Console) -> None:
    """Print the report."""
    console.print()
    for mode, gain in result.held_out.items():
        low, high = gain.interval
        console.print(
            f"held-out reward, {mode:<8} {gain.before:.3f} -> {gain.after:.3f}   "
            f"gain {gain.gain:+.3f}  (95% interval {low:+.3f} to {high:+.3f}, {gain.tasks} tasks)"
        )
        if gain.missing_before or gain.missing_after:
            console.print(f"  {_missing(result, mode, gain)}")
    for number, stage in enumerate(result.stages, 1):
        for mode, gain in stage.held_out.items():
            low, high = gain.interval
            console.print(
                f"  stage {number}, {stage.name}, {mode:<8} {gain.before:.3f} -> {gain.after:.3f}   "
                f"gain {gain.gain:+.3f}  (95% interval {low:+.3f} to {high:+.3f})"
            )
    failed = f", {result.failed_rollouts} failed" if result.failed_rollouts else ""
    if result.rejected_rollouts:
        failed += f", left out: {describe_reasons(result.rejected_rollouts)}"
    console.print(
        f"{result.steps} steps, {result.rollouts} rollouts{failed}, {result.seconds:.1f} s"
        + (f"; {result.rollbacks} rollbacks" if result.rollbacks else "")
        + (f"; best checkpoint from step {result.best_step}" if result.best_step else "")
    )
    for warning in result.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    for name, path in (("checkpoint", result.checkpoint), ("curve", result.curve), ("run", result.run_dir)):
        console.print(f"{name:<11} {path}")


def _missing(result: TrainingResult, mode: str, gain: Gain) -> str:
    counts = (("before", gain.missing_before), ("after", gain.missing_after))
    parts = [
        f"{describe_reasons(result.missing.get(f'{when}-{mode}', {})) or f'{count} missing'} {when}"
        for when, count in counts
        if count
    ]
    return f"tasks without a reward: {'; '.join(parts)}. The means leave them out; the interval allows them any reward"
