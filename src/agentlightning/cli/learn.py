"""`agl sft` and `agl dpo`: learn from demonstrations, or from preferences, recorded or in a file."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentlightning.cli.opening import RUNS, overrides, weights_of
from agentlightning.cli.options import Model, NewRun, Reward, RewardWeights
from agentlightning.cli.output import Result
from agentlightning.errors import ConfigError

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore
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
    from agentlightning.cli.formatting.training_report import report_of
    from agentlightning.config import RunConfig, TrainConfig
    from agentlightning.trainer import Trainer
    from agentlightning.training.recorded import open_sessions
    from agentlightning.util.progress import Progress

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
