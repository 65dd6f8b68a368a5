"""`agl train`: train an agent on tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentlightning.cli.formatting.dry_run import print_dry_run
from agentlightning.cli.opening import overrides, own_config
from agentlightning.cli.options import Agent, Data, Environment, Json, Model, NewRun, Reward, Token
from agentlightning.cli.output import Output, agl, open_output
from agentlightning.cli.viewing.live import LiveProgress

if TYPE_CHECKING:
    from agentlightning.config import TrainConfig
    from agentlightning.store.http.client import LightningStoreClient
    from agentlightning.trainer import Trainer


def train(
    settings: Annotated[list[str] | None, typer.Argument(help="section.key=value ...", show_default=False)] = None,
    agent: Agent = None,
    reward: Reward = None,
    data: Data = None,
    env: Environment = None,
    model: Model = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of data order and sampling.")] = None,
    run: NewRun = None,
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

    Settings are given as section.key=value. Without --config and --resume, those of agl.toml in the current directory
    are used, if there is one. With data.sessions=STORE, or a file of algorithm.type=sft or dpo, it learns from what was
    recorded instead.

    \b
    Settings that are changed most, with examples of values:
      algorithm.steps=50             steps of training
      algorithm.tasks_per_step=8     tasks in each step
      algorithm.group_size=8         rollouts of each task, whose rewards are compared
      algorithm.optimizer.lr=1e-5    learning rate (default: from the size of the model)
      policy.lora.r=16               train a LoRA adapter of this rank, not all weights
      policy.token_budget=4096       tokens computed at once: less needs less memory
      runner.concurrency=32          rollouts at the same time
      evaluation.every=10            steps between validations
    All settings with their meaning: agl train --print-config

    \b
    Examples:
      agl train --agent agent.py:solve --reward reward.py:score --data tasks.jsonl --model smollm2-135m
      agl train --config train.toml --run runs/lora policy.lora.r=16 algorithm.optimizer.lr=1e-4
      agl train --resume runs/lora algorithm.steps=200
    """
    directory = resume or run
    with open_output(as_json, lambda: directory) as output:
        shortcuts = {
            "env": env,
            "agent": agent,
            "reward": reward,
            "data.train": data,
            "policy.model": model,
            "run.seed": seed,
        }
        changes = overrides(shortcuts, settings)
        again = agl(
            "train",
            *(settings or []),
            agent=agent,
            reward=reward,
            data=data,
            env=env,
            model=model,
            config=config,
            seed=seed,
            run=run,
            resume=resume,
            server=server,
        )
        config = config or (own_config() if resume is None else None)
        resolved = _resolve(changes, config, run, resume)
        store = _store(server, token)
        if print_config:
            from agentlightning.util.settings import dump_toml

            typer.echo(dump_toml(resolved), nl=False)
            return
        from agentlightning.cli.formatting.training_report import finish
        from agentlightning.trainer import Trainer

        progress = LiveProgress(console=output.console)
        if resume is not None:
            trainer = Trainer.resume(resume, changes=changes, progress=progress, store=store)
        else:
            trainer = Trainer(resolved, run_dir=run, progress=progress, store=store)
        if dry_run:
            _check(trainer, again, output)
            return
        directory = trainer.run_dir
        result = trainer.train() if trainer.is_recorded else trainer.fit()
        finish(result, output)


def _check(trainer: Trainer, again: str, output: Output) -> None:
    """The dry run. Exit status 1 where training cannot work like this."""
    found = trainer.dry_run()
    after = [again] if found.is_ready else [f"{again} --dry-run"]
    output.finish(found.as_json(), lambda console: print_dry_run(found, console), *after)
    if not found.is_ready:
        raise typer.Exit(1)


def _resolve(changes: list[str], config: Path | None, run: Path | None, resume: Path | None) -> TrainConfig:
    """The configuration of the run. Raises ConfigError for settings and options that cannot work."""
    from agentlightning.config import TrainConfig
    from agentlightning.errors import ConfigError
    from agentlightning.training.persistence.run_changes import settings_of_run
    from agentlightning.util.settings import load_settings

    if resume is None:
        return load_settings(TrainConfig, toml=config, overrides=changes)
    if config is not None:
        raise ConfigError("--resume uses the run's own settings; give those to change as section.key=value")
    if run is not None:
        raise ConfigError(f"--resume {resume} continues in that directory; leave out --run {run}")
    return settings_of_run(resume, changes)


def _store(server: str | None, token: str | None) -> LightningStoreClient | None:
    if server is None:
        return None
    from agentlightning.store.http.client import LightningStoreClient

    return LightningStoreClient(server, token)
