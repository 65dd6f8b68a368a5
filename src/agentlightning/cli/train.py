"""`agl train`: train an agent on tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from agentlightning.cli.formatting.dry_run import print_dry_run
from agentlightning.cli.opening import overrides, own_config
from agentlightning.cli.options import Agent, Data, Environment, Model, NewRun, Reward, Token
from agentlightning.cli.output import Output, Result, agl
from agentlightning.cli.viewing.live import LiveProgress
from agentlightning.errors import ConfigError

if TYPE_CHECKING:
    from agentlightning.config import TrainConfig


def train(
    ctx: typer.Context,
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
) -> Result | None:
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
    output: Output = ctx.obj
    output.run_dir = resume or run
    named = {"env": env, "agent": agent, "reward": reward, "data": data, "model": model, "seed": seed}
    settings = settings or []
    again = agl("train", *settings, **named, config=config, run=run, resume=resume, server=server)
    changes = overrides({SHORTCUTS.get(name, name): value for name, value in named.items()}, settings)
    config = config or (own_config() if resume is None else None)
    resolved = _resolve(changes, config, run, resume)
    parts: dict[str, Any] = {"progress": LiveProgress(console=output.console)}
    if server is not None:
        from agentlightning.store.http.client import LightningStoreClient

        parts["store"] = LightningStoreClient(server, token)
    if print_config:
        from agentlightning.util.settings import dump_toml

        typer.echo(dump_toml(resolved), nl=False)
        return None
    from agentlightning.cli.formatting.training_report import report_of
    from agentlightning.trainer import Trainer

    if resume is not None:
        trainer = Trainer.resume(resume, changes=changes, **parts)
    else:
        trainer = Trainer(resolved, run_dir=run, **parts)
    if dry_run:
        found = trainer.dry_run()
        after = [again if found.is_ready else f"{again} --dry-run"]
        return Result(found.as_json(), lambda console: print_dry_run(found, console), after, not found.is_ready)
    output.run_dir = trainer.run_dir
    return report_of(trainer.train() if trainer.is_recorded else trainer.fit())


SHORTCUTS: Final = {"data": "data.train", "model": "policy.model", "seed": "run.seed"}
"""Options whose setting has another name."""


def _resolve(changes: list[str], config: Path | None, run: Path | None, resume: Path | None) -> TrainConfig:
    """The configuration of the run. Raises ConfigError for settings and options that cannot work."""
    from agentlightning.config import TrainConfig
    from agentlightning.training.persistence.run_changes import settings_of_run
    from agentlightning.util.settings import load_settings

    if resume is None:
        return load_settings(TrainConfig, toml=config, overrides=changes)
    if config is not None:
        raise ConfigError("--resume uses the run's own settings; give those to change as section.key=value")
    if run is not None:
        raise ConfigError(f"--resume {resume} continues in that directory; leave out --run {run}")
    return settings_of_run(resume, changes)
