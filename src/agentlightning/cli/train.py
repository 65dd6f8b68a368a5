"""`agl train`, `agl sft`, `agl dpo` and `agl demo`, and the report of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import typer
from rich.console import RenderableType
from rich.text import Text
from typer import Argument, Context, Option

from agentlightning.cli.options import (
    RUNS,
    Model,
    NewRun,
    Reward,
    RewardWeights,
    Subject,
    Token,
    overrides,
    own_config,
    weights_of,
)
from agentlightning.cli.output import Output, Result, agl, failure_lines, prompt_changes, writing
from agentlightning.errors import ConfigError
from agentlightning.models.resolve import TINY
from agentlightning.store.base import LightningStore
from agentlightning.util.progress import Progress
from agentlightning.util.settings import dump_toml, load_settings

if TYPE_CHECKING:
    from agentlightning.evaluation.intervals import Gain
    from agentlightning.training.dry_run import DryRun, DryRunRollout
    from agentlightning.training.report.result import TrainingResult


def train(
    ctx: Context,
    subject: Subject,
    settings: list[str] = Argument([]),
    config: Path | None = None,
    seed: int | None = None,
    run: NewRun = None,
    resume: Path | None = None,
    server: str | None = None,
    token: Token = None,
    dry_run: bool = False,
    print_config: bool = False,
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

    settings: section.key=value ...
    config: A TOML file of settings.
    seed: Seed of data order and sampling.
    resume: Continue the run in this directory; settings change those of the run.
    server: Use the store of this `agl serve`; with runner.hosts=0 its runners run the agent.
    dry_run: Check everything short of training: imports, tasks, a few rollouts; then exit.
    print_config: Print all settings with their explanations as TOML and exit.

    \b
    Examples:
      agl train --agent agent.py:solve --reward reward.py:score --data tasks.jsonl --model smollm2-135m
      agl train --config train.toml --run runs/lora policy.lora.r=16 algorithm.optimizer.lr=1e-4
      agl train --resume runs/lora algorithm.steps=200
    """
    from agentlightning.config import TrainConfig
    from agentlightning.store.http.client import LightningStoreClient
    from agentlightning.training.persistence.run_dir import settings_of_run

    output = ctx.obj
    output.run_dir = resume or run
    named = {**vars(subject), "seed": seed}
    again = agl("train", *settings, **named, config=config, run=run, resume=resume, server=server)
    changes = overrides({SHORTCUTS.get(name, name): value for name, value in named.items()}, settings)
    if resume is None:
        resolved = load_settings(TrainConfig, toml=config or own_config(), overrides=changes)
    elif kept := [f"{name} {value}" for name, value in (("--config", config), ("--run", run)) if value is not None]:
        problem = f"--resume continues {resume} with its own settings; leave out {' and '.join(kept)}"
        raise ConfigError(f"{problem}, and give those to change as section.key=value")
    else:
        resolved = settings_of_run(resume, changes)
    store = LightningStoreClient(server, token) if server is not None else None
    if print_config:
        typer.echo(dump_toml(resolved), nl=False)
        return None
    from agentlightning.trainer import Trainer

    parts: Any = {"store": store, "progress": Progress(output.console)}
    if resume is None:
        trainer = Trainer(resolved, run_dir=run, **parts)
    else:
        trainer = Trainer.resume(resume, changes=changes, **parts)
    if dry_run:
        found = trainer.dry_run()
        after = [again if found.is_ready else f"{again} --dry-run"]
        return Result(found.as_json(), dry_run_lines(found), after, not found.is_ready)
    output.run_dir = trainer.run_dir
    return report_of(trainer.train() if trainer.is_recorded else trainer.fit())


SHORTCUTS = {"data": "data.train", "model": "policy.model", "seed": "run.seed"}
"""Options whose setting has another name."""


