"""`agl eval`: measure an agent on tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentlightning.cli.options import Agent, Dataset, Json, Reward
from agentlightning.cli.output import Output, errors_reported

if TYPE_CHECKING:
    from agentlightning.evaluation.evaluation import Evaluation


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
    reward_weights: Annotated[
        str | None, typer.Option(help="Weights of the named dimensions of a reward: '{\"correctness\": 1.0}'.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Rollouts to run at the same time.")] = 64,
    as_json: Json = False,
) -> None:
    """Measure an agent: its mean reward on tasks, with a 95% confidence interval."""
    output = Output(as_json)
    with errors_reported(output):
        from agentlightning.config import RunnerConfig
        from agentlightning.errors import ConfigError
        from agentlightning.evaluator import evaluate as measure
        from agentlightning.training.persistence.run_changes import settings_of_run
        from agentlightning.util.progress import Progress

        weights = _weights(reward_weights)
        if run is not None:
            known = settings_of_run(run)
            agent, reward = agent or known.agent, reward or known.reward
            dataset = dataset or str(run / "data" / "held_out.jsonl")
            model = model or str(run / "checkpoint")
            weights = weights or known.algorithm.reward_weights
        if agent is None or dataset is None:
            raise ConfigError("agl eval needs --agent and --dataset, or --run RUN_DIR")
        result = measure(
            agent,
            dataset,
            model=model,
            reward=reward,
            mode="sampled" if sampled else "greedy",
            limit=limit,
            reward_weights=weights,
            runner=RunnerConfig(concurrency=concurrency),
            progress=Progress(console=output.console),
        )
        output.finish(_record(result), lambda console: console.print(f"reward {result}"))


def _record(result: Evaluation) -> dict[str, Any]:
    """The result as JSON values, as `--json` prints it."""
    return {
        "reward": result.mean,
        "score": result.score,
        "interval": list(result.interval),
        "tasks": len(result.rewards),
        "measured": len(result.known),
        "missing": result.missing,
        "reasons": dict(result.reasons),
        "seconds": round(result.seconds, 2),
    }


def _weights(text: str | None) -> dict[str, float] | None:
    from agentlightning.algorithms.lightning_rl import LightningRLConfig
    from agentlightning.util.settings import load_settings

    if text is None:
        return None
    return load_settings(LightningRLConfig, overrides=[f"reward_weights={text}"]).reward_weights
