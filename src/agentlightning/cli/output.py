"""What a verb prints: text or JSON, and the one place where an error becomes a message and an exit status.

Exit status: 0 success; 1 the run failed; 2 invalid input; 130 interrupted.
"""

from __future__ import annotations

import errno
import math
import shlex
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
import typer
from rich.console import Console

from agentlightning.errors import (
    AgentError,
    AgentLightningError,
    ConfigError,
    DatasetError,
    MissingExtraError,
    ResumeError,
    ServerError,
)
from agentlightning.util.json_values import dumps
from agentlightning.util.printable import printable_lines

INVALID_INPUT: Final = (ConfigError, DatasetError, ResumeError, ServerError)
EXTRAS: Final = {
    "torch": "train",
    "transformers": "train",
    "tokenizers": "train",
    "matplotlib": "train",
    "openai": "demo",
    "gguf": "gguf",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
}
"""The extra of this package that installs a module."""


BLOCKS: Final = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Result:
    """What a verb has found."""

    record: dict[str, Any]
    """For programs."""
    text: Callable[[Console], object]
    """Prints it for people."""
    after: Sequence[str] = ()
    """The commands that a user may want next."""
    status: int = 0
    """The exit status."""


def plain_console(stderr: bool) -> Console:
    """Prints text as it is."""
    return Console(stderr=stderr, markup=False, highlight=False, soft_wrap=True)


class Output:
    """Where a verb writes: text for people, or one JSON object on the last line for programs."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = plain_console(stderr=as_json)
        self.run_dir: Path | None = None
        """The run that can be resumed after an error."""

    def show(self, result: Result) -> None:
        if self.as_json:
            sys.stdout.write(dumps(result.record).decode() + "\n")
            return
        result.text(self.console)
        for number, command in enumerate(result.after):
            self.console.print(f"{'' if number else 'next':<5} {command}")

    def fail(self, kind: str, message: str, status: int) -> typer.Exit:
        plain_console(stderr=True).print(f"error: {message}")
        if self.as_json:
            sys.stdout.write(dumps({"error": {"type": kind, "message": message}}).decode() + "\n")
        return typer.Exit(status)


def agl(*words: object, **options: object) -> str:
    """A command line of this program, quoted for a shell, without the options that are None."""
    given = [part for name, value in options.items() if value is not None for part in (f"--{name}", value)]
    return shlex.join(["agl", *map(str, [*words, *given])])


def show_size(size: int) -> str:
    """Such as `512 bytes`, `1.5 KB` or `10 GB`: powers of 1000, two or three digits."""
    value, unit = float(size), "bytes"
    for larger in ("KB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if value >= 99.5 or unit == "bytes" else f"{value:.2g} {unit}"


def print_prompt_diff(diff: str, console: Console) -> None:
    """What has changed in the prompts of a run."""
    console.print(printable_lines(diff) or "the prompts have not changed")


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


@contextmanager
def open_output(as_json: bool) -> Generator[Output]:
    """The output of a verb, which prints errors that users cause or can fix as one message; any other keeps its
    traceback."""
    output = Output(as_json)
    try:
        yield output
    except AgentLightningError as error:
        status = 2 if isinstance(error, INVALID_INPUT) else 1
        advice = "" if status == 2 else _resume_advice(output.run_dir, isinstance(error, AgentError))
        raise output.fail(type(error).__name__, str(error) + advice, status) from error
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        missing = MissingExtraError(error.name, EXTRAS[error.name])
        raise output.fail("MissingExtraError", str(missing), 2) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        path, advice = error.filename or "while writing the run", _resume_advice(output.run_dir)
        raise output.fail("StoreFullError", f"the disk is full ({path}); free some space{advice}", 1) from error
    except KeyboardInterrupt:
        raise output.fail("KeyboardInterrupt", "interrupted" + _resume_advice(output.run_dir), 130) from None


def _resume_advice(run_dir: Path | None, agent_failed: bool = False) -> str:
    """How to resume the run, if there is one to resume."""
    if run_dir is None:
        return ""
    try:
        state = orjson.loads((run_dir / "state.json").read_bytes())
    except (OSError, ValueError):
        return ""
    if state.get("recorded"):
        return f"\nNothing is lost since the last checkpoint: continue with  agl train --resume {run_dir}"
    causes = _causes(run_dir)
    other = " (with --agent or --reward for another one)" if agent_failed else ""
    return f"{causes}\nNothing is lost: continue with  agl train --resume {run_dir}{other}"


def _causes(run_dir: Path) -> str:
    """The failed rollouts of a run by cause, and where to look; empty where none failed."""
    from agentlightning.training.health.examination import failures_of
    from agentlightning.training.persistence.run_dir import read_state

    try:
        found = failures_of(run_dir / "store.db", read_state(run_dir), [])
    except AgentLightningError:
        return ""
    lines = [f"\n  {each.count:>5}  {each.cause}  {each.example}" for each in found]
    advice = f"\nlook at them: agl store list --run {run_dir} --status failed;  agl store show --run {run_dir}"
    return f"\nfailed rollouts by cause{''.join(lines)}{advice}" if found else ""
