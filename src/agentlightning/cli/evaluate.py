"""`agl eval`: measure an agent on tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from agentlightning.cli.opening import weights_of
from agentlightning.cli.options import Agent, Dataset, Json, Reward, RewardWeights
from agentlightning.cli.output import Output, errors_reported


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
    reward_weights: RewardWeights = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rollouts of each task.")] = 1,
    failed: Annotated[
        str, typer.Option(help="How rollouts without a reward count: lowest, exclude, or a reward such as 0.")
    ] = "lowest",
    slices: Annotated[
        list[str] | None, typer.Option("--slice", help="Also show the result by this field of tasks; repeatable.")
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(help="Compare with an earlier evaluation of these tasks, a file of --out.")
    ] = None,
    aa: Annotated[
        bool, typer.Option("--aa", help="Run twice, and compare the agent with itself: what differences chance makes.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the evaluation to this JSON file.")] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Keep rollouts in this directory, and run none twice; continues there.")
    ] = None,
    trained_on: Annotated[
        str | None, typer.Option(help="Tasks that the agent has learned from: none may be evaluated.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Rollouts to run at the same time.")] = 64,
    as_json: Json = False,
) -> None:
    """Measure an agent: its mean reward on tasks, with a 95% confidence interval."""
    output = Output(as_json)
    with errors_reported(output):
        from agentlightning.cli.formatting.evaluation import evaluation_record, print_evaluation
        from agentlightning.errors import ConfigError
        from agentlightning.evaluator import evaluate as measure
        from agentlightning.training.persistence.run_changes import settings_of_run
        from agentlightning.util.progress import Progress

        weights = weights_of(reward_weights, run)
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
            reward_weights=weights,
            repeats=2 * repeats if aa else repeats,
            failed=_failed(failed),
            slices=slices or (),
            compare=compare,
            cache=cache,
            concurrency=concurrency,
            trained_on=trained_on,
            progress=Progress(console=output.console),
        )
        if out is not None:
            result.save(out)
        output.finish(evaluation_record(result, aa), lambda console: print_evaluation(console, result, aa))


def _failed(text: str) -> Any:
    """`--failed` as `agl.evaluate` takes it, which refuses what is neither a word it knows nor a number."""
    try:
        return float(text)
    except ValueError:
        return text
