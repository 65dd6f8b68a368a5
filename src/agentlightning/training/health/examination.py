"""Examines the directory of a run, running, finished or crashed: its steps, its state, the failures in its store."""

from __future__ import annotations

import asyncio
import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import orjson

from agentlightning.errors import AgentLightningError
from agentlightning.evaluation.intervals import Gain
from agentlightning.rollouts import Attempt
from agentlightning.store import LightningStore
from agentlightning.task import Overlap
from agentlightning.training.health.signs import SignHistory, sign_history
from agentlightning.training.health.step_record import StepRecord
from agentlightning.training.persistence.run_dir import (
    ERROR_FILE,
    RunState,
    check_run,
    is_locked,
    read_state,
    whole_lines,
)
from agentlightning.training.sources.collector import cause_of_failure

# -- milestones ------------------------------------------------------------------------------------------------------

# Warnings at the start and the end of a run: what is known before its first rollout, and what it did not achieve.

LEAST_MOVED: Final = 1e-5
"""Learning rates of a run that add up to less leave the policy what it was: adaptive optimizers move a weight by about
the rate at each update, and weights have a size of about 0.01."""


def starting_warnings(*, random_weights: bool, shared: Sequence[Overlap] = ()) -> dict[str, str]:
    """What is known before the first rollout: kind -> sentence. `shared`: tasks that are in several of the run's
    datasets."""
    found = {
        f"overlap_{each.first}_{each.second}": (
            f"{each}. A measurement on tasks that were learned from, or that chose the checkpoint, promises too much:"
            f" leave them out of {each.first}"
        )
        for each in shared
    }
    if not random_weights:
        return found
    return found | {
        "random_weights": (
            'policy.model is "tiny", a small model with random weights: it shows that everything works, and learns next'
            " to nothing from rewards alone. Give a model (--model smollm2-135m, or a directory), or demonstrations to"
            " begin with (warm_start.dataset)"
        )
    }


def closing_warnings(records: Sequence[StepRecord], gains: Mapping[str, Gain]) -> dict[str, str]:
    """What a finished run did not achieve: kind -> sentence."""
    found: dict[str, str] = {}
    if any(record.groups for record in records) and not any(record.groups_trained for record in records):
        found["nothing_learned"] = "nothing was learned: no group of rollouts had rewards that differ"
    moved = sum(each.optimizer_steps * (each.lr or 0.0) for each in records)
    updates = sum(each.optimizer_steps for each in records)
    more = "train for more steps (of a prompt search, raise algorithm.budget), or"
    if updates and moved < LEAST_MOVED:
        more = (
            f"the weights hardly moved: {updates} updates, whose learning rates add up to {moved:.2g}, change no weight"
            " by more than about that. Raise algorithm.optimizer.lr (1e-6 to 1e-4 is usual, ten times that with LoRA);"
        )
    for mode, gain in gains.items():
        low, high = gain.interval
        if not gain.tasks:
            found[f"not_compared_{mode}"] = (
                f"no held-out task has a reward both before and after ({mode}: {gain.missing_before} have none before,"
                f" {gain.missing_after} none after), so nothing is known of a gain; the failures are counted in"
                " report.json (reasons_before, reasons_after), and `agl dashboard` shows them"
            )
        elif high < 0:
            found[f"worse_{mode}"] = (
                f"the trained policy is worse than the one it started from ({mode}: {gain.gain:+.3f}); lower"
                " algorithm.optimizer.lr, and see in curve.png where it turned"
            )
        elif low <= 0:
            found[f"no_gain_{mode}"] = (
                f"no gain is shown ({mode}): the interval {low:+.3f} to {high:+.3f} of {gain.tasks} held-out tasks"
                f" includes 0; {more} measure on more tasks (a file as data.held_out, or a larger data.held_out_share)"
            )
    return found


MOST_TEXT: Final = 240
"""Characters of an example."""
MOST_FAILURES: Final = 2000
"""Failed rollouts that are read from the store, the newest ones."""


@dataclass(frozen=True, slots=True)
class Failures:
    """Failed rollouts of one cause."""

    cause: str
    """The type of the error, or how the attempt ended."""
    count: int
    example: str
    """`ROLLOUT: message` of one of them."""


@dataclass(frozen=True, slots=True)
class Examination:
    """What is found in the directory of a run."""

    run_dir: Path
    status: Literal["running", "finished", "unfinished"]
    """unfinished: no process has it open, and there is no report."""
    state: RunState
    steps: int
    """Steps with readable metrics."""
    signs: tuple[SignHistory, ...]
    warnings: Mapping[str, str]
    """By kind, what the run itself has warned of and its steps do not show, what a finished one did not achieve, and
    how it `ended`, if not well."""
    failures: tuple[Failures, ...]
    damaged_lines: tuple[int, ...]
    """Numbers of the lines of metrics.jsonl that cannot be read."""
    notes: tuple[str, ...] = ()
    """What could not be examined, and why."""

    @property
    def is_healthy(self) -> bool:
        return not (self.signs or self.warnings or self.damaged_lines)


