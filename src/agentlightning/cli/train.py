"""`agl train`, `agl sft`, `agl dpo` and `agl demo`, and the report of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import orjson
import typer
from rich.console import Console

from agentlightning.cli.options import (
    RUNS,
    Agent,
    Data,
    Environment,
    Model,
    NewRun,
    Reward,
    RewardWeights,
    Token,
    overrides,
    own_config,
    weights_of,
)
from agentlightning.cli.output import Output, Result, agl, failure_lines, print_prompt_diff
from agentlightning.errors import ConfigError
from agentlightning.models.resolve import TINY
from agentlightning.util.printable import printable
from agentlightning.util.progress import Progress

if TYPE_CHECKING:
    from agentlightning.config import TrainConfig
    from agentlightning.evaluation.intervals import Gain
    from agentlightning.store.base import LightningStore
    from agentlightning.training.dry_run import DryRun, DryRunCheck, DryRunRollout
    from agentlightning.training.report.result import TrainingResult


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
    parts: dict[str, Any] = {"progress": Progress(console=output.console)}
    if server is not None:
        from agentlightning.store.http.client import LightningStoreClient

        parts["store"] = LightningStoreClient(server, token)
    if print_config:
        from agentlightning.util.settings import dump_toml

        typer.echo(dump_toml(resolved), nl=False)
        return None
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


# -- from recorded sessions -------------------------------------------------------------------------------------------


Settings = Annotated[list[str] | None, typer.Argument(help="setting=value ...", show_default=False)]
Seed = Annotated[int, typer.Option(help="Seed of the order of the data.")]
Target = Annotated[str | None, typer.Option(help="Only calls of agents whose whole name matches are learned from.")]
EvalAgent = Annotated[
    str | None, typer.Option(help="module:name of an agent to measure on --held-out before and after.")
]
HeldOut = Annotated[str | None, typer.Option(help="Tasks to measure on: a JSONL, JSON, CSV or Parquet file.")]
Resume = Annotated[
    Path | None, typer.Option(help="Continue the run in this directory, with the settings and the data it has.")
]
CheckpointEvery = Annotated[int | None, typer.Option(min=1, help="Updates between checkpoints (default: 20).")]
StoreFile = Annotated[str | None, typer.Option(help="A SQLite file, postgresql://... or the URL of `agl serve`.")]


def sft(
    ctx: typer.Context,
    settings: Settings = None,
    model: Model = None,
    data: Annotated[str | None, typer.Option(help="Conversations: a JSONL, JSON, CSV or Parquet file.")] = None,
    store: StoreFile = None,
    validation: Annotated[str | None, typer.Option(help="Conversations to measure the loss on.")] = None,
    threshold: Annotated[float, typer.Option(help="With --store: sessions with at least this reward.")] = 0.5,
    best_of: Annotated[int | None, typer.Option(help="With --store: at most so many sessions of a task.")] = None,
    pass_rate: Annotated[
        tuple[float, float] | None, typer.Option(help="With --store: only tasks solved in this share of sessions.")
    ] = None,
    duplicates: Annotated[bool, typer.Option("--duplicates", help="With --store: keep equal sessions.")] = False,
    self_verified: Annotated[
        bool, typer.Option("--self-verified", help="With --store: sessions that agree with the majority of their task.")
    ] = False,
    reward_weights: RewardWeights = None,
    out: Annotated[Path | None, typer.Option(help="Also write the model to this directory.")] = None,
    target_agent: Target = None,
    eval_agent: EvalAgent = None,
    held_out: HeldOut = None,
    reward: Reward = None,
    seed: Seed = 0,
    run: NewRun = None,
    checkpoint_every: CheckpointEvery = None,
    resume: Resume = None,
) -> Result:
    """Supervised learning on conversations, or on the successful sessions of a store.

    Settings are those of agl.config.SFTConfig, for example epochs=2, optimizer.lr=1e-5 or lora.r=16.

    \b
    Examples:
      agl sft --data conversations.jsonl --model smollm2-135m --out start epochs=2
      agl sft --store .agentlightning/store.db --best-of 1 --model smollm2-135m lora.r=16
    """

    def algorithm(sessions: Callable[[], LightningStore | None]) -> Any:
        from agentlightning.algorithms.sft import SFTAlgorithm, SFTConfig
        from agentlightning.util.settings import load_settings

        if (data is None) == (store is None):
            raise ConfigError("give --data FILE or --store STORE: one of them is what is learned from")
        named = {"seed": seed, "target_agent": target_agent}
        config = load_settings(SFTConfig, overrides=overrides(named, settings))
        records: Any = data
        if (opened := sessions()) is not None:
            records = opened.get_successful_trajectories(
                threshold=threshold,
                best_of=best_of,
                pass_rate=pass_rate,
                deduplicate=not duplicates,
                self_verified=self_verified,
                reward_weights=weights_of(reward_weights, store),
            )
        return SFTAlgorithm(dataset=records, validation=validation, output=out, config=config)

    return _learn("sft", algorithm, ctx)


def dpo(
    ctx: typer.Context,
    settings: Settings = None,
    model: Model = None,
    data: Annotated[
        str | None, typer.Option(help="Pairs with prompt, chosen and rejected: a JSONL, JSON, CSV or Parquet file.")
    ] = None,
    store: StoreFile = None,
    reward_weights: RewardWeights = None,
    target_agent: Target = None,
    eval_agent: EvalAgent = None,
    held_out: HeldOut = None,
    reward: Reward = None,
    seed: Seed = 0,
    run: NewRun = None,
    checkpoint_every: CheckpointEvery = None,
    resume: Resume = None,
) -> Result:
    """Learn from preferences between recorded sessions of a task, or from pairs in a file: DPO, IPO, KTO or SimPO.

    Settings are those of agl.config.DPOConfig, for example loss=ipo, pairs=branches, steps=50 or optimizer.lr=1e-6.

    \b
    Examples:
      agl dpo --data pairs.jsonl --model smollm2-135m loss=ipo
      agl dpo --store .agentlightning/store.db --model smollm2-135m steps=50 --run runs/dpo
    """

    def algorithm(sessions: Callable[[], LightningStore | None]) -> Any:
        from agentlightning.algorithms.preference import DPO, DPOConfig
        from agentlightning.util.settings import load_settings

        if data is not None and store is not None:
            raise ConfigError("give --data FILE or --store STORE, not both: one of them is what is learned from")
        weights = weights_of(reward_weights, store)
        named = {"seed": seed, "target_agent": target_agent, "reward_weights": weights}
        return DPO(load_settings(DPOConfig, overrides=overrides(named, settings)), data=data)

    return _learn("dpo", algorithm, ctx)


def _learn(verb: str, algorithm: Callable[[Callable[[], LightningStore | None]], Any], ctx: typer.Context) -> Result:
    """Train with an algorithm, or continue a run, which keeps its settings and data. Reads what both verbs take."""
    from agentlightning.config import RunConfig, TrainConfig
    from agentlightning.trainer import Trainer
    from agentlightning.training.recorded import open_sessions

    given, output, resume = ctx.params, ctx.obj, ctx.params["resume"]
    directory = Path(resume or given["run"] or RUNS / time.strftime(f"{verb}-%Y%m%d-%H%M%S"))
    output.run_dir = directory
    sessions = cache(lambda: None if given["store"] is None else open_sessions(given["store"]))
    made = algorithm(sessions) if resume is None else None
    parts: Any = {"store": sessions(), "reward": given["reward"], "progress": Progress(console=output.console)}
    if resume is None:
        every = given["checkpoint_every"]
        if given["model"] is None:
            raise ConfigError("--model is missing: give a directory, a .gguf file, a short or hub name, or tiny")
        config = TrainConfig() if every is None else TrainConfig(run=RunConfig(checkpoint_every=every))
        named = {name: given[name] for name in ("model", "seed")}
        trainer = Trainer(config, algorithm=made, run_dir=directory, **named, **parts)
    elif kept := [name for name in ("settings", "--model", "--data", "--run") if given[name.lstrip("-")]]:
        raise ConfigError(f"--resume uses the run's own settings and data; leave out {', '.join(kept)}")
    else:
        trainer = Trainer.resume(directory, **parts)
    return report_of(trainer.train(eval_agent=given["eval_agent"], held_out_dataset=given["held_out"]))


# -- the demo ---------------------------------------------------------------------------------------------------------


def demo(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            help="A pretrained model: smollm2-135m, or any other as for agl train. tiny: one made on the spot."
        ),
    ] = TINY,
    seed: Annotated[int, typer.Option(help="Seed of the problems, the starting policy and the sampling.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of reinforcement learning.")] = None,
    run: NewRun = None,
) -> Result:
    """Train an agent by reinforcement learning on this machine: two cores, no GPU.

    The model is made on the spot, without a download, and learns to call a calculator. A pretrained model learns to
    read customers' messages.

    \b
    Examples:
      agl demo
      agl demo --model smollm2-135m --run runs/messages
    """
    from agentlightning.demo import job, messages
    from agentlightning.trainer import Trainer

    output: Output = ctx.obj
    directory = output.run_dir = run or RUNS / time.strftime("demo-%Y%m%d-%H%M%S")
    if model == TINY:
        demonstrations = job.write_demonstrations(directory / "demonstrations.jsonl", seed)
        configuration, tasks = job.settings(demonstrations, seed, steps), job.tasks(seed)
    else:
        configuration, tasks = messages.settings(model, seed, steps), messages.tasks(seed)
    trainer = Trainer(configuration, run_dir=directory, progress=Progress(output.console))
    return report_of(trainer.fit(**tasks))


# -- a dry run --------------------------------------------------------------------------------------------------------


OUTCOME_STYLES: Final = {"ok": "green", "warning": "yellow", "failed": "red"}
MOST_OF_MESSAGE: Final = 400
"""Characters of a message that are shown."""
LAST_LINES: Final = 8
"""Lines of a traceback that are shown, the last ones."""


def print_dry_run(found: DryRun, console: Console) -> None:
    """Print each check with what to look for, one rollout as an example, and whether training can begin."""
    console.print()
    for check in found.checks:
        _print_check(check, console)
    if found.rollouts:
        _print_example(found.rollouts, console)
    counts = {name: sum(each.outcome == name for each in found.checks) for name in ("failed", "warning")}
    if not found.is_ready:
        console.print(f"\nnot ready: {counts['failed']} of {len(found.checks)} checks failed", style="red")
    elif counts["warning"]:
        warnings = "1 warning" if counts["warning"] == 1 else f"{counts['warning']} warnings"
        console.print(f"\nready, with {warnings}", style="yellow")
    else:
        console.print("\nready", style="green")


def _print_check(check: DryRunCheck, console: Console) -> None:
    first, *rest = map(printable, check.text.splitlines() or [""])
    console.print(f"{check.outcome:<8}", style=OUTCOME_STYLES[check.outcome], end="")
    console.print(f" {check.name:<9} {first}")
    if len(rest) > LAST_LINES:
        console.print(f"{'':<19}... {len(rest) - LAST_LINES} lines")
    for line in rest[-LAST_LINES:]:
        console.print(f"{'':<19}{line}")
    if check.advice and check.outcome != "ok":
        console.print(f"{'':<9} {'try':<9} {printable(check.advice)}")


def _print_example(rollouts: tuple[DryRunRollout, ...], console: Console) -> None:
    """The best of them, message by message."""
    from agentlightning.training.sources.collector import said

    shown = max(rollouts, key=lambda each: (each.policy_calls > 0, each.reward is not None, each.reward or 0.0))
    reward = "no reward" if shown.reward is None else f"reward {shown.reward:g}"
    console.print(f"\none rollout of {len(rollouts)}, {reward}")
    console.print(f"  task       {_short(shown.task)}")
    for message in shown.transcript:
        console.print(f"  {message.get('role', '?')!s:<10} {_short(said(message))}")
    console.print(f"  output     {_short(shown.output)}")


def _short(value: object) -> str:
    text = printable(str(value))
    return text if len(text) <= MOST_OF_MESSAGE else f"{text[: MOST_OF_MESSAGE - 3]}..."


# -- the report -------------------------------------------------------------------------------------------------------


TRANSCRIPT_LINES: Final = 6
"""Of a transcript, the last ones."""
TRANSCRIPT_WIDTH: Final = 300


def report_of(result: TrainingResult) -> Result:
    """The report, and the commands that lead on: to what the run changed, or to what is wrong with it, and to its
    weights."""
    from agentlightning.training.export import holds_weights

    gained = any(gain.tasks and gain.interval[0] > 0 for gain in result.held_out.values())
    after = agl("report" if gained else "doctor", result.run_dir)
    run, weights = result.run_dir, holds_weights(result.checkpoint)
    learned = agl("export", run, to="hf") if weights else agl("dashboard", run)
    return Result(result.as_json(), lambda console: print_result(result, console), [after, learned])


def print_result(result: TrainingResult, console: Console) -> None:
    """Print the report."""
    from agentlightning.credit.rejection import describe_reasons

    console.print()
    for mode, gain in result.held_out.items():
        console.print(f"held-out reward, {mode:<8} {_shown(gain)}, {gain.tasks} tasks)")
        if gain.missing_before or gain.missing_after:
            console.print(f"  {_missing(result, mode, gain)}")
    for number, stage in enumerate(result.stages, 1):
        for mode, gain in stage.held_out.items():
            console.print(f"  stage {number}, {stage.name}, {mode:<8} {_shown(gain)})")
    learned, left_out = f"{result.rollouts} rollouts", result.rejected_rollouts
    if (own := result.recorded) is not None:
        learned, left_out = f"{own.algorithm} on {own.sessions} sessions", own.left_out
    learned += f", {result.failed_rollouts} failed" if result.failed_rollouts else ""
    learned += f", left out: {describe_reasons(left_out)}" if left_out else ""
    console.print(
        f"{result.steps} steps, {learned}, {result.seconds:.1f} s"
        + (f"; {result.rollbacks} rollbacks" if result.rollbacks else "")
        + (f"; best checkpoint from step {result.best_step}" if result.best_step else "")
    )
    for warning in result.warnings:
        console.print(f"warning: {warning}", style="yellow")
    print_closing(result, console)
    if result.prompts:
        print_prompt_diff(result.diff(), console)
    for name, path in (("checkpoint", result.checkpoint), ("curve", result.curve), ("run", result.run_dir)):
        if path is None:
            continue
        console.print(f"{name:<11} {path}")


def _shown(gain: Gain) -> str:
    low, high = gain.interval
    return f"{gain.before:.3f} -> {gain.after:.3f}   gain {gain.gain:+.3f}  (95% interval {low:+.3f} to {high:+.3f}"


def print_closing(result: TrainingResult, console: Console) -> None:
    """What a result has beside its warnings: groups without a spread, failures by cause, two transcripts."""
    from agentlightning.training.health.examination import failures_of, read_records
    from agentlightning.training.persistence.run_dir import read_state

    records, _ = read_records(result.run_dir / "metrics.jsonl")
    groups, flat = sum(each.groups for each in records), sum(each.groups_without_spread for each in records)
    if flat:
        console.print(f"groups without spread: {flat} of {groups}, within which all rewards were equal")
    if result.failed_rollouts:
        for line in failure_lines(failures_of(result.run_dir / "store.db", read_state(result.run_dir), [])):
            console.print(f"failed: {line}")
    for name, row in best_and_worst(result.run_dir):
        reward = "none" if row["reward"] is None else f"{row['reward']:.3f}"
        console.print(f"{name} of the last validation, reward {reward}  ({row['rollout_id']})")
        for line in str(row["conversation"]).splitlines()[-TRANSCRIPT_LINES:]:
            console.print(f"  {printable(line)[:TRANSCRIPT_WIDTH]}")


def best_and_worst(run_dir: Path) -> list[tuple[str, dict[str, Any]]]:
    """The transcripts with the highest and the lowest reward of the last validation; none where all are equal."""
    path = run_dir / "transcripts.jsonl"
    rows = [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    last = [row for row in rows if row["step"] == rows[-1]["step"] and row["reward"] is not None]
    if not last:
        return []
    best, worst = max(last, key=lambda row: row["reward"]), min(last, key=lambda row: row["reward"])
    return [("best", best), ("worst", worst)] if best["reward"] > worst["reward"] else [("one", best)]


def _missing(result: TrainingResult, mode: str, gain: Gain) -> str:
    from agentlightning.credit.rejection import describe_reasons

    counts = (("before", gain.missing_before), ("after", gain.missing_after))
    parts = [
        f"{describe_reasons(result.missing.get(f'{when}-{mode}', {})) or f'{count} missing'} {when}"
        for when, count in counts
        if count
    ]
    return f"tasks without a reward: {'; '.join(parts)}. The means leave them out; the interval allows them any reward"
