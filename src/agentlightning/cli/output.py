"""What a verb prints: text or JSON, and the one place where an error becomes a message and an exit status.

Exit status: 0 success; 1 the run failed; 2 invalid input; 130 interrupted.
"""

from __future__ import annotations

import errno
import shlex
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

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
from agentlightning.util.printable import printable, printable_lines

if TYPE_CHECKING:
    from agentlightning.training.report.result import Failures

INVALID_INPUT = (ConfigError, DatasetError, ResumeError, ServerError)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
EXTRAS = {"torch": "train", "transformers": "train", "tokenizers": "train", "openai": "demo"}
"""The extra of this package that installs a module; what needs another one, names its extra itself."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a verb has found."""

    record: dict[str, Any]
    """For programs."""
    text: str | Iterable[RenderableType] = ()
    """For people: its lines, which are made where they are printed."""
    after: Sequence[str] = ()
    """The commands that a user may want next."""
    status: int = 0
    """The exit status."""


def plain_console(stderr: bool) -> Console:
    """Prints text as it is."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=True)


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
        lines = result.text.split("\n") if isinstance(result.text, str) else result.text
        commands = (f"{'' if number else 'next':<5} {command}" for number, command in enumerate(result.after))
        for line in chain(lines, commands):
            if isinstance(line, Text):  # agents wrote parts of it
                line.plain = printable(line.plain.expandtabs())
            self.console.print(printable(line.expandtabs()) if isinstance(line, str) else line)

    def fail(self, kind: str, message: str, status: int) -> typer.Exit:
        plain_console(stderr=True).print(f"error: {printable_lines(message)}")
        if self.as_json:
            sys.stdout.write(dumps({"error": {"type": kind, "message": message}}).decode() + "\n")
        return typer.Exit(status)


def agl(*words: object, **options: object) -> str:
    """A command line of this program, quoted for a shell, without the options that are None."""
    given = [part for name, value in options.items() if value is not None for part in (f"--{name}", value)]
    return shlex.join(["agl", *map(str, [*words, *given])])


def failure_lines(failures: Iterable[Failures]) -> list[str]:
    """How many rollouts failed of each cause, with an example."""
    return [f"{each.count:>5}  {each.cause}  {each.example}" for each in failures]


def prompt_changes(diff: str) -> list[str]:
    """What has changed in the prompts of a run."""
    return (diff or "the prompts have not changed").split("\n")


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Raises ConfigError where a file cannot be written, but not where the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        raise ConfigError(f"{path} cannot be written: {error}") from error


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
        raise output.fail("MissingExtraError", str(MissingExtraError(error.name, EXTRAS[error.name])), 2) from error
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        path, advice = error.filename or "while writing the run", _resume_advice(output.run_dir)
        raise output.fail("StoreFullError", f"the disk is full ({path}); free some space{advice}", 1) from error
    except KeyboardInterrupt:
        raise output.fail("KeyboardInterrupt", "interrupted" + _resume_advice(output.run_dir), 130) from None


def _resume_advice(run_dir: Path | None, agent_failed: bool = False) -> str:
    """How to resume the run, if there is one to resume, and why rollouts have failed."""
    if run_dir is None:
        return ""
    from agentlightning.training.persistence.run_dir import read_state
    from agentlightning.training.report.result import failures_of

    try:
        state = read_state(run_dir)
    except ResumeError:
        return ""
    if state.recorded:
        return f"\nNothing is lost since the last checkpoint: continue with  agl train --resume {run_dir}"
    causes = ""
    if found := failures_of(run_dir / "store.db", state, []):
        lines = "".join(f"\n  {each}" for each in failure_lines(found))
        look = f"agl store list --run {run_dir} --status failed;  agl store show --run {run_dir}"
        causes = f"\nfailed rollouts by cause{lines}\nlook at them: {look}"
    other = " (with --agent or --reward for another one)" if agent_failed else ""
    return f"{causes}\nNothing is lost: continue with  agl train --resume {run_dir}{other}"
