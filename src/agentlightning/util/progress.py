"""Shows the progress of a long job: its phase, how much is done, its metrics and the time left.

On a terminal it is a live display, elsewhere a plain line every few seconds. Updates are cheap and thread-safe.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentlightning.util.printable import printable

LINE_SECONDS = 5.0
"""Without a terminal, a line is printed this long after the last one."""
SILENT_SECONDS = 15.0
"""Without a terminal, a line is printed after this time even without progress."""
ESTIMATE_SHARE = 0.01
"""The time left is estimated from this share of the phase on: its first items are slower."""
REFRESHES = 5
"""Of a display on a terminal, a second."""
WIDE = 110
"""Columns of a terminal from which on a bar and the time are shown."""

BLOCKS: Final = "▁▂▃▄▅▆▇█"
Metric = float | str


@dataclass(frozen=True, slots=True)
class RolloutCounts:
    """The rollouts of a job, by what became of them."""

    waiting: int = 0
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    retried: int = 0
    """Attempts beyond the first one of a rollout."""
    cause: str | None = None
    """The error of the last one that failed."""

    def __str__(self) -> str:
        parts = [f"{self.running:,} running", f"{self.waiting:,} waiting", f"{self.succeeded:,} done"]
        parts += [f"{self.failed:,} failed"] if self.failed else []
        parts += [f"{self.retried:,} retried"] if self.retried else []
        return ", ".join(parts) + (f"; last failure: {self.cause}" if self.cause else "")


@dataclass(slots=True)
class _Phase:
    name: str
    total: int | None
    started: float
    first: int
    """What was done when the phase began; not 0 in a resumed run."""
    done: int
    shown_at: float
    shown_done: int
    metrics: dict[str, Metric] = field(default_factory=dict[str, Metric])
    ended: float | None = None

    def left(self, now: float) -> float | None:
        """The estimated seconds to go; None while they are not known."""
        if self.total is None or self.done - self.first < max(1, ESTIMATE_SHARE * (self.total - self.first)):
            return None
        return (now - self.started) / (self.done - self.first) * max(0, self.total - self.done)

    def texts(self, now: float) -> tuple[str, str, str, str]:
        """How much is done, the metrics, the time, and that left."""
        count = f"{self.done or ''}" if self.total is None else f"{self.done}/{self.total}"
        left = None if self.done == self.total or self.ended else self.left(now)
        metrics = "  ".join(_format(name, value) for name, value in self.metrics.items())
        elapsed = f"{duration((self.ended or now) - self.started)} elapsed"
        return count, metrics, elapsed, "" if left is None else f"{duration(left)} left"


class Progress:
    """The progress of one job, phase by phase.

        with Progress() as progress:
            progress.phase("training", 40)
            progress.update(1, reward=0.3, tokens_per_second=3570)
            progress.note("validation 0.41")

    Writes to `console`, stderr by default; with `enabled=False`, nowhere. It is reentrant.

        >>> from agentlightning.util.progress import Progress
        >>> trainer = agl.Trainer(progress=Progress(enabled=False))
    """

    def __init__(
        self, console: Console | None = None, enabled: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self.enabled = enabled
        """Whether anything is shown."""
        self._clock = clock
        self._lock = threading.RLock()
        self._depth = 0
        self._phase: _Phase | None = None
        self._phases: list[_Phase] = []
        """Those that a display shows."""
        self._lines = dict.fromkeys(("reward", "validation", "rollouts", "warnings"), "")
        """What stands below the phases, on a terminal."""
        self._rewards: list[float] = []
        self._warnings = 0
        self._prints_lines = enabled and not self._console.is_interactive
        self._running = ExitStack()
        """The display, or what prints lines while there is nothing new."""

    def __enter__(self) -> Self:
        with self._lock:
            self._depth += 1
            if self._depth == 1 and self._prints_lines:
                ended = threading.Event()
                self._running.callback(ended.set)
                threading.Thread(target=self._print_periodically, args=[ended], daemon=True).start()
            elif self._depth == 1 and self.enabled:
                self._phases.clear()
                show = Live(console=self._console, refresh_per_second=REFRESHES, get_renderable=self._render)
                self._running.enter_context(show)
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._finish_phase()
                self._running.close()

    def phase(self, name: str, total: int | None = None, done: int = 0) -> None:
        """Begin the next phase, with `total` items of which `done` are already done."""
        with self._lock:
            self._finish_phase()
            now = self._clock()
            if self._prints_lines:
                self._print(f"{name} ..." if total is None else f"{name}: {total} to do")
            self._phase = _Phase(name, total, now, first=done, done=done, shown_at=now, shown_done=-1)
            self._phases.append(self._phase)

    def update(self, done: int, **metrics: Metric) -> None:
        """Report how many items are done, and the current metrics: `reward=0.3`, `tokens_per_second=3570`."""
        with self._lock:
            if self._phase is not None:
                self._phase.done = done
                self._phase.metrics = {**self._phase.metrics, **metrics}
                self._show(LINE_SECONDS)

    def _render(self) -> Group:
        """What a display shows: a row for each phase, and what stands below. A note holds the lock while it waits for
        the display, which calls this: it is called without."""
        now, wide, rows = self._clock(), self._console.width >= WIDE, Table.grid(padding=(0, 1))
        for phase in [*self._phases]:
            count, metrics, elapsed, left = phase.texts(now)
            bar, time_spent = ([ProgressBar(phase.total, phase.done, 20)], [elapsed]) if wide else ([], [])
            rows.add_row(Text(phase.name), *bar, count, Text(metrics, "cyan"), *time_spent, left)
        below: list[Text] = []
        for name, value in [each for each in self._lines.items() if each[1]]:
            line = Text(f"{name:<11} ", style="dim", no_wrap=True, overflow="ellipsis")
            below.append(line.append(printable(value), style="yellow" if name == "warnings" else "none"))
        return Group(rows, *below)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Show the rewards up to a finished step, and the last validation, on a terminal."""
        reward = metrics.get("reward")
        self._rewards.append(math.nan if reward is None else float(reward))
        self._lines["reward"] = rewards_line(self._rewards)
        measured = {k.removeprefix("validation_"): v for k, v in metrics.items() if k.startswith("validation_")}
        if measured:
            shown = "  ".join(f"{mode} {value:.3f}" for mode, value in measured.items())
            self._lines["validation"] = f"{shown}  (step {metrics.get('step', 0)})"

    def rollouts(self, counts: RolloutCounts) -> None:
        """Show what became of the rollouts so far, on a terminal."""
        self._lines["rollouts"] = str(counts)

    def note(self, text: str) -> None:
        """Print a line that stays. On a terminal, warnings are counted as well."""
        if text.startswith("warning: "):
            self._warnings += 1
            self._lines["warnings"] = f"{self._warnings}, the last: {text.removeprefix('warning: ')}"
        if self.enabled:
            with self._lock:
                self._print(text)

    def _print_periodically(self, ended: threading.Event) -> None:
        while not ended.wait(SILENT_SECONDS / 3):
            self.tick()

    def tick(self) -> None:
        """Without a terminal, print the state of the phase if nothing was printed for SILENT_SECONDS."""
        with self._lock:
            self._show(SILENT_SECONDS)

    def _show(self, after: float) -> None:
        """Without a terminal, print the state of the phase, if it was printed so many seconds ago."""
        phase, now = self._phase, self._clock()
        if self._prints_lines and phase is not None and now - phase.shown_at >= after:
            phase.shown_at, phase.shown_done = now, phase.done
            self._print(f"{phase.name}: {'  '.join(filter(None, phase.texts(now)))}")

    def _finish_phase(self) -> None:
        if self._phase is not None:
            self._phase.ended = self._clock()
            if self._phase.done not in (self._phase.shown_done, self._phase.first):
                self._show(0)
            self._phase = None

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _format(name: str, value: Metric) -> str:
    words = name.replace("_", " ")
    unit = words.removesuffix(" per second")
    if isinstance(value, str):
        return f"{words} {value}"
    if math.isnan(value):
        return f"{unit} -"
    if unit != words:
        return f"{value:,.{0 if abs(value) >= 10 else 1}f} {unit}/s"
    return f"{words} {value:,}" if isinstance(value, int) else f"{words} {value:.3f}"


def duration(seconds: float) -> str:
    """7 s, 2:05, 1:02:05."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"


def rewards_line(rewards: Sequence[float]) -> str:
    """The last reward, its course, the first and the best one; NaN is a step without one. Empty without any."""
    known = [value for value in rewards if not math.isnan(value)]
    if not known:
        return ""
    return f"{known[-1]:.3f}  {sparkline(rewards)}  from {known[0]:.3f}, best {max(known):.3f}"


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """The values from the lowest to the highest; more than `width` are averaged in equal parts. NaN is a space.

    >>> sparkline([0, 1, 2, 3])
    '▁▃▆█'
    """
    count = min(len(values), width)
    parts = [_mean(values[i * len(values) // count : (i + 1) * len(values) // count]) for i in range(count)]
    known = [value for value in parts if not math.isnan(value)]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    scale = (len(BLOCKS) - 1) / span if span else 0.0
    return "".join(" " if math.isnan(value) else BLOCKS[round((value - low) * scale)] for value in parts)


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
