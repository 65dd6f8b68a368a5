"""`agl model`: brings a model to this machine, so that it is there without a network."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from agentlightning.cli.options import MODEL_HELP, Json
from agentlightning.cli.output import agl, open_output


def get(name: Annotated[str, typer.Argument(help=MODEL_HELP)], as_json: Json = False) -> None:
    """Fetch and convert a model, unless it is here, and print its directory.

    \b
    Examples:
      agl model get smollm2-135m
      agl model get Qwen/Qwen2.5-0.5B-Instruct --json
    """
    with open_output(as_json) as output:
        from agentlightning.errors import ConfigError
        from agentlightning.models.resolve import TINY, resolve_model

        if name == TINY:
            raise ConfigError("tiny is made where it is used; there is nothing to get")
        directory = resolve_model(name)
        record = {"name": name, "directory": directory}
        # On stderr, as scripts read the directory.
        output.finish(record, lambda console: console.print(directory, markup=False))
        typer.echo(f"next  {agl('demo', model=name)}", err=True)


VERBS: Final = {"get": get}
