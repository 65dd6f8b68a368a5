"""`agl eval`: measure an agent on tasks."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentlightning.cli.opening import CONFIG_FILE, RUNS, overrides, own_config, run_or_newest, weights_of
from agentlightning.cli.options import Agent, Data, Environment, Model, Reward, RewardWeights
from agentlightning.cli.output import Result, agl
from agentlightning.errors import ConfigError

if TYPE_CHECKING:
    from agentlightning.config import TrainConfig


def evaluate(
    ctx: typer.Context,
    settings: Annotated[
        list[str] | None, typer.Argument(help="runner.key=value, prompts.NAME=TEXT ...", show_default=False)
    ] = None,
    agent: Agent = None,
    reward: Reward = None,
    data: Data = None,
    env: Environment = None,
    model: Model = None,
    run: Annotated[
        Path | None,
        typer.Option(
            help="Take agent, held-out tasks, weights and prompts from this run (default: the newest below runs, where"
            " neither --agent nor --data nor --env is given; before the first run, the settings of agl.toml).",
            show_default=False,
        ),
    ] = None,
    sampled: Annotated[bool, typer.Option("--sampled", help="Sample at temperature 1, not greedily.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first tasks.")] = None,
    reward_weights: RewardWeights = None,
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
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Rollouts to run at the same time (default: 64).")
    ] = None,
) -> Result:
    """Measure an agent: its mean reward on tasks, with a 95% confidence interval.

    Settings say how the agent is run, as in agl train: runner.timeout_seconds=30, 'runner.env={QUESTION = "question"}',
    and which prompts it is given: prompts.NAME=TEXT. Of a run, they are those of the run. Where no agent is named and
    there is no run yet, those of agl.toml in the current directory are used, and its agent, reward, tasks and model.

    \b
    Examples:
      agl eval --agent agent.py:solve --reward reward.py:score --data test.jsonl --out before.json
      agl eval --run runs/first --data test.jsonl --compare before.json
      agl eval --agent agent.py:solve --reward reward.py:score --data test.jsonl "prompts.prompt=$(cat new.txt)"
    """
    from agentlightning.cli.formatting.evaluation import evaluation_record, print_evaluation
    from agentlightning.evaluation.evaluation import written
    from agentlightning.evaluator import evaluate as measure
    from agentlightning.util.progress import Progress

    if others := [each for each in settings or [] if not each.startswith(("runner.", "prompts."))]:
        raise ConfigError(f"{others[0]} is no setting of an evaluation; use runner.key=value, prompts.NAME=TEXT")
    run, config = _source(run, data, named=agent is not None or env is not None)
    if run is None:
        after = agl("train", "--dry-run", agent=agent, reward=reward, data=data, env=env, model=model)
    else:
        after = agl("report", run)
    changes = overrides({"env": env, "agent": agent, "reward": reward}, settings)
    known, tasks, model, resources = _subject(run, config, changes, data, model)
    with written(out) if out else nullcontext():  # Not once everything was run.
        pass
    result = measure(
        known.agent,
        tasks,
        model=model,
        reward=known.reward,
        # A run may have been served by runners elsewhere; an evaluation has its own.
        runner=known.runner.model_copy(update={"hosts": max(1, known.runner.hosts), "queue": None}),
        mode="sampled" if sampled else "greedy",
        limit=limit,
        reward_weights=weights_of(reward_weights, run or config),
        repeats=2 * repeats if aa else repeats,
        failed=_failed(failed),
        bounds=bounds,
        slices=slices or (),
        compare=compare,
        cache=cache,
        concurrency=concurrency,
        trained_on=trained_on,
        resources=resources,
        progress=Progress(console=ctx.obj.console),
    )
    if out is not None:
        result.save(out)
    return Result(evaluation_record(result, aa), lambda console: print_evaluation(console, result, aa), [after])


def _source(run: Path | None, data: str | None, *, named: bool) -> tuple[Path | None, Path | None]:
    """The run, or the settings file, that says what is measured; no file where an agent is `named`. Raises ConfigError
    where nothing says it."""
    if named or run is not None:
        return run, None
    if data is None and (any(RUNS.glob("*/state.json")) or not CONFIG_FILE.is_file()):
        return run_or_newest(None, "give --agent and --data, --env, or --run RUN"), None
    return None, own_config()


def _subject(
    run: Path | None, config: Path | None, changes: list[str], data: str | None, model: str | None
) -> tuple[TrainConfig, Any, str | None, Any]:
    """The settings that say what is measured, its tasks, its model, and its prompts: those of a finished run, or of a
    settings file, where others are not named. Raises ConfigError where an agent or tasks are missing."""
    from agentlightning.algorithms.base import make_algorithm
    from agentlightning.config import TrainConfig
    from agentlightning.task import load_dataset, overlaps
    from agentlightning.training.export import checkpoint_of, holds_weights
    from agentlightning.training.persistence.checkpoints import read_resources
    from agentlightning.training.persistence.run_changes import settings_of_run
    from agentlightning.util.json_values import loads
    from agentlightning.util.settings import load_settings

    if run is None:
        known = load_settings(TrainConfig, toml=config, overrides=changes)
        data = data or (known.data.held_out if config is not None else None) or known.data.train
        if known.agent is None or data is None:
            lacking = f"; {config} names no agent, or no tasks" if config else ""
            raise ConfigError(f"agl eval needs --agent and --data, --env, or --run RUN{lacking}")
        if config is not None:
            if model is None and make_algorithm(known.algorithm).learns_weights:
                model = known.policy.model
            unlearned = " before its warm start" if model == known.policy.model and known.warm_start.dataset else ""
            typer.echo(f"evaluating {known.agent} on {data}, model: {model or 'its own'}{unlearned}", err=True)
        return known, data, model, known.prompts
    known, found = settings_of_run(run, changes), checkpoint_of(run)
    tasks, train = load_dataset(data or str(run / "data" / "held_out.jsonl")), run / "data" / "train.jsonl"
    learned = [loads(line) for line in train.read_bytes().splitlines()] if train.exists() else []
    for each in overlaps({"training": learned, "evaluation": tasks}):
        typer.echo(f"{each}: {run} has learned from them, so the result promises too much", err=True)
    if known.agent is None:
        raise ConfigError(f"the agent of {run} was given as an object, which no file holds; name it: --agent")
    model = model or (str(found) if holds_weights(found) else None)
    named = {each.partition("=")[0].split(".")[1] for each in changes if each.startswith("prompts.")}
    given = {name: prompt for name, prompt in known.prompts.items() if name in named}
    return known, tasks, model, read_resources(run, found.name) | given


def _failed(text: str) -> Any:
    """`--failed` as `agl.evaluate` takes it, which refuses what is neither a word it knows nor a number."""
    try:
        return float(text)
    except ValueError:
        return text
