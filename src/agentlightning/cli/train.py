"""`agl train`: train an agent on tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agentlightning.cli.main import Output, reported
from agentlightning.credit.rejection import describe_reasons
from agentlightning.evaluation.intervals import Gain
from agentlightning.training.result import TrainingResult

Agent = Annotated[str | None, typer.Option(help="module:name, path/file.py:name, or a command line in any language.")]
Reward = Annotated[str | None, typer.Option(help="module:name or path/file.py:name of (task, output) -> number.")]
Dataset = Annotated[str | None, typer.Option(help="Tasks: a JSONL, JSON or Parquet file.")]
Model = Annotated[str | None, typer.Option(help="A directory that transformers loads, or `tiny`.")]
Token = Annotated[str | None, typer.Option(envvar="AGL_TOKEN", help="The server's access token.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line; progress to stderr.")]


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
    with reported(output, lambda: directory):
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
        output.finish(result.as_json(), lambda console: show(result, console))


def show(result: TrainingResult, console: Console) -> None:
    """The report, for people."""
    console.print()
    for mode, gain in result.held_out.items():
        low, high = gain.interval
        console.print(
            f"held-out reward, {mode:<8} {gain.before:.3f} -> {gain.after:.3f}   "
            f"gain {gain.gain:+.3f}  (95% interval {low:+.3f} to {high:+.3f}, {gain.tasks} tasks)"
        )
        if gain.missing_before or gain.missing_after:
            console.print(f"  {_missing(result, mode, gain)}")
    failed = f", {result.failed_rollouts} failed" if result.failed_rollouts else ""
    if result.rejected_rollouts:
        failed += f", left out: {describe_reasons(result.rejected_rollouts)}"
    console.print(
        f"{result.steps} steps, {result.rollouts} rollouts{failed}, {result.seconds:.1f} s"
        + (f"; best checkpoint from step {result.best_step}" if result.best_step else "")
    )
    for warning in result.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    for name, path in (("checkpoint", result.checkpoint), ("curve", result.curve), ("run", result.run_dir)):
        console.print(f"{name:<11} {path}")


def _missing(result: TrainingResult, mode: str, gain: Gain) -> str:
    counts = (("before", gain.missing_before), ("after", gain.missing_after))
    parts = [
        f"{describe_reasons(result.missing.get(f'{when}-{mode}', {})) or f'{count} missing'} {when}"
        for when, count in counts
        if count
    ]
    return f"tasks without a reward: {'; '.join(parts)}. The means leave them out; the interval allows them any reward"
