"""`agl sft` and `agl dpo`: learn from demonstrations, or from preferences between recorded sessions."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from agentlightning.cli.options import Json, Reward
from agentlightning.cli.output import Output, errors_reported

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore
    from agentlightning.training.recorded.result import OfflineResult

Settings = Annotated[list[str] | None, typer.Argument(help="setting=value ...", show_default=False)]
Model = Annotated[str, typer.Option(help="A directory (or hub name) that transformers loads.")]
RunDir = Annotated[Path | None, typer.Option(help="The directory of the run (default: runs/<time>).")]
Seed = Annotated[int, typer.Option(help="Seed of the order of the data.")]
Target = Annotated[str | None, typer.Option(help="Only calls of agents whose whole name matches are learned from.")]
EvalAgent = Annotated[
    str | None, typer.Option(help="module:name of an agent to measure on --held-out before and after.")
]
HeldOut = Annotated[str | None, typer.Option(help="Tasks to measure on: a JSONL, JSON or Parquet file.")]
StoreFile = Annotated[str | None, typer.Option(help="A SQLite file, postgresql://... or the URL of `agl serve`.")]


def register(app: typer.Typer) -> None:
    app.command("sft")(sft)
    app.command("dpo")(dpo)


def sft(
    settings: Settings = None,
    model: Model = ...,  # pyright: ignore[reportArgumentType]
    dataset: Annotated[str | None, typer.Option(help="Conversations: a JSONL, JSON or Parquet file.")] = None,
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
    output_dir: Annotated[Path | None, typer.Option("--output", help="Also write the model to this directory.")] = None,
    target_agent: Target = None,
    eval_agent: EvalAgent = None,
    held_out: HeldOut = None,
    reward: Reward = None,
    seed: Seed = 0,
    run_dir: RunDir = None,
    as_json: Json = False,
) -> None:
    """Supervised learning on conversations, or on the successful sessions of a store.

    Settings are those of agl.SFTConfig, for example epochs=2, optimizer.lr=1e-5 or lora.r=16.
    """
    output = Output(as_json)
    directory = run_dir or Path("runs") / time.strftime("sft-%Y%m%d-%H%M%S")
    with errors_reported(output, lambda: directory):
        from agentlightning.algorithms.sft import SFTAlgorithm, SFTConfig
        from agentlightning.errors import ConfigError
        from agentlightning.util.settings import load_settings

        if (dataset is None) == (store is None):
            raise ConfigError("give --dataset FILE or --store STORE: one of them is what is learned from")
        target = [] if target_agent is None else [f"target_agent={target_agent!r}".replace("'", '"')]
        config = load_settings(SFTConfig, overrides=[f"seed={seed}", *target, *(settings or [])])
        opened = _open(store)
        records: Any = dataset
        if opened is not None:
            records = opened.get_successful_trajectories(
                threshold=threshold,
                best_of=best_of,
                pass_rate=pass_rate,
                deduplicate=not duplicates,
                self_verified=self_verified,
            )
        algorithm = SFTAlgorithm(dataset=records, validation=validation, output=output_dir, config=config)
        result = _train(algorithm, model, opened, directory, seed, reward, eval_agent, held_out, output)
        output.finish(result.as_json(), lambda console: show(result, console))


def dpo(
    settings: Settings = None,
    model: Model = ...,  # pyright: ignore[reportArgumentType]
    store: StoreFile = None,
    target_agent: Target = None,
    eval_agent: EvalAgent = None,
    held_out: HeldOut = None,
    reward: Reward = None,
    seed: Seed = 0,
    run_dir: RunDir = None,
    as_json: Json = False,
) -> None:
    """Learn from preferences between recorded sessions of one task: DPO, IPO, KTO or SimPO.

    Settings are those of agl.DPOConfig, for example loss=ipo, pairs=branches, steps=50 or optimizer.lr=1e-6.
    """
    output = Output(as_json)
    directory = run_dir or Path("runs") / time.strftime("dpo-%Y%m%d-%H%M%S")
    with errors_reported(output, lambda: directory):
        from agentlightning.algorithms.preference import DPO, DPOConfig
        from agentlightning.util.settings import load_settings

        target = [] if target_agent is None else [f"target_agent={target_agent!r}".replace("'", '"')]
        config = load_settings(DPOConfig, overrides=[f"seed={seed}", *target, *(settings or [])])
        result = _train(DPO(config), model, _open(store), directory, seed, reward, eval_agent, held_out, output)
        output.finish(result.as_json(), lambda console: show(result, console))


def _open(store: str | None) -> LightningStore | None:
    """Raises DatasetError for a file that is not there: opening would make an empty store."""
    from agentlightning.errors import DatasetError
    from agentlightning.store import LightningStore

    if store is None:
        return None
    if "://" not in store and not Path(store).exists():
        raise DatasetError(f"there is no store at {store}; record sessions first, or name another one")
    return LightningStore(store)


def _train(
    algorithm: Any,
    model: str,
    store: LightningStore | None,
    run_dir: Path,
    seed: int,
    reward: str | None,
    eval_agent: str | None,
    held_out: str | None,
    output: Output,
) -> OfflineResult:
    from agentlightning.trainer import Trainer
    from agentlightning.training.recorded.result import OfflineResult
    from agentlightning.util.progress import Progress

    progress = Progress(console=output.console)
    trainer = Trainer(
        algorithm=algorithm, model=model, store=store, run_dir=run_dir, seed=seed, reward=reward, progress=progress
    )
    result = trainer.train(eval_agent=eval_agent, held_out_dataset=held_out)
    assert isinstance(result, OfflineResult)
    return result


def show(result: OfflineResult, console: Console) -> None:
    """The result for a person."""
    console.print(f"{result.algorithm}: {result.steps} steps on {result.sessions} sessions, {result.seconds:.0f} s")
    for reason, count in result.left_out.items():
        console.print(f"left out: {count} {reason.replace('_', ' ')}")
    if result.held_out:
        table = Table("held-out reward", "before", "after", "gain", box=None)
        for mode, gain in result.held_out.items():
            low, high = gain.interval
            table.add_row(
                mode, f"{gain.before:.3f}", f"{gain.after:.3f}", f"{gain.gain:+.3f} ({low:+.3f} to {high:+.3f})"
            )
        console.print(table)
    console.print(f"model: {result.checkpoint}", markup=False)
