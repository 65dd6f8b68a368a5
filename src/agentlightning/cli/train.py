"""`agl train`: train an agent on tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from agentlightning.cli.formatting.training_report import print_result
from agentlightning.cli.options import Agent, Dataset, Json, Model, Reward, Token
from agentlightning.cli.output import Output, errors_reported


def register(app: typer.Typer) -> None:
    app.command("train")(train)


def train(
    settings: Annotated[list[str] | None, typer.Argument(help="section.key=value ...", show_default=False)] = None,
    agent: Agent = None,
    reward: Reward = None,
    dataset: Dataset = None,
    model: Model = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of data order and sampling.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where to keep the run (default: runs/<time>).")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue the run in this directory; settings given with it change it.")
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(help="Keep rollouts in the store of this `agl serve`; its runners run them with runner.hosts=0."),
    ] = None,
    token: Token = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Train an agent on tasks, and measure the gain on tasks it has not seen.

    Settings are given as section.key=value, for example algorithm.steps=50 or runner.timeout_seconds=30.
    """
    output = Output(as_json)
    directory = resume or run_dir
    with errors_reported(output, lambda: directory):
        from agentlightning.config import TrainConfig
        from agentlightning.errors import ConfigError
        from agentlightning.store.http.client import LightningStoreClient
        from agentlightning.trainer import Trainer
        from agentlightning.util.progress import Progress
        from agentlightning.util.settings import dump_toml, load_settings

        shortcuts = {"agent": agent, "reward": reward, "data.train": dataset, "policy.model": model, "run.seed": seed}
        given = [f"{key}={json.dumps(value)}" for key, value in shortcuts.items() if value is not None]
        progress = Progress(console=output.console)
        store = None if server is None else LightningStoreClient(server, token)
        if resume is not None:
            if config is not None:
                raise ConfigError("--resume takes a run's own settings; give those to change as section.key=value")
            if run_dir is not None:
                raise ConfigError(f"--resume {resume} goes on in that directory; leave out --run-dir {run_dir}")
            trainer = Trainer.resume(resume, changes=[*given, *(settings or [])], progress=progress, store=store)
            if dry_run:
                typer.echo(dump_toml(trainer.config), nl=False)
                return
        else:
            resolved = load_settings(TrainConfig, toml=config, overrides=[*given, *(settings or [])])
            if dry_run:
                typer.echo(dump_toml(resolved), nl=False)
                return
            trainer = Trainer(resolved, run_dir=run_dir, progress=progress, store=store)
        directory = trainer.run_dir
        result = trainer.fit()
        output.finish(result.as_json(), lambda console: print_result(result, console))
