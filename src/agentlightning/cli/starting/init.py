"""`agl init`: make a working folder for the kind of agent that one has."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from agentlightning.cli.output import Result
from agentlightning.cli.starting.folder import KINDS, Kind, write_folder
from agentlightning.errors import ConfigError


def init(
    directory: Annotated[Path, typer.Argument(help="The folder to make (default: the current one).")] = Path("."),
    kind: Annotated[
        Literal["function", "command", "langgraph", "openai-agents"] | None,
        typer.Option(help="The kind of agent; asked for without it.", show_default=False),
    ] = None,
) -> Result:
    """Make a working folder to train an agent in: the agent, its reward, tasks, settings and a README.

    Nothing is overwritten: where one of its files exists, nothing is written.

    \b
    Examples:
      agl init my-agent --kind function
      agl init --kind langgraph
    """
    chosen = KINDS[kind] if kind is not None else _ask()
    written = [str(path) for path in write_folder(directory, chosen)]
    record = {"directory": str(directory), "kind": chosen.name, "files": written, "install": chosen.missing}
    shown = "\n".join(f"wrote {path}" for path in written)
    return Result(record, lambda console: console.print(shown), _after(directory, chosen))


def _ask() -> Kind:
    """The kind that the user chooses. Raises ConfigError where there is nobody to ask."""
    if not sys.stdin.isatty():
        raise ConfigError(f"which kind of agent? Give one: --kind {'|'.join(KINDS)}")
    numbered = {str(number): each for number, each in enumerate(KINDS.values(), 1)}
    for number, each in numbered.items():
        typer.echo(f"{number}  {each.name:<14} {each.about}", err=True)
    choice = str(typer.prompt("the kind of your agent", default="1", err=True)).strip()
    chosen = numbered.get(choice) or KINDS.get(choice)
    if chosen is None:
        raise ConfigError(f"{choice!r} is no kind of agent; choose one of {', '.join([*numbered, *KINDS])}")
    return chosen


def _after(directory: Path, kind: Kind) -> list[str]:
    return [
        *([] if directory.resolve() == Path.cwd() else [shlex.join(["cd", str(directory)])]),
        *([f"pip install {' '.join(kind.missing)}"] if kind.missing else []),
        "agl train --dry-run",
        "agl train",
    ]
