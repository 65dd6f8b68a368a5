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
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final, Self

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.text import Text

from agentlightning.util.printable import printable
from agentlightning.util.progress import Progress, RolloutCounts
from agentlightning.util.sparkline import sparkline

KEY: Final = "t"
MOST_LINES: Final = 14
"""Of a transcript."""
POLL_SECONDS: Final = 0.2


class LiveProgress(Progress):
    """`Progress` with a few lines more on a terminal."""

    def __init__(self, console: Console | None = None, **options: Any) -> None:
        super().__init__(console, **options)
        self._keys: _Keys | None = None
        self._lines = dict.fromkeys(("reward", "validation", "rollouts", "warnings", "keys"), "")
        self._rewards: list[float] = []
        self._warnings = 0
        self._wants = False
        self._transcript: str | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        if self._bars is not None and self._keys is None:
            self._keys = _Keys(self._pressed)
            if self._keys.start():
                self._lines["keys"] = f"{KEY} a transcript   ctrl-c stops the run, which can be resumed"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._depth == 1 and self._keys is not None:
            self._keys.stop()
            self._keys = self._transcript = None
            self._lines["keys"] = ""
        super().__exit__(kind, error, where)

    # -- what is reported ----------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        if text.startswith("warning: "):
            self._warnings += 1
            self._lines["warnings"] = f"{self._warnings}, the last: {text.removeprefix('warning: ')}"
        super().note(text)

    def step(self, metrics: Mapping[str, Any]) -> None:
        reward = metrics.get("reward")
        self._rewards.append(math.nan if reward is None else float(reward))
        if known := [value for value in self._rewards if not math.isnan(value)]:
            shown = f"{known[-1]:.3f}  {sparkline(self._rewards)}  from {known[0]:.3f}, best {max(known):.3f}"
            self._lines["reward"] = shown
        measured = {k.removeprefix("validation_"): v for k, v in metrics.items() if k.startswith("validation_")}
        if measured:
            shown = "  ".join(f"{mode} {value:.3f}" for mode, value in measured.items())
            self._lines["validation"] = f"{shown}  (step {metrics.get('step', 0)})"

    def rollouts(self, counts: RolloutCounts) -> None:
        self._lines["rollouts"] = _describe(counts)

    @property
    def wants_transcript(self) -> bool:
        return self._wants

    def transcript(self, text: str) -> None:
        self._wants = False
        self._transcript = text

    def _pressed(self, key: str) -> None:
        if key == KEY:
            self._wants = self._transcript is None
            self._transcript = None

    # -- what is shown -------------------------------------------------------------------------------------------------

    def below(self) -> Iterator[RenderableType]:
        for name, value in self._lines.items():
            if not value:
                continue
            line = Text(f"{name:<11} ", style="dim", no_wrap=True, overflow="ellipsis")
            line.append(printable(value), style="none" if name != "warnings" else "yellow")
            yield line
        if (transcript := self._transcript) is not None:
            lines = [printable(line)[:400] for line in transcript.splitlines()[:MOST_LINES]]
            yield Panel(Text("\n".join(lines)), title="a rollout", title_align="left")


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

    def start(self) -> bool:
        """Whether there is a terminal to read from."""
        try:
            fd = sys.stdin.fileno()
            if not os.isatty(fd) or os.tcgetpgrp(fd) != os.getpgrp():
                return False
            self._settings = termios.tcgetattr(fd)
            tty.setcbreak(fd)
        except (OSError, ValueError, termios.error):
            return False
        self._thread = threading.Thread(target=self._read, args=(fd,), name="keys", daemon=True)
        self._thread.start()
        return True

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
