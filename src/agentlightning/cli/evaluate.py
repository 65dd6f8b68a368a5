"""`agl eval`: measure an agent on tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentlightning.cli.app import Output, reported
from agentlightning.cli.train import Agent, Dataset, Json, Reward


def register(app: typer.Typer) -> None:
    app.command("eval")(evaluate)


def evaluate(
    agent: Agent = None,
    reward: Reward = None,
    dataset: Dataset = None,
    model: Annotated[str | None, typer.Option(help="A directory that transformers loads.")] = None,
    run: Annotated[Path | None, typer.Option(help="Take agent, held-out tasks and checkpoint from this run.")] = None,
    sampled: Annotated[bool, typer.Option("--sampled", help="Sample at temperature 1, not greedily.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first tasks.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Rollouts under way at once.")] = 64,
    as_json: Json = False,
) -> None:
    """Measure an agent: its mean reward on tasks, with a 95% confidence interval."""
    output = Output(as_json)
    with reported(output):
        from agentlightning.config import RunnerConfig
        from agentlightning.errors import ConfigError
        from agentlightning.progress import Progress
        from agentlightning.trainer import evaluate as measure
        from agentlightning.trainer import settings_of_run

        if run is not None:
            known = settings_of_run(run)
            agent, reward = agent or known.agent, reward or known.reward
            dataset = dataset or str(run / "data" / "held_out.jsonl")
            model = model or str(run / "checkpoint")
        if agent is None or dataset is None:
            raise ConfigError("agl eval needs --agent and --dataset, or --run RUN_DIR")
        result = measure(
            agent,
            dataset,
            model=model,
            reward=reward,
            mode="sampled" if sampled else "greedy",
            limit=limit,
            runner=RunnerConfig(concurrency=concurrency),
            progress=Progress(console=output.console),
        )
        record = {
            "reward": result.mean,
            "interval": list(result.interval),
            "tasks": len(result.rewards),
            "missing": result.missing,
            "seconds": round(result.seconds, 2),
        }
        output.finish(record, lambda console: console.print(f"reward {result}"))
