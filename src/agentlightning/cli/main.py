"""The `agl` program and its verbs."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from agentlightning.cli import credit, demo, doctor, evaluate, model, rescore, run, runner, serve, store, train
from agentlightning.cli.exporting import export
from agentlightning.cli.recorded import learn
from agentlightning.cli.starting import init
from agentlightning.cli.viewing import dashboard, report, status
from agentlightning.cli.weights import weights

VERBS = (
    init,
    demo,
    train,
    learn,
    evaluate,
    status,
    doctor,
    report,
    dashboard,
    run,
    serve,
    runner,
    rescore,
    store,
    credit,
    export,
    model,
    weights,
)


def build() -> typer.Typer:
    """The program with all its verbs."""
    app = typer.Typer(
        name="agl",
        help="Train any AI agent, and know whether it helped.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_program)
    for verb in VERBS:
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