# -- from recorded sessions -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """What is learned from, and as which run, by every verb that learns from recorded sessions."""

    settings: list[str] = Argument([])
    """setting=value ..."""
    model: Model = None
    store: str | None = None
    """A SQLite file, postgresql://... or the URL of `agl serve`."""
    reward_weights: RewardWeights = None
    target_agent: str | None = None
    """Only calls of agents whose whole name matches are learned from."""
    eval_agent: str | None = None
    """module:name of an agent to measure on --held-out before and after."""
    held_out: str | None = None
    """Tasks to measure on: a JSONL, JSON, CSV or Parquet file."""
    reward: Reward = None
    seed: int = 0
    """Seed of the order of the data."""
    run: NewRun = None
    checkpoint_every: int | None = Option(None, min=1)
    """Updates between checkpoints (default: 20)."""
    resume: Path | None = None
    """Continue the run in this directory, with the settings and the data it has."""

    @cached_property
    def sessions(self) -> LightningStore | None:
        """The store, opened."""
        from agentlightning.training.recorded import open_sessions

        return None if self.store is None else open_sessions(self.store)

    def learn(self, verb: str, make: Callable[[], Any], data: str | None, output: Output) -> Result:
        """Train with the algorithm that `make` returns, or continue a run, which keeps its settings and `data`."""
        from agentlightning.config import TrainConfig
        from agentlightning.trainer import Trainer

        directory = output.run_dir = self.resume or self.run or RUNS / time.strftime(f"{verb}-%Y%m%d-%H%M%S")
        parts: Any = {"reward": self.reward, "progress": Progress(output.console)}
        if self.resume is not None:
            named = {"settings": self.settings, "--model": self.model, "--data": data, "--run": self.run}
            if kept := [name for name, value in named.items() if value]:
                raise ConfigError(f"--resume uses the run's own settings and data; leave out {', '.join(kept)}")
            trainer = Trainer.resume(directory, store=self.sessions, **parts)
        else:
            algorithm = make()
            if self.model is None:
                raise ConfigError("--model is missing: give a directory, a .gguf file, a short or hub name, or tiny")
            of_run = overrides({"policy.model": self.model, "run.checkpoint_every": self.checkpoint_every}, [])
            config = load_settings(TrainConfig, overrides=[*of_run, f"run.seed={self.seed}"])
            trainer = Trainer(config, algorithm=algorithm, store=self.sessions, run_dir=directory, **parts)
        return report_of(trainer.train(eval_agent=self.eval_agent, held_out_dataset=self.held_out))


def sft(
    ctx: Context,
    *,
    data: str | None = None,
    given: Recorded,
    validation: str | None = None,
    threshold: float = 0.5,
    best_of: int | None = None,
    pass_rate: tuple[float, float] | None = None,
    duplicates: bool = False,
    self_verified: bool = False,
    out: Path | None = None,
) -> Result:
    """Supervised learning on conversations, or on the successful sessions of a store.

    Settings are those of agl.config.SFTConfig, for example epochs=2, optimizer.lr=1e-5 or lora.r=16.

    data: Conversations: a JSONL, JSON, CSV or Parquet file.
    validation: Conversations to measure the loss on.
    threshold: With --store: sessions with at least this reward.
    best_of: With --store: at most so many sessions of a task.
    pass_rate: With --store: only tasks solved in this share of sessions.
    duplicates: With --store: keep equal sessions.
    self_verified: With --store: sessions that agree with the majority of their task.
    out: Also write the model to this directory.

    \b
    Examples:
      agl sft --data conversations.jsonl --model smollm2-135m --out start epochs=2
      agl sft --store .agentlightning/store.db --best-of 1 --model smollm2-135m lora.r=16
    """

    def algorithm() -> Any:
        from agentlightning.algorithms.sft import SFTAlgorithm, SFTConfig

        if (data is None) == (given.store is None):
            raise ConfigError("give --data FILE or --store STORE: one of them is what is learned from")
        named = {"seed": given.seed, "target_agent": given.target_agent}
        config = load_settings(SFTConfig, overrides=overrides(named, given.settings))
        records: Any = data
        if given.sessions is not None:
            records = given.sessions.get_successful_trajectories(
                threshold=threshold,
                best_of=best_of,
                pass_rate=pass_rate,
                deduplicate=not duplicates,
                self_verified=self_verified,
                reward_weights=weights_of(given.reward_weights, given.store),
            )
        return SFTAlgorithm(dataset=records, validation=validation, output=out, config=config)

    return given.learn("sft", algorithm, data, ctx.obj)


