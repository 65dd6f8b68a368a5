"""`agl model`: brings a model to this machine, so that it is there without a network."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from rich.console import Console

from agentlightning.cli.options import MODEL_HELP
from agentlightning.cli.output import Result, agl
from agentlightning.errors import ConfigError


def get(name: Annotated[str, typer.Argument(help=MODEL_HELP)]) -> Result:
    """Fetch and convert a model, unless it is here, and print its directory.

    \b
    Examples:
      agl model get smollm2-135m
      agl model get Qwen/Qwen2.5-0.5B-Instruct --json
    """
    from agentlightning.models.resolve import TINY, resolve_model

    if name == TINY:
        raise ConfigError("tiny is made where it is used; there is nothing to get")
    directory = resolve_model(name)

    def show(console: Console) -> None:
        console.print(directory)
        typer.echo(f"next  {agl('demo', model=name)}", err=True)  # There, as scripts read the directory.

    return Result({"name": name, "directory": directory}, show)


VERBS: Final = {"get": get}
