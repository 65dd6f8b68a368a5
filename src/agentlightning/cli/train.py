"""`agl train`: train an agent on tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from typer.core import TyperCommand

from agentlightning.cli.formatting.dry_run import print_dry_run
from agentlightning.cli.formatting.training_report import print_result
from agentlightning.cli.options import Agent, Dataset, Environment, Json, Model, Reward, Token
from agentlightning.cli.output import Output, errors_reported
from agentlightning.cli.viewing.live import LiveProgress
from agentlightning.util.plugins import installed

if TYPE_CHECKING:
    from agentlightning.config import TrainConfig
    from agentlightning.store.http.client import LightningStoreClient
    from agentlightning.trainer import Trainer

CONFIG_FILE: Final = "agl.toml"
"""The settings of the current directory, where none are given."""


class TrainCommand(TyperCommand):
    """The verb, whose help names what distributions announce."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        named = {kind: names for kind, names in installed().items() if kind != "commands"}
        if named:
            with formatter.section("Installed extensions (agl doctor)"):
                formatter.write_dl([(kind, ", ".join(names)) for kind, names in named.items()])


def register(app: typer.Typer) -> None:
    app.command("train", cls=TrainCommand)(train)


def train(
    settings: Annotated[list[str] | None, typer.Argument(help="section.key=value ...", show_default=False)] = None,
    agent: Agent = None,
    reward: Reward = None,
    dataset: Dataset = None,
    env: Environment = None,
    model: Model = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of data order and sampling.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="The directory of the run (default: runs/<time>).")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue the run in this directory; settings change those of the run.")
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(help="Use the store of this `agl serve`; with runner.hosts=0 its runners run the agent."),
    ] = None,
    token: Token = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check everything short of training: imports, tasks, a few rollouts; then exit."
        ),
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all settings with their explanations as TOML and exit.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train an agent on tasks, and measure the gain on tasks it has not seen.

    Settings are given as section.key=value, for example algorithm.steps=50 or runner.timeout_seconds=30. Without
    --config and --resume, those of agl.toml in the current directory are used, if there is one. With
    data.sessions=STORE, or a file of algorithm.type=sft or dpo, it learns from what was recorded instead.
    """
    output = Output(as_json)
    directory = resume or run_dir
    with errors_reported(output, lambda: directory):
        shortcuts = {
            "env": env,
            "agent": agent,
            "reward": reward,
            "data.train": dataset,
            "policy.model": model,
            "run.seed": seed,
        }
        given = [f"{key}={json.dumps(value)}" for key, value in shortcuts.items() if value is not None]
        changes = [*given, *(settings or [])]
        config = config or _own_config(resume)
        resolved = _resolve(changes, config, run_dir, resume)
        store = _store(server, token)
        if print_config:
            _print_settings(resolved)
            return
        from agentlightning.trainer import Trainer

        progress = LiveProgress(console=output.console)
        if resume is not None:
            trainer = Trainer.resume(resume, changes=changes, progress=progress, store=store)
        else:
            trainer = Trainer(resolved, run_dir=run_dir, progress=progress, store=store)
        if dry_run:
            _check(trainer, output)
            return
        directory = trainer.run_dir
        result = trainer.train() if trainer.is_recorded else trainer.fit()
        output.finish(result.as_json(), lambda console: print_result(result, console))


def _own_config(resume: Path | None) -> Path | None:
    """The settings file of the current directory, for a run that is given none."""
    path = Path(CONFIG_FILE)
    if resume is not None or not path.is_file():
        return None
    Console(stderr=True, highlight=False).print(f"settings: {path}", markup=False)
    return path


def _check(trainer: Trainer, output: Output) -> None:
    """The dry run. Exit status 1 where training cannot work like this."""
    found = trainer.dry_run()
    output.finish(found.as_json(), lambda console: print_dry_run(found, console))
    if not found.is_ready:
        raise typer.Exit(1)


def _resolve(changes: list[str], config: Path | None, run_dir: Path | None, resume: Path | None) -> TrainConfig:
    """The configuration of the run. Raises ConfigError for settings and options that cannot work."""
    from agentlightning.config import TrainConfig
    from agentlightning.errors import ConfigError
    from agentlightning.training.persistence.run_changes import resumed_settings
    from agentlightning.util.settings import load_settings

    if resume is None:
        return load_settings(TrainConfig, toml=config, overrides=changes)
    if config is not None:
        raise ConfigError("--resume uses the run's own settings; give those to change as section.key=value")
    if run_dir is not None:
        raise ConfigError(f"--resume {resume} continues in that directory; leave out --run-dir {run_dir}")
    return resumed_settings(resume, changes)


def _store(server: str | None, token: str | None) -> LightningStoreClient | None:
    if server is None:
        return None
    from agentlightning.store.http.client import LightningStoreClient

    return LightningStoreClient(server, token)


def _print_settings(settings: TrainConfig) -> None:
    from agentlightning.util.settings import dump_toml

    typer.echo(dump_toml(settings), nl=False)
