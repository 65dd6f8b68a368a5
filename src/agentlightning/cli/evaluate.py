"""`agl eval`: measure an agent on tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from agentlightning.cli.options import Agent, Dataset, Json, Reward
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
    reward_weights: Annotated[
        str | None, typer.Option(help="Weights of the named dimensions of a reward: '{\"correctness\": 1.0}'.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rollouts of each task.")] = 1,
    failed: Annotated[
        str, typer.Option(help="How rollouts without a reward count: lowest, exclude, or a reward such as 0.")
    ] = "lowest",
    bounds: Annotated[
        tuple[float, float] | None, typer.Option(help="The lowest and the highest reward possible, if not 0 and 1.")
    ] = None,
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
        from agentlightning.algorithms import make_algorithm
        from agentlightning.cli.formatting.evaluation import evaluation_record, print_evaluation
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
            weights = weights or make_algorithm(known.algorithm).reward_weights
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
            bounds=bounds,
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


def _weights(text: str | None) -> dict[str, float] | None:
    from agentlightning.algorithms.lightning_rl import LightningRLConfig
    from agentlightning.util.settings import load_settings

    if text is None:
        return None
    return load_settings(LightningRLConfig, overrides=[f"reward_weights={text}"]).reward_weights
