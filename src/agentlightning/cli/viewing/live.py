"""The display of a training run on a terminal: reward, validation, rollouts, warnings, and a transcript on a key.

Without a terminal it is `Progress`: plain lines.
"""

from __future__ import annotations

import math
import os
import select
import sys
import termios
import threading
import tty
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from agentlightning.util.printable import printable
from agentlightning.util.progress import Metric, Progress, RolloutCounts, duration
from agentlightning.util.sparkline import sparkline

REFRESHES: Final = 4
"""A second."""
KEY: Final = "t"
MOST_LINES: Final = 14
"""Of a transcript."""
POLL_SECONDS: Final = 0.2


class LiveProgress(Progress):
    """A display of a few lines at the bottom of the terminal; notes scroll above it."""

    def __init__(self, console: Console | None = None, **options: Any) -> None:
        super().__init__(console, **options)
        self._live: Live | None = None
        self._keys: _Keys | None = None
        self._past: list[tuple[str, float]] = []
        self._rewards: list[float] = []
        self._validation: dict[str, float] = {}
        self._validated_at = 0
        self._counts: RolloutCounts | None = None
        self._warnings: list[str] = []
        self._wants = False
        self._transcript: str | None = None

    def __enter__(self) -> Self:
        if not (self._enabled and self._console.is_interactive):
            return super().__enter__()
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._live = Live(self, console=self._console, refresh_per_second=REFRESHES)
                self._live.start()
                self._keys = _Keys(self._pressed)
                self._keys.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._live is None:
            return super().__exit__(kind, error, where)
        with self._lock:
            self._depth -= 1
            if self._depth:
                return None
            live, self._live = self._live, None
            self._transcript = None
        if self._keys is not None:
            self._keys.stop()
        live.stop()
        return None

    # -- what is reported ----------------------------------------------------------------------------------------------

    def phase(self, name: str, total: int | None = None, done: int = 0) -> None:
        if self._live is None:
            return super().phase(name, total, done)
        with self._lock:
            if self._phase is not None:
                self._past.append((self._phase.name, self._clock() - self._phase.started))
            live, self._live = self._live, None  # the base class begins the phase, and prints nothing
            enabled, self._enabled = self._enabled, False
            super().phase(name, total, done)
            self._live, self._enabled = live, enabled
        return None

    def update(self, done: int, **metrics: Metric) -> None:
        if self._live is None:
            return super().update(done, **metrics)
        with self._lock:
            if self._phase is not None:
                self._phase.done = done
                self._phase.metrics = {**self._phase.metrics, **metrics}
        return None

    def note(self, text: str) -> None:
        if self._live is not None and text.startswith("warning: "):
            self._warnings.append(text.removeprefix("warning: "))
        super().note(text)

    def step(self, metrics: Mapping[str, Any]) -> None:
        with self._lock:
            reward = metrics.get("reward")
            self._rewards.append(math.nan if reward is None else float(reward))
            measured = {
                k.removeprefix("validation_"): float(v) for k, v in metrics.items() if k.startswith("validation_")
            }
            if measured:
                self._validation, self._validated_at = measured, int(metrics.get("step", 0))

    def rollouts(self, counts: RolloutCounts) -> None:
        self._counts = counts

    @property
    def wants_transcript(self) -> bool:
        return self._wants

    def transcript(self, text: str) -> None:
        self._wants = False
        self._transcript = text

    def tick(self) -> None:
        if self._live is None:
            super().tick()

    def _pressed(self, key: str) -> None:
        if key == KEY:
            self._wants = self._transcript is None
            self._transcript = None

    # -- what is shown -------------------------------------------------------------------------------------------------

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Without the lock: a note holds it while it waits for the display, which calls this.
        if (transcript := self._transcript) is not None:
            lines = [printable(line)[:400] for line in transcript.splitlines()[:MOST_LINES]]
            yield Panel(Text("\n".join(lines)), title="a rollout", title_align="left")
        for name, value in self._lines():
            line = Text(f"{name:<11} ", style="dim", no_wrap=True, overflow="ellipsis")
            line.append(printable(value), style="none" if name != "warnings" else "yellow")
            yield line

    def _lines(self) -> list[tuple[str, str]]:
        phase, now = self._phase, self._clock()
        found: list[tuple[str, str]] = []
        if self._past:
            found.append(("done", "  ".join(f"{name} {duration(seconds)}" for name, seconds in self._past[-4:])))
        if phase is not None:
            line = phase.line(now)
            found.append((phase.name[:11], line.removeprefix(f"{phase.name}: ")))
        rewards = list(self._rewards)
        known = [value for value in rewards if not math.isnan(value)]
        if known:
            spark = sparkline(rewards)
            found.append(("reward", f"{known[-1]:.3f}  {spark}  from {known[0]:.3f}, best {max(known):.3f}"))
        if self._validation:
            shown = "  ".join(f"{mode} {value:.3f}" for mode, value in self._validation.items())
            found.append(("validation", f"{shown}  (step {self._validated_at})"))
        if self._counts is not None:
            found.append(("rollouts", _describe(self._counts)))
        if self._warnings:
            found.append(("warnings", f"{len(self._warnings)}, the last: {self._warnings[-1]}"))
        if self._keys is not None and self._keys.works:
            found.append(("keys", f"{KEY} a transcript   ctrl-c stops the run, which can be resumed"))
        return found


def _describe(counts: RolloutCounts) -> str:
    parts = [f"{counts.running:,} running", f"{counts.waiting:,} waiting", f"{counts.succeeded:,} done"]
    parts += [f"{counts.failed:,} failed"] if counts.failed else []
    parts += [f"{counts.retried:,} retried"] if counts.retried else []
    return ", ".join(parts) + (f"; last failure: {counts.cause}" if counts.cause else "")


class _Keys:
    """Reads single keys from the terminal, in a thread. Without one, or in the background, it does nothing."""

    def __init__(self, pressed: Callable[[str], None]) -> None:
        self._pressed = pressed
        self._ended = threading.Event()
        self._settings: list[Any] | None = None
        self._thread: threading.Thread | None = None

    @property
    def works(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        try:
            fd = sys.stdin.fileno()
            if not os.isatty(fd) or os.tcgetpgrp(fd) != os.getpgrp():
                return
            self._settings = termios.tcgetattr(fd)
            tty.setcbreak(fd)
        except (OSError, ValueError, termios.error):
            return
        self._thread = threading.Thread(target=self._read, args=(fd,), name="keys", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._settings is not None:
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._settings)

    def _read(self, fd: int) -> None:
        while not self._ended.is_set():
            ready, _, _ = select.select([fd], [], [], POLL_SECONDS)
            if ready and (key := os.read(fd, 1)):
                self._pressed(key.decode("utf-8", "replace"))
