"""`agl eval`, `agl compare`, `agl rescore` and `agl credit`: what was measured, and what else it says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import RenderableType
from rich.table import Table
from typer import Argument, Context, Option

from agentlightning.cli.options import (
    CONFIG_FILE,
    RUNS,
    AnyStore,
    Filter,
    Reward,
    RewardWeights,
    StoreOfRun,
    Subject,
    overrides,
    own_config,
    run_or_newest,
    weights_of,
)
from agentlightning.cli.output import Result, agl
from agentlightning.errors import ConfigError, DatasetError
from agentlightning.rollouts import RolloutMode
from agentlightning.trajectory import Trajectory
from agentlightning.util.json_values import loads
from agentlightning.util.progress import Progress
from agentlightning.util.settings import load_settings

if TYPE_CHECKING:
    from agentlightning.config import TrainConfig
    from agentlightning.evaluation.credit_comparison import CreditComparison
    from agentlightning.evaluation.evaluation import Evaluation
    from agentlightning.rescorer import Rescoring


@dataclass(frozen=True)
class Options:
    """The options of `agl eval` that are those of `agl.evaluate`."""

    limit: int | None = Option(None, min=1)
    """Only the first tasks."""
    bounds: tuple[float, float] | None = None
    """The lowest and the highest reward possible, if not 0 and 1."""
    slices: list[str] = Option([], "--slice")
    """Also show the result by this field of tasks; repeatable."""
    compare: Path | None = None
    """Compare with an earlier evaluation of these tasks, a file of --out."""
    cache: Path | None = None
    """Keep rollouts in this directory, and run none twice; continues there."""
    trained_on: str | None = None
    """Tasks that the agent has learned from: none may be evaluated."""
    concurrency: int | None = Option(None, min=1)
    """Rollouts to run at the same time (default: 64)."""


def evaluate(
    ctx: Context,
    *,
    subject: Subject,
    settings: list[str] = Argument([]),
    run: Path | None = None,
    sampled: bool = False,
    options: Options,
    reward_weights: RewardWeights = None,
    repeats: int = Option(1, min=1),
    failed: str = "lowest",
    aa: bool = False,
    out: Path | None = None,
) -> Result:
    """Measure an agent: its mean reward on tasks, with a 95% confidence interval.

    Settings say how the agent is run, as in agl train: runner.timeout_seconds=30, 'runner.env={QUESTION = "question"}',
    and which prompts it is given: prompts.NAME=TEXT. Of a run, they are those of the run. Where no agent is named and
    there is no run yet, those of agl.toml in the current directory are used, and its agent, reward, tasks and model.

    settings: runner.key=value, prompts.NAME=TEXT ...
    run: Take agent, held-out tasks, weights and prompts from this run (default: the newest below runs, where neither
        --agent nor --data nor --env is given; before the first run, the settings of agl.toml).
    sampled: Sample at temperature 1, not greedily.
    repeats: Rollouts of each task.
    failed: How rollouts without a reward count: lowest, exclude, or a reward such as 0.
    aa: Run twice, and compare the agent with itself: what differences chance makes.
    out: Write the evaluation to this JSON file.

    \b
    Examples:
      agl eval --agent agent.py:solve --reward reward.py:score --data test.jsonl --out before.json
      agl eval --run runs/first --data test.jsonl --compare before.json
      agl eval --agent agent.py:solve --reward reward.py:score --data test.jsonl "prompts.prompt=$(cat new.txt)"
    """
    from agentlightning.evaluation.evaluation import written
    from agentlightning.evaluator import evaluate as measure

    for each in settings:
        if not each.startswith(("runner.", "prompts.")):
            raise ConfigError(f"{each} is no setting of an evaluation; use runner.key=value, prompts.NAME=TEXT")
    config = None
    if run is None and subject.agent is None and subject.env is None:
        if subject.data is None and (any(RUNS.glob("*/state.json")) or not CONFIG_FILE.is_file()):
            run = run_or_newest(None, "give --agent and --data, --env, or --run RUN")
        else:
            config = own_config()
    after = agl("train", "--dry-run", **vars(subject)) if run is None else agl("report", run)
    changes = overrides({"env": subject.env, "agent": subject.agent, "reward": subject.reward}, settings)
    known, model, tasks, resources = _subject(run, config, changes, subject)
    with written(out) if out else nullcontext():  # Not once everything was run.
        pass
    failed_as: Any = failed  # `agl.evaluate` refuses a word that it does not know.
    with suppress(ValueError):
        failed_as = float(failed)
    result = measure(
        known.agent,
        tasks,
        model=model,
        reward=known.reward,
        # A run may have been served by runners elsewhere; an evaluation has its own.
        runner=known.runner.model_copy(update={"hosts": max(1, known.runner.hosts), "queue": None}),
        mode="sampled" if sampled else "greedy",
        reward_weights=weights_of(reward_weights, known),
        repeats=2 * repeats if aa else repeats,
        failed=failed_as,
        resources=resources,
        progress=Progress(console=ctx.obj.console),
        **vars(options),
    )
    if out is not None:
        result.save(out)
    return Result(evaluation_record(result, aa), _evaluation_lines(result, aa), [after])


def _subject(
    run: Path | None, config: Path | None, changes: list[str], given: Subject
) -> tuple[TrainConfig, str | None, Any, Any]:
    """The settings that say what is measured, its model, its tasks, and its prompts: those of a finished run, or of a
    settings file, where others are not named. Raises ConfigError where an agent or tasks are missing."""
    from agentlightning.algorithms.base import make_algorithm
    from agentlightning.config import TrainConfig
    from agentlightning.dashboard.data.run_files import RunFiles
    from agentlightning.task import load_dataset, overlaps
    from agentlightning.training.export import checkpoint_of, holds_weights
    from agentlightning.training.persistence.checkpoints import read_resources
    from agentlightning.training.persistence.run_dir import settings_of_run

    data, model = given.data, given.model
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
        return known, model, data, known.prompts
    known, found = settings_of_run(run, changes), checkpoint_of(run)
    tasks = load_dataset(data or str(run / "data" / "held_out.jsonl"))
    for each in overlaps({"training": RunFiles(run).tasks("train"), "evaluation": tasks}):
        typer.echo(f"{each}: {run} has learned from them, so the result promises too much", err=True)
    if known.agent is None:
        raise ConfigError(f"the agent of {run} was given as an object, which no file holds; name it: --agent")
    model = model or (str(found) if holds_weights(found) else None)
    named = {each.partition("=")[0].split(".")[1] for each in changes if each.startswith("prompts.")}
    prompts = {name: prompt for name, prompt in known.prompts.items() if name in named}
    return known, model, tasks, read_resources(run, found.name) | prompts


def _evaluation_lines(result: Evaluation, aa: bool) -> Iterator[str]:
    """The reward and, where there are such, pass@k, slices, the comparison and the A/A test."""
    yield f"reward {result}"
    if result.cached:
        yield f"{result.cached} rollouts were taken from the cache"
    for k, once, always in _passes(result):
        yield f"pass@{k} {once:.3f}   pass^{k} {always:.3f}"
    for field, values in result.slices.items():
        for value, part in values.items():
            yield f"{field}={value}: {part if part.known else 'no reward'}"
    if (found := result.comparison) is not None:
        yield f"gain {found}"
        better = "it is better" if found.gain > 0 else "it is worse"
        yield better if found.significant else "no difference is shown"
    if aa:
        yield str(result.null_test())


def evaluation_record(result: Evaluation, aa: bool) -> dict[str, Any]:
    """The evaluation as JSON values, as `--json` prints it."""
    record = _measured(result) | {
        "missing": result.missing,
        "reasons": dict(result.reasons),
        "repeats": result.repeats,
        "missing_rollouts": result.missing_rollouts,
        "cached": result.cached,
        "seconds": round(result.seconds, 2),
        "pass_at_k": {str(k): once for k, once, _ in _passes(result)},
        "pass_hat_k": {str(k): always for k, _, always in _passes(result)},
        "slices": {
            field: {value: _measured(part) for value, part in values.items()} for field, values in result.slices.items()
        },
    }
    if result.comparison is not None:
        record["comparison"] = asdict(result.comparison) | {"significant": result.comparison.significant}
    record["advice"] = evaluation_advice(result)
    if aa:
        record["aa"] = asdict(result.null_test())
    return record


def evaluation_advice(result: Evaluation) -> list[str]:
    """What keeps an evaluation from saying more, or from being a start for training."""
    found: list[str] = []
    if result.missing:
        found.append(f"{result.missing} of {len(result.rewards)} tasks have no reward; `reasons` counts why")
    if len(set(result.known)) == 1 and result.comparison is None:
        reward = result.known[0]
        easier = "use easier tasks, a reward with partial credit, or `agl sft` on demonstrations first"
        way = "use harder tasks" if reward >= 1 else easier
        found.append(
            f"all {len(result.known)} rewards are {reward:g}, and reinforcement learning learns from differences:"
            f" {way}; --sampled shows whether rollouts of one task differ"
        )
    if result.comparison is not None and not result.comparison.significant:
        found.append(
            "no difference is shown: say so, or measure on more tasks (agl eval --aa says how small a gain these show)"
        )
    return found


def _measured(result: Evaluation) -> dict[str, Any]:
    numbers = (result.mean, result.score, result.interval) if result.known else (None,) * 3
    found = dict(zip(("reward", "score", "interval"), numbers, strict=True))
    return found | {"tasks": len(result.rewards), "measured": len(result.known)}


def _passes(result: Evaluation) -> list[tuple[int, float, float]]:
    """k, pass@k and pass^k for one rollout and for all, where tasks have several."""
    if result.repeats < 2 or (result.failed_as == "exclude" and result.missing_rollouts):
        return []
    return [(k, result.pass_at_k(k), result.pass_hat_k(k)) for k in (1, result.repeats)]


# -- agl compare ------------------------------------------------------------------------------------------------------


def compare_runs(runs: list[Path] = Argument()) -> Result:
    """Compare configurations over seeds: mean and 95% interval of the held-out reward, and of their difference.

    Runs whose settings differ in the seed alone are one configuration. The first one named is what the others are
    compared with: seed by seed where all have the same seeds.

    runs: The directories of finished runs.

    \b
    Examples:
      agl compare runs/grpo-1 runs/grpo-2 runs/dapo-1 runs/dapo-2
      agl compare runs/*
    """
    from agentlightning.dashboard.data.run_files import RunFiles, compared_configurations, configurations

    found = configurations(map(RunFiles, runs))
    for run in runs:
        if not (run / "report.json").exists():
            raise ConfigError(f"{run} has no report.json: the run is not finished; finish it, or leave it out")
    record = {"configurations": compared_configurations(found)}
    return Result(record, _comparison_lines(record), [agl("report", runs[0])])


def _comparison_lines(record: Mapping[str, Any]) -> Iterator[str]:
    for row in record["configurations"]:
        settings = ", ".join(f"{name}={value}" for name, value in row["settings"].items())
        seeds = ", ".join(map(str, row["seeds"]))
        yield f"{row['label']} (seeds {seeds}): {settings or 'the first configuration'}"
        for mode, after in row["after"].items():
            gain = _interval(row["gain"][mode], "+.3f")
            text = f"   {mode:<8} held-out reward {_interval(after, '.3f')}, gain {gain}"
            if "difference" in row:
                how = "seed by seed" if row["difference"][mode]["paired"] else "means of different seeds"
                text += f", difference {_interval(row['difference'][mode], '+.3f')}, {how}"
            yield text


def _interval(number: Mapping[str, Any], form: str) -> str:
    if number["mean"] is None:
        return "unknown"
    if number["interval"] is None:
        return f"{number['mean']:{form}} (one seed: no interval)"
    low, high = number["interval"]
    return f"{number['mean']:{form}} ({low:{form}} to {high:{form}})"


# -- agl rescore ------------------------------------------------------------------------------------------------------


async def rescore(
    ctx: Context,
    *,
    reward: Reward = None,
    run: str | None = None,
    store: AnyStore,
    chosen: Filter,
    task: str | None = None,
    concurrency: int = Option(8, min=1),
    dry_run: bool = False,
) -> Result:
    """Apply a new reward function to stored rollouts.

    Each gets a new final reward; earlier ones stay recorded. Without --status: rollouts that succeeded.

    run: A run directory, or part of the rollout id.
    task: JSON: a task, or some of its keys with their values.
    concurrency: Rollouts to score at the same time.
    dry_run: Score and report, but write nothing.

    \b
    Examples:
      agl rescore --reward new_reward.py:score --run runs/first --dry-run
      agl rescore --reward new_reward.py:score --store hub.db --mode train --task '{"level": 3}'
    """
    from agentlightning.rescorer import rescore_async
    from agentlightning.training.persistence.run_dir import read_state

    if reward is None:
        raise ConfigError("agl rescore needs --reward module:function")
    directory = Path(run) if run is not None and (Path(run) / "state.json").exists() else None
    named = run if directory is None else read_state(directory).run_id
    source = replace(store, store=store.store or (None if directory is None else str(directory / "store.db")))
    query = chosen.query()
    wanted = None if task is None else _read_json("--task", task, "; for text, write --task '\"...\"'")
    with Progress(ctx.obj.console) as progress:
        async with source.open() as opened:
            progress.phase("scoring rollouts")
            result = await rescore_async(
                opened,
                reward,
                run=named,
                status=query["status_in"] or ("succeeded",),
                mode=query["mode_in"],
                task=wanted,
                concurrency=concurrency,
                dry_run=dry_run,
                on_progress=progress.update,
            )
    if dry_run:
        words = [f"--{name}={each}" for name, values in vars(chosen).items() for each in values]
        after = agl("rescore", *words, reward=reward, run=run, task=task, store=store.store)
    else:
        after = agl("store", "list", sort="reward", store=source.store)
    return Result(asdict(result), _rescoring_lines(result), [after])


def _read_json(option: str, text: str, otherwise: str = "") -> Any:
    try:
        return loads(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text!r} is not JSON ({error}){otherwise}") from error


def _rescoring_lines(result: Rescoring) -> Iterator[str]:
    verb = "would get" if result.dry_run else "have"
    parts = [f"{result.rescored:,} of {result.rollouts:,} rollouts {verb} a new reward"]
    parts += [f"{result.unchanged:,} unchanged"] if result.unchanged else []
    parts += [f"{result.without_attempt:,} never ran"] if result.without_attempt else []
    parts += [f"{len(result.failed):,} failed and keep theirs"] if result.failed else []
    yield "; ".join(parts)
    if result.mean_before is not None and result.mean_after is not None:
        yield f"mean reward {result.mean_before:.4g} -> {result.mean_after:.4g}"
    for rollout_id, message in list(result.failed.items())[:3]:
        yield f"{rollout_id}: {message}"


# -- agl credit -------------------------------------------------------------------------------------------------------


async def compare_rules(
    store: StoreOfRun,
    earlier: str | None = Argument(None, hidden=True),
    rules: list[str] = Option([], "--rule"),
    groups: int = Option(128, min=1),
    mode: RolloutMode | None = None,
    target_agent: str | None = None,
    reward_weights: RewardWeights = None,
) -> Result:
    """Estimate how many rollouts each credit rule needs until its gradient shows more signal than noise.

    Reads the groups of a store (rollouts of one task each); nothing is trained and no model is needed.

    earlier: The earlier form of --store.
    rules: A rule's name, or JSON with its type and settings; repeatable (default: all rules).
    groups: Use at most this number of groups of two rollouts or more, the newest.
    mode: Only rollouts of this mode.
    target_agent: Only calls of agents whose name matches.

    \b
    Examples:
      agl credit compare --run runs/first
      agl credit compare --store hub.db --rule grpo --rule '{"type": "gae", "lam": 0.9}'
    """
    from agentlightning.credit.base import RULES
    from agentlightning.evaluation.credit_comparison import compare_credit

    if earlier is not None:
        typer.echo(f"STORE is an option now: --store {earlier}", err=True)
        store = replace(store, store=store.store or earlier)
    place = store.place
    chosen = [_read_json("--rule", each) if each.lstrip().startswith("{") else each for each in rules or RULES.names()]
    recorded, unreadable = await _read_groups(store, groups, mode, weights_of(reward_weights, place))
    found = compare_credit(recorded, chosen, target_agent=target_agent, left_out=unreadable)
    best = [each for each in found.signals[:1] if each.snr > 0]
    settings = Path(place).with_name("config.toml") if place else None  # Of the run whose store it is.
    of_run = ["--config", settings] if settings is not None and settings.is_file() else []
    after = [agl("train", *of_run, f"algorithm.credit={each.rule}", "--dry-run") for each in best]
    return Result(found.as_json(), _credit_lines(found), after)


async def _read_groups(
    store: StoreOfRun, groups: int, mode: RolloutMode | None, weights: Mapping[str, float] | None
) -> tuple[list[list[Trajectory]], dict[str, int]]:
    """The newest groups of several finished rollouts, and rollouts that cannot be read by reason."""
    from agentlightning.credit import group_trajectories
    from agentlightning.credit.rejection import count_reasons
    from agentlightning.training.sources.collector import RolloutPlan, TrajectoryReader, find_groups

    async with store.open() as opened:
        found = await find_groups(opened, None if mode is None else [mode])
        if not found:
            of_mode = "" if mode is None else f" of mode {mode}"
            raise DatasetError(
                f"{store.place} has no finished rollout{of_mode}; record some first, or train for a step"
            )
        several = [each for each in found if len(each[1]) > 1] or found  # measurements have one rollout of each task
        chosen = {rollout_id: group for group, ids in several[-groups:] for rollout_id in ids}
        tasks = {each.rollout_id: each.input for each in await opened.query_rollouts(rollout_id_in=list(chosen))}
        plans = [RolloutPlan(key, tasks.get(key), group) for key, group in chosen.items()]
        trajectories, rejected = await TrajectoryReader(opened, weights=weights).read(plans)
    return group_trajectories(trajectories), count_reasons(rejected)


def _credit_lines(found: CreditComparison) -> Iterator[RenderableType]:
    yield f"{found.groups} groups, {found.rollouts} rollouts"
    for reason, count in found.left_out.items():
        yield f"left out: {count} {reason.replace('_', ' ')}"
    table = Table("rule", "signal-to-noise of a group", "rollouts to 1", "agreement", "groups used", box=None)
    for each in found.signals:
        low, high = each.interval
        fewest, most = each.rollouts_interval
        agreement = "" if each.agreement is None else f"{each.agreement:.2f}"
        table.add_row(
            each.rule,
            f"{each.snr:.3g} ({low:.3g} to {high:.3g})",
            f"{_count(each.rollouts)} ({_count(fewest)} to {_count(most)})",
            agreement,
            str(each.groups_used),
        )
    yield table
    for rule, reason in found.unusable.items():
        yield f"{rule} cannot be used here: {reason}"


def _count(rollouts: float) -> str:
    return f"{rollouts:,.0f}" if math.isfinite(rollouts) else "no signal"


CREDIT = {"compare": compare_rules}
