"""`agl doctor`: what is wrong with a training run, since when, and what to try."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from agentlightning.cli.opening import run_or_newest
from agentlightning.cli.options import Run
from agentlightning.cli.output import Result, agl
from agentlightning.util.printable import printable

if TYPE_CHECKING:
    from agentlightning.training.health.examination import Examination


def doctor(run: Run = None) -> Result:
    """Say what is wrong with a training run, since which step, and what to try.

    The run may be running, finished or crashed. Exit status: 0 healthy; 1 there are warnings; 2 this is no run.

    \b
    Examples:
      agl doctor
      agl doctor runs/first --json
    """
    from agentlightning.training.health.examination import examine

    found = examine(run_or_newest(run))
    failed = agl("store", "list", run=found.run_dir, status="failed")
    other = agl("train", resume=found.run_dir) if "ended" in found.warnings else agl("dashboard", found.run_dir)
    after = [failed if found.failures else other]
    return Result(record_of(found), lambda console: print_examination(found, console), after, not found.is_healthy)


def record_of(found: Examination) -> dict[str, Any]:
    """The findings as JSON values."""
    state = found.state
    return {
        "run_dir": str(found.run_dir),
        "status": found.status,
        "healthy": found.is_healthy,
        "steps": found.steps,
        "rollouts": state.rollouts,
        "failed_rollouts": state.failed_rollouts,
        "rollbacks": state.rollbacks,
        "signs": [
            asdict(each.sign) | {"since": each.since, "until": each.until, "count": each.count} for each in found.signs
        ],
        "warnings": dict(found.warnings),
        "failures": [asdict(each) for each in found.failures],
        "damaged_lines": list(found.damaged_lines),
        "notes": list(found.notes),
    }


def print_examination(found: Examination, console: Console) -> None:
    """Print the findings."""
    state = found.state
    rollbacks = f", {state.rollbacks} rollbacks" if state.rollbacks else ""
    failed = f", {state.failed_rollouts} failed" if state.failed_rollouts else ""
    console.print(
        f"{found.run_dir}: {found.status}, {found.steps} steps, {state.rollouts} rollouts{failed}{rollbacks}",
    )
    for each in found.signs:
        when = f"since step {each.since}" + (f", {each.count} steps until {each.until}" if each.count > 1 else "")
        console.print(f"{each.sign.name} ({when})", style="yellow")
        console.print(f"  what  {printable(each.sign.what)}\n  try   {printable(each.sign.advice)}")
    for kind, text in found.warnings.items():
        console.print(f"{kind}", style="yellow")
        console.print(f"  what  {printable(text)}")
    if found.damaged_lines:
        lines = ", ".join(map(str, found.damaged_lines[:10])) + (" ..." if len(found.damaged_lines) > 10 else "")
        console.print("damaged_metrics", style="yellow")
        console.print(f"  what  these lines of metrics.jsonl cannot be read and were left out: {lines}")
    if found.failures:
        console.print("failed rollouts by cause")
    for each in found.failures:
        console.print(f"  {each.count:>5}  {printable(each.cause)}  {printable(each.example)}")
    for note in found.notes:
        console.print(f"note: {note}")
    if found.is_healthy:
        console.print("no sign of trouble")