def examine(run_dir: Path) -> Examination:
    """Raises ConfigError for a directory that holds no run, ResumeError for a state that cannot be read."""
    check_run(run_dir)
    state, status = read_state(run_dir), status_of(run_dir)
    records, damaged = read_records(run_dir / "metrics.jsonl")
    notes = [] if records else ["no step is finished yet, so that there is nothing to judge"]
    failures = failures_of(run_dir / "store.db", state, notes)
    warnings = state.warnings
    if status == "finished":
        try:
            gains = gains_of(orjson.loads((run_dir / "report.json").read_bytes()))
            warnings = warnings | closing_warnings(records, gains)
        except (orjson.JSONDecodeError, KeyError, TypeError, msgspec.ValidationError) as error:
            notes.append(f"report.json cannot be read, so that nothing is said of the gain: {error}")
    if status != "running":
        warnings = warnings | _ending(run_dir, has_worked=status == "finished" or bool(records))
    if status == "unfinished" and "ended" not in warnings:
        notes.append(f"it is not finished, and no process works on it; go on with {_resume(run_dir)}")
    signs = tuple(sign_history(records))
    for each in signs:
        warnings = {kind: text for kind, text in warnings.items() if kind != each.sign.name}
    return Examination(run_dir, status, state, len(records), signs, warnings, failures, damaged, tuple(notes))


def _ending(run_dir: Path, *, has_worked: bool) -> dict[str, str]:
    """How the last process of a run ended, if not well: `ended` -> sentence. One that `has_worked`, with a step to show
    or a result, may have been stopped on purpose."""
    try:
        error = (run_dir / ERROR_FILE).read_text(errors="replace").strip()
    except OSError:
        error = ""
    again = _resume(run_dir)
    if error:
        first, _, more = error.partition("\n")
        rest = f" (all of it: {run_dir / ERROR_FILE})" if more or len(first) > MOST_TEXT else ""
        return {"ended": f"the run ended with an error: {first[:MOST_TEXT]}{rest}. Mend its cause, then: {again}"}
    if has_worked:
        return {}
    return {
        "ended": "its process ended before the first step and left no error: it was interrupted or killed, as the"
        " system does where memory runs out (policy.token_budget=N or a smaller policy.model needs less). Go on with"
        f" {again}"
    }


def _resume(run_dir: Path) -> str:
    return f"agl train --resume {shlex.quote(str(run_dir))}"


def gains_of(report: Mapping[str, Any]) -> dict[str, Gain]:
    """Without tasks that could be compared the numbers are NaN, which JSON has not."""
    unknown = dict.fromkeys(("before", "after", "gain"), math.nan) | {"interval": (math.nan, math.nan)}
    return {
        mode: msgspec.convert(gain if gain["tasks"] else gain | unknown, Gain)
        for mode, gain in report["held_out"].items()
    }


def status_of(run_dir: Path) -> Literal["running", "finished", "unfinished"]:
    """unfinished: no process has the run open, and there is no report."""
    if is_locked(run_dir):
        return "running"
    return "finished" if (run_dir / "report.json").exists() else "unfinished"


def read_records(path: Path) -> tuple[list[StepRecord], tuple[int, ...]]:
    """The steps in a file of metrics, and the numbers of the lines that cannot be read. A last line without an end is
    being written."""
    lines = [*map(read_record, whole_lines(path))]
    damaged = tuple(number for number, record in enumerate(lines, 1) if record is None)
    return [record for record in lines if record is not None], damaged


def read_record(line: bytes) -> StepRecord | None:
    """The step in a line of metrics; None for one that cannot be read."""
    try:
        found: Any = orjson.loads(line)
        return StepRecord.read(found | {"step": int(found["step"])})
    except (ValueError, TypeError, LookupError):
        return None


def failures_of(path: Path, state: RunState, notes: list[str]) -> tuple[Failures, ...]:
    """The failed rollouts of the run by cause, the most frequent first."""
    if not path.exists():
        if state.failed_rollouts:
            notes.append("its rollouts are in another store, so that failures are not listed by cause")
        return ()
    try:
        attempts = asyncio.run(_failed_attempts(path, state.run_id))
    except AgentLightningError as error:
        notes.append(f"{path} cannot be read, so that failures are not listed by cause: {error}")
        return ()
    counts = Counter(map(_cause, attempts))
    examples = {_cause(each): f"{each.rollout_id}: {cause_of_failure(each)}" for each in attempts}
    return tuple(Failures(cause, count, examples[cause][:MOST_TEXT]) for cause, count in counts.most_common())


async def _failed_attempts(path: Path, run_id: str) -> list[Attempt]:
    store = LightningStore(path)
    try:
        rollouts = await store.query_rollouts(
            status_in=["failed"], rollout_id_contains=run_id, newest_first=True, limit=MOST_FAILURES
        )
        return await store.get_latest_attempts([rollout.rollout_id for rollout in rollouts])
    finally:
        await store.close()


def _cause(attempt: Attempt) -> str:
    error = attempt.metadata.get("error")
    kind = error.get("type") if isinstance(error, dict) else None
    return str(kind) if kind else attempt.status
