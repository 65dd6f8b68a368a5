"""What a tracker is told of a run: its settings, the metrics of each step, sample transcripts, its result.

A tracker may raise and may take its time: `Tracking` calls it from a thread of its own, in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run, as a tracker is told of it."""

    run_dir: Path
    project: str
    name: str
    settings: Mapping[str, Any]
    """The configuration by full names (`algorithm.steps`), without secrets."""
    step: int
    """The steps that are done; later ones were lost in a crash and come again."""
    tracker_run: str | None
    """What `start` returned when the run began. None: it begins now."""
    options: Mapping[str, Any]
    """The settings of the section [tracking]."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """A rollout of a validation."""

    mode: str
    task: str
    conversation: str
    output: str
    reward: float | None
    rollout_id: str


COLUMNS = ("mode", "task", "conversation", "output", "reward", "rollout_id")
"""Of a table of transcripts."""


class Tracker(Protocol):
    """One experiment tracker. Made and called in one thread."""

    package: ClassVar[str]
    """The module that it needs."""

    def start(self, run: TrackedRun) -> str:
        """Begin, or continue `run.tracker_run`. Returns what names the tracker's own run."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step."""
        ...

    def transcripts(self, step: int, rows: Sequence[Transcript]) -> None:
        """Sample rollouts of a validation."""
        ...

    def result(self, step: int, result: Mapping[str, Any], curve: Path | None) -> None:
        """What came of the run; `curve`: a PNG."""
        ...

    def close(self, *, finished: bool) -> None:
        """The run ends, `finished` or to be continued."""
        ...


def rows_of(transcripts: Sequence[Transcript]) -> list[list[Any]]:
    """The cells of a table, in the order of `COLUMNS`."""
    return [[getattr(each, name) for name in COLUMNS] for each in transcripts]


def result_numbers(result: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a result by name: `held_out_greedy_gain` and the like."""
    found: dict[str, float] = {}
    for mode, gain in result.get("held_out", {}).items():
        low, high = gain["interval"]
        numbers = {"before": gain["before"], "after": gain["after"], "gain": gain["gain"], "low": low, "high": high}
        found |= {f"held_out_{mode}_{name}": value for name, value in numbers.items() if value is not None}
    plain = {name: value for name, value in result.items() if isinstance(value, int | float)}
    return found | {name: float(value) for name, value in plain.items()}


def markdown_table(transcripts: Sequence[Transcript]) -> str:
    """The table as Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "| --- " * len(COLUMNS) + "|"]
    for row in rows_of(transcripts):
        cells = (str(cell).replace("|", "\\|").replace("<", "&lt;").replace("\n", "<br>") for cell in row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