def dpo(ctx: Context, *, data: str | None = None, given: Recorded) -> Result:
    """Learn from preferences between recorded sessions of a task, or from pairs in a file: DPO, IPO, KTO or SimPO.

    Settings are those of agl.config.DPOConfig, for example loss=ipo, pairs=branches, steps=50 or optimizer.lr=1e-6.

    data: Pairs with prompt, chosen and rejected: a JSONL, JSON, CSV or Parquet file.

    \b
    Examples:
      agl dpo --data pairs.jsonl --model smollm2-135m loss=ipo
      agl dpo --store .agentlightning/store.db --model smollm2-135m steps=50 --run runs/dpo
    """

    def algorithm() -> Any:
        from agentlightning.algorithms.preference import DPO, DPOConfig

        if data is not None and given.store is not None:
            raise ConfigError("give --data FILE or --store STORE, not both: one of them is what is learned from")
        weights = weights_of(given.reward_weights, given.store)
        named = {"seed": given.seed, "target_agent": given.target_agent, "reward_weights": weights}
        return DPO(load_settings(DPOConfig, overrides=overrides(named, given.settings)), data=data)

    return given.learn("dpo", algorithm, data, ctx.obj)


# -- the demo ---------------------------------------------------------------------------------------------------------


def demo(
    ctx: Context, model: str = TINY, seed: int = 0, steps: int | None = Option(None, min=1), run: NewRun = None
) -> Result:
    """Train an agent by reinforcement learning on this machine: two cores, no GPU.

    The model is made on the spot, without a download, and learns to call a calculator. A pretrained model learns to
    read customers' messages.

    model: A pretrained model: smollm2-135m, or any other as for agl train. tiny: one made on the spot.
    seed: Seed of the problems, the starting policy and the sampling.
    steps: Steps of reinforcement learning.

    \b
    Examples:
      agl demo
      agl demo --model smollm2-135m --run runs/messages
    """
    from agentlightning.demo import job, messages
    from agentlightning.trainer import Trainer

    directory = ctx.obj.run_dir = run or RUNS / time.strftime("demo-%Y%m%d-%H%M%S")
    changes: Any = {"policy__model": model, "run__seed": seed, "algorithm__steps": steps}
    file, tasks = "messages.toml", messages.tasks(seed)
    if model == TINY:
        with writing(directory):
            changes["warm_start__dataset"] = job.write_demonstrations(directory / "demonstrations.jsonl", seed)
        file, tasks = "calculator.toml", job.tasks(seed)
    trainer = Trainer(job.settings(file, **changes), run_dir=directory, progress=Progress(ctx.obj.console))
    return report_of(trainer.fit(**tasks))


# -- a dry run --------------------------------------------------------------------------------------------------------


OUTCOME_STYLES = {"ok": "green", "warning": "yellow", "failed": "red"}
LAST_LINES = 8
"""Lines of a traceback that are shown, the last ones."""


def dry_run_lines(found: DryRun) -> Iterator[RenderableType]:
    """Each check with what to look for, one rollout as an example, and whether training can begin."""
    yield ""
    for check in found.checks:
        first, *rest = check.text.splitlines() or [""]
        yield Text.assemble((f"{check.outcome:<8}", OUTCOME_STYLES[check.outcome]), f" {check.name:<9} {first}")
        if len(rest) > LAST_LINES:
            rest = [f"... {len(rest) - LAST_LINES} lines", *rest[-LAST_LINES:]]
        yield from (f"{'':<19}{line}" for line in rest)
        if check.advice and check.outcome != "ok":
            yield f"{'':<9} {'try':<9} {check.advice}"
    if found.rollouts:
        yield from _example_lines(found.rollouts)
    failed, warned = (sum(each.outcome == name for each in found.checks) for name in ("failed", "warning"))
    yield ""
    if not found.is_ready:
        yield Text(f"not ready: {failed} of {len(found.checks)} checks failed", "red")
    elif warned:
        yield Text(f"ready, with {warned} warning{'s' if warned > 1 else ''}", "yellow")
    else:
        yield Text("ready", "green")


def _example_lines(rollouts: tuple[DryRunRollout, ...]) -> Iterator[str]:
    """The best of them, message by message."""
    from agentlightning.assemble import said
    from agentlightning.dashboard.data.rollouts import shortened

    shown = max(rollouts, key=lambda each: (each.policy_calls > 0, each.reward is not None, each.reward or 0.0))
    reward = "no reward" if shown.reward is None else f"reward {shown.reward:g}"
    yield ""
    yield f"one rollout of {len(rollouts)}, {reward}"
    yield f"  task       {shortened(shown.task)}"
    for message in shown.transcript:
        yield f"  {message.get('role', '?')!s:<10} {shortened(said(message))}"
    yield f"  output     {shortened(shown.output)}"


# -- the report -------------------------------------------------------------------------------------------------------


TRANSCRIPT_LINES = 6
"""Of a transcript, the last ones."""
TRANSCRIPT_WIDTH = 300


