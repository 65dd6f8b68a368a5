"""The `agl` program and its verbs."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated

import typer

from agentlightning.cli import credit, demo, doctor, evaluate, learn, model, rescore, run, runner, serve, store, train
from agentlightning.cli.exporting import export
from agentlightning.cli.output import Output, errors_reported
from agentlightning.cli.starting import init
from agentlightning.cli.viewing import compare, dashboard, report, status
from agentlightning.errors import ConfigError
from agentlightning.util.plugins import load_plugin, plugin_names

ANY_ARGUMENTS = {"ignore_unknown_options": True, "allow_extra_args": True}
VERBS = (
    init,
    demo,
    train,
    learn,
    evaluate,
    status,
    doctor,
    report,
    compare,
    dashboard,
    run,
    serve,
    runner,
    rescore,
    store,
    credit,
    export,
    model,
)
PLUGIN_VERBS = frozenset({"weights"})
"""Those that plugins of this repository bring; without the plugin, the verb says how to get it."""


def build() -> typer.Typer:
    """The program with all its verbs."""
    # Torch's threads would spin while they wait: beside any other program, a product on two cores then takes 2 to 4
    # times as long, and more than on one.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
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
    for name in sorted(PLUGIN_VERBS | plugin_names("commands")):
        try:
            load_plugin("commands", name)(app)
        except ConfigError as error:
            app.command(name, hidden=True, context_settings=ANY_ARGUMENTS)(_refusal(error))
    return app


def _refusal(error: ConfigError) -> Callable[[], None]:
    """A verb that says why it is not here."""

    def refuse() -> None:
        with errors_reported(Output(as_json=False)):
            raise error

    return refuse


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
