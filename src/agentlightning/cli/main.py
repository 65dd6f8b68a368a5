"""The `agl` program: its verbs, and the one place where an error becomes a message and an exit status.

Exit status: 0 done; 1 the run failed; 2 something given was wrong; 130 interrupted.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

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

WRONG_INPUT = (ConfigError, DatasetError, ResumeError, ServerError)
EXTRAS = {"torch": "train", "transformers": "train", "tokenizers": "train", "matplotlib": "train", "openai": "demo"}


def build() -> typer.Typer:
    """The program with all its verbs."""
    from agentlightning.cli import demo, evaluate, run, runner, serve, store, train

    app = typer.Typer(
        name="agl",
        help="Train any AI agent, and know whether it helped.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_program)
    for verb in (demo, train, evaluate, run, serve, runner, store):
        verb.register(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("agentlightning"))
        raise typer.Exit


def _program(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Train any AI agent, and know whether it helped."""


def main() -> None:
    """The entry point of `agl`."""
    build()()


class Output:
    """Where a verb writes: text for people, or one JSON object on the last line for machines."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(stderr=as_json, highlight=False, soft_wrap=True)

    def finish(self, record: dict[str, Any], text: Callable[[Console], None]) -> None:
        if self.as_json:
            sys.stdout.write(orjson.dumps(record).decode() + "\n")
        else:
            text(self.console)

    def fail(self, kind: str, message: str, status: int) -> typer.Exit:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"error: {message}", markup=False)
        if self.as_json:
            sys.stdout.write(orjson.dumps({"error": {"type": kind, "message": message}}).decode() + "\n")
        return typer.Exit(status)


@contextmanager
def reported(output: Output, run_dir: Callable[[], Path | None] = lambda: None) -> Generator[None]:
    """Errors that users cause or can mend become one message; anything else keeps its traceback."""
    try:
        yield
    except AgentLightningError as error:
        status = 2 if isinstance(error, WRONG_INPUT) else 1
        way_on = "" if status == 2 else _way_on(run_dir(), isinstance(error, AgentError))
        raise output.fail(type(error).__name__, str(error) + way_on, status) from error
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        missing = MissingExtraError(error.name, EXTRAS[error.name])
        raise output.fail("MissingExtraError", str(missing), 2) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        message = f"the disk is full ({error.filename or 'while writing the run'}); free some space{_way_on(run_dir())}"
        raise output.fail("StoreFullError", message, 1) from error
    except KeyboardInterrupt:
        raise output.fail("KeyboardInterrupt", "interrupted" + _way_on(run_dir()), 130) from None


def _way_on(run_dir: Path | None, mends_agent: bool = False) -> str:
    """How to resume, where there is a run that can be."""
    if run_dir is None:
        return ""
    try:
        orjson.loads((run_dir / "state.json").read_bytes())
    except (OSError, ValueError):
        return ""
    other = " (with --agent or --reward for another one)" if mends_agent else ""
    return f"\nNothing is lost: continue with  agl train --resume {run_dir}{other}"