def report_of(result: TrainingResult) -> Result:
    """The report, and the commands that lead on: to what the run changed, or to what is wrong with it, and to its
    weights."""
    from agentlightning.training.export import holds_weights

    gained = any(gain.tasks and gain.interval[0] > 0 for gain in result.held_out.values())
    after = agl("report" if gained else "doctor", result.run_dir)
    run, weights = result.run_dir, holds_weights(result.checkpoint)
    learned = agl("export", run, to="hf") if weights else agl("dashboard", run)
    return Result(result.as_json(), _result_lines(result), [after, learned])


def _result_lines(result: TrainingResult) -> Iterator[RenderableType]:
    from agentlightning.credit.rejection import describe_reasons

    yield ""
    for mode, gain in result.held_out.items():
        yield f"held-out reward, {mode:<8} {_shown(gain)}, {gain.tasks} tasks)"
        if gain.missing_before or gain.missing_after:
            yield f"  {_missing(result, mode, gain)}"
    for number, stage in enumerate(result.stages, 1):
        for mode, gain in stage.held_out.items():
            yield f"  stage {number}, {stage.name}, {mode:<8} {_shown(gain)})"
    learned, left_out = f"{result.rollouts} rollouts", result.rejected_rollouts
    if (own := result.recorded) is not None:
        learned, left_out = f"{own.algorithm} on {own.sessions} sessions", own.left_out
    learned += f", {result.failed_rollouts} failed" if result.failed_rollouts else ""
    learned += f", left out: {describe_reasons(left_out)}" if left_out else ""
    yield (
        f"{result.steps} steps, {learned}, {result.seconds:.1f} s"
        + (f"; {result.rollbacks} rollbacks" if result.rollbacks else "")
        + (f"; best checkpoint from step {result.best_step}" if result.best_step else "")
    )
    yield from (Text(f"warning: {warning}", "yellow") for warning in result.warnings)
    yield from _closing_lines(result)
    if result.prompts:
        yield from prompt_changes(result.diff())
    for name, path in (("checkpoint", result.checkpoint), ("curve", result.curve), ("run", result.run_dir)):
        if path is not None:
            yield f"{name:<11} {path}"


def _shown(gain: Gain) -> str:
    low, high = gain.interval
    return f"{gain.before:.3f} -> {gain.after:.3f}   gain {gain.gain:+.3f}  (95% interval {low:+.3f} to {high:+.3f}"


def _closing_lines(result: TrainingResult) -> Iterator[str]:
    """What a result has beside its warnings: groups without a spread, failures by cause, two transcripts."""
    from agentlightning.training.persistence.run_dir import read_state
    from agentlightning.training.report.result import failures_of, read_records

    records, _ = read_records(result.run_dir / "metrics.jsonl")
    groups, flat = sum(each.groups for each in records), sum(each.groups_without_spread for each in records)
    if flat:
        yield f"groups without spread: {flat} of {groups}, within which all rewards were equal"
    if result.failed_rollouts:
        found = failures_of(result.run_dir / "store.db", read_state(result.run_dir), [])
        yield from (f"failed: {line}" for line in failure_lines(found))
    for name, row in best_and_worst(result.run_dir):
        reward = "none" if row["reward"] is None else f"{row['reward']:.3f}"
        yield f"{name} of the last validation, reward {reward}  ({row['rollout_id']})"
        for line in str(row["conversation"]).splitlines()[-TRANSCRIPT_LINES:]:
            yield f"  {line[:TRANSCRIPT_WIDTH]}"


def best_and_worst(run_dir: Path) -> list[tuple[str, dict[str, Any]]]:
    """The transcripts with the highest and the lowest reward of the last validation; none where all are equal."""
    path = run_dir / "transcripts.jsonl"
    rows = [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    last = [row for row in rows if row["step"] == rows[-1]["step"] and row["reward"] is not None]
    last.sort(key=lambda row: -row["reward"])
    spread = last and last[0]["reward"] > last[-1]["reward"]
    return [("best", last[0]), ("worst", last[-1])] if spread else [("one", row) for row in last[:1]]


def _missing(result: TrainingResult, mode: str, gain: Gain) -> str:
    from agentlightning.credit.rejection import describe_reasons

    counts = (("before", gain.missing_before), ("after", gain.missing_after))
    parts = [
        f"{describe_reasons(result.missing.get(f'{when}-{mode}', {})) or f'{count} missing'} {when}"
        for when, count in counts
        if count
    ]
    return f"tasks without a reward: {'; '.join(parts)}. The means leave them out; the interval allows them any reward"
