"""`agl model`: brings a model to this machine, so that it is there without a network."""

from __future__ import annotations

from typing import Annotated

import typer

from agentlightning.cli.options import MODEL_HELP, Json
from agentlightning.cli.output import Output, errors_reported


def register(app: typer.Typer) -> None:
    verbs = typer.Typer(name="model", no_args_is_help=True, help="Bring models to this machine.")
    verbs.callback()(_group)
    verbs.command("get")(get)
    app.add_typer(verbs)


def _group() -> None:
    """Bring models to this machine."""


def get(name: Annotated[str, typer.Argument(help=MODEL_HELP)], as_json: Json = False) -> None:
    """Fetch and convert a model, unless it is here, and print its directory."""
    output = Output(as_json)
    with errors_reported(output):
        from agentlightning.errors import ConfigError
        from agentlightning.models.resolve import TINY, resolve_model

        if name == TINY:
            raise ConfigError("tiny is made where it is used; there is nothing to get")
        directory = resolve_model(name)
        record = {"name": name, "directory": directory}
        output.finish(record, lambda console: console.print(directory, markup=False))
