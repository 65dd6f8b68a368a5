"""`agl store`: inspects a store and keeps it small. `agl export`: the weights or the rollouts of a run, for other
programs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import typer
from msgspec import to_builtins
from rich.filesize import decimal
from typer import Argument, Context, Option

from agentlightning.cli.options import (
    AnyStore,
    Filter,
    GivenStore,
    RewardWeights,
    Run,
    StoreOfRun,
    read_duration,
    retention_from,
    run_or_newest,
    store_file,
    weights_of,
)
from agentlightning.cli.output import Output, Result, agl, writing
from agentlightning.dashboard.data.rollouts import RolloutSummary, Summaries, rollout_lines
from agentlightning.errors import ConfigError
from agentlightning.models import Precision
from agentlightning.store.export import export_store, import_store
from agentlightning.store.export.copy import check_source
from agentlightning.store.types import Pruned, Queue
from agentlightning.util.progress import Progress

# -- stats -----------------------------------------------------------------------------------------------------------


async def stats(store: StoreOfRun) -> Result:
    """Show the contents of a store: rollouts by status, attempts, spans, queues, and its size.

    \b
    Examples:
      agl store stats
      agl store stats --store hub.db --json
    """
    async with store.open() as opened:
        counts = await opened.statistics()
        queues = await opened.query_queues()
    record = {"statistics": counts, "queues": queues}
    return Result(record, _counts(counts, queues), [agl("store", "list", store=store.place)])


async def show(store: StoreOfRun, rollout_id: str | None = Argument(None)) -> Result:
    """Show a rollout: its attempts, model calls, messages and reward.

    rollout_id: Its id, or the start of it (default: the newest rollout).

    \b
    Examples:
      agl store show
      agl store show ro-01a2 --run runs/first
    """
    async with store.open() as opened:
        rollouts = await opened.query_rollouts(rollout_id_contains=rollout_id, newest_first=True, limit=100)
        rollout = next((each for each in rollouts if each.rollout_id.startswith(rollout_id or "")), None)
        if rollout is None:
            raise ConfigError(f"the store has no rollout {rollout_id!r}" if rollout_id else "the store is empty")
        attempts = await opened.query_attempts(rollout.rollout_id)
        spans = await opened.query_spans(rollout.rollout_id)
    record = {
        "rollout": asdict(rollout) | {"config": rollout.config.model_dump()},
        "attempts": [asdict(attempt) for attempt in attempts],
        "spans": [asdict(span) for span in spans],
    }
    after = [agl("store", "list", store=store.place, sort="reward")]
    return Result(record, rollout_lines(rollout, attempts, spans), after)


Order = Literal["newest", "reward", "seconds"]
MOST_READ = 5000
"""Rollouts that are read to sort them by what their spans say, the newest."""


async def list_rollouts(
    store: StoreOfRun,
    chosen: Filter,
    sort: Order = "newest",
    limit: int = Option(20, min=1),
    reward_weights: RewardWeights = None,
) -> Result:
    """List rollouts with their reward, calls and failure.

    sort: newest, reward (lowest first) or seconds (slowest first).
    limit: Rows to show.

    \b
    Examples:
      agl store list --run runs/first --status failed
      agl store list --sort reward --limit 5
    """
    query, read = chosen.query(), limit if sort == "newest" else MOST_READ
    async with store.open() as opened:
        matching = await opened.count_rollouts(**query)
        summaries = Summaries(opened, weights_of(reward_weights, store.place))
        found = await summaries.of(await opened.query_rollouts(**query, newest_first=True, limit=read))
    if sort == "reward":
        found.sort(key=lambda row: (row.reward_number is None, row.reward_number or 0.0))
    elif sort == "seconds":
        found.sort(key=lambda row: -(row.seconds or 0.0))
    rows, read = found[:limit], len(found)
    record = {"rollouts": [vars(row) for row in rows], "read": read, "matching": matching}
    after = [agl("store", "show", row.rollout_id, store=store.place) for row in rows[:1]]
    return Result(record, _table(rows, read, matching), after)


def _table(rows: Sequence[RolloutSummary], read: int, matching: int) -> Iterator[str]:
    """A line for each rollout, and what they were chosen from."""
    for row in rows:
        reward = "-" if row.reward_number is None else f"{row.reward_number:.3f}"
        if isinstance(row.reward, dict) and row.reward_number is None:
            reward = " ".join(f"{name}={value:g}" for name, value in row.reward.items())
        seconds = "" if row.seconds is None else f"{row.seconds:.1f} s"
        failure = "" if row.failure is None else f"  {row.failure_kind or ''}: {row.failure}"
        text = f"{row.rollout_id}  {row.status:<9} {reward:>7}  {row.calls:>2} calls {seconds:>8}  {row.task}{failure}"
        yield text[:240]
    yield f"{len(rows)} of {matching:,} rollouts"
    if len(rows) < read < matching:
        yield f"sorted among the newest {read:,} only"


def _counts(counts: dict[str, int], queues: list[Queue]) -> Iterator[str]:
    by_status = {name.partition(".")[2]: count for name, count in counts.items() if name.startswith("rollouts.")}
    statuses = "  ".join(f"{count:,} {status}" for status, count in by_status.items() if count)
    yield f"{'rollouts':<12} {sum(by_status.values()):>12,}  {statuses}".rstrip()
    for name, count in counts.items():
        if name not in ("rollouts", "bytes") and not name.startswith("rollouts."):
            yield f"{name:<12} {count:>12,}"
    if "bytes" in counts:
        yield f"{'size':<12} {decimal(counts['bytes']):>12}"
    for queue in queues:
        limit = "" if queue.limit is None else f" of at most {queue.limit:,}"
        yield f"queue {queue.name}: {queue.waiting:,} waiting, {queue.open:,} open{limit}"


# -- prune and vacuum ------------------------------------------------------------------------------------------------


async def prune(
    ctx: Context,
    store: AnyStore,
    older_than: str | None = None,
    keep: int | None = Option(None, min=0),
    max_size: str | None = None,
    dry_run: bool = False,
    yes: bool = Option(False, "--yes", "-y"),
) -> Result:
    """Remove the oldest finished rollouts until the others fit.

    Their attempts and spans are removed too. Unfinished rollouts and resources stay, and in the store of a training run
    also the rollouts that the run still needs. The file becomes smaller only with `agl store vacuum`.

    older_than: Remove rollouts that finished longer ago: 12h, 30d, 2w.
    keep: Keep this number of finished rollouts, the newest ones.
    max_size: Keep the newest rollouts up to this size: 500MB, 10GB.
    dry_run: Print what would be removed, and stop.
    yes: Do not ask for confirmation.

    \b
    Examples:
      agl store prune --older-than 30d --dry-run
      agl store prune --store hub.db --keep 100000 --yes
    """
    from agentlightning.training.persistence.run_dir import rollouts_in_use

    output: Output = ctx.obj
    path = store_file(store.store)
    in_use = () if path is None else rollouts_in_use(path.parent)  # where it is the store of a training run
    retention = retention_from(None if older_than is None else read_duration(older_than), keep, max_size)
    if retention is None:
        raise ConfigError("say what to remove: --older-than 30d, --keep 100000 or --max-size 10GB")
    retention = replace(retention, spare=in_use)
    async with store.open() as opened:
        planned = await opened.prune(retention, dry_run=True)
        if dry_run or not planned.rollouts:
            text = f"would remove {_describe(planned)}" if planned.rollouts else "nothing to remove"
            return Result({"dry_run": dry_run, **asdict(planned)}, text)
        if not yes:
            _confirm(planned, output)
        with Progress() as progress:
            progress.phase(f"pruning {planned.rollouts:,} rollouts")
            removed = await opened.prune(retention)
    text = f"removed {_describe(removed)}; vacuum returns the space to the file system"
    return Result({"dry_run": False, **asdict(removed)}, text, [agl("store", "vacuum", store=store.store)])


def _confirm(planned: Pruned, output: Output) -> None:
    if output.as_json or not sys.stdin.isatty():
        raise ConfigError(f"this would remove {_describe(planned)}; confirm with --yes, or add --dry-run")
    if not typer.confirm(f"Remove {_describe(planned)}?"):
        output.console.print("nothing was removed")
        raise typer.Exit(1)


def _describe(pruned: Pruned) -> str:
    return f"{pruned.rollouts:,} rollouts with {pruned.spans:,} spans, {decimal(pruned.bytes)}"


async def vacuum(store: AnyStore) -> Result:
    """Return free space to the file system.

    Also deletes tokens that no span refers to. Needs as much free disk space as the store is large. The store stays
    usable, but writes may wait.

    \b
    Examples:
      agl store vacuum
      agl store vacuum --store runs/first/store.db
    """
    with Progress() as progress:
        async with store.open() as opened:
            before = (await opened.statistics())["bytes"]
            progress.phase("vacuuming")
            await opened.vacuum()
            after = (await opened.statistics())["bytes"]
    text = f"{decimal(before)} before, {decimal(after)} now"
    return Result({"bytes_before": before, "bytes": after}, text, [agl("store", "stats", store=store.store)])


# -- export and import -----------------------------------------------------------------------------------------------


async def export_(
    store: StoreOfRun,
    chosen: Filter,
    file: Path = Argument(),
    queues: list[str] | None = Option(None, "--queue"),
    force: bool = False,
) -> Result:
    """Write resources, rollouts, attempts and spans to a file that `agl store import` reads.

    The store may be written to meanwhile. The file appears when it is complete.

    file: Ends in .jsonl, .jsonl.gz or .parquet.
    queues: Only rollouts of this queue; repeatable.
    force: Overwrite an existing file.

    \b
    Examples:
      agl store export rollouts.jsonl.gz --run runs/first
      agl store export train.jsonl --store hub.db --mode train --status succeeded
    """
    with Progress() as progress:
        async with store.open() as opened:
            progress.phase("exporting rollouts")
            with writing(file):
                exported = await export_store(
                    opened,
                    file,
                    **chosen.query(),
                    queue_in=queues or None,
                    overwrite=force,
                    report=lambda done, total: progress.update(done),
                )
    after = [] if file.suffix == ".parquet" else [agl("store", "import", file, store="copy.db")]
    text = (
        f"{exported.rollouts:,} rollouts with {exported.spans:,} spans and {exported.resources:,} resources in {file},"
        f" {decimal(exported.bytes)}"
    )
    if exported.keys_left_out:
        text += f"\nthe API keys of {exported.keys_left_out} resources were left out"
    return Result({"file": str(file), **asdict(exported)}, text, after)


async def import_(store: AnyStore, file: Path = Argument()) -> Result:
    """Add the contents of a file to a store.

    What the store already has stays as it is, so that an import can be repeated. Unfinished rollouts are queued. Of a
    truncated or damaged file, the part before the damage is imported.

    file: Written by `agl store export`.

    \b
    Examples:
      agl store import rollouts.jsonl.gz
      agl store import train.jsonl --store copy.db
    """
    check_source(file)  # before a database is created for it
    with Progress() as progress:
        async with store.open(create=True) as opened:
            progress.phase("importing rollouts")
            imported = await import_store(opened, file, report=lambda done, total: progress.update(done))
    known = f"; {imported.known:,} were already there" if imported.known else ""
    text = f"{imported.rollouts:,} rollouts and {imported.resources:,} resources imported from {file}{known}"
    return Result({"file": str(file), **asdict(imported)}, text, [agl("store", "list", store=store.store)])


VERBS = {
    "stats": stats,
    "list": list_rollouts,
    "show": show,
    "prune": prune,
    "vacuum": vacuum,
    "export": export_,
    "import": import_,
}


# -- agl export -------------------------------------------------------------------------------------------------------


Form = Literal["hf", "gguf-ready", "gguf", "openai-jsonl", "trl-jsonl", "dpo-jsonl"]
"""What is written."""
SUFFIXES = {"hf": "", "gguf-ready": "", "gguf": ".gguf"}
"""What the names of weights end in; of rollouts, it is `.jsonl`."""


async def export(
    run: Run = None,
    to: Form = "hf",
    out: Path | None = None,
    min_reward: float | None = None,
    target_agent: str | None = None,
    store: GivenStore = None,
    overwrite: bool = False,
    reward_weights: RewardWeights = None,
    precision: Precision | None = None,
) -> Result:
    """Write the weights of a run for transformers, llama.cpp or Ollama, or its training rollouts as a data set.

    to: hf, gguf-ready and gguf: weights; the others: rollouts as lines.
    out: File or directory (default: RUN/export/FORM).
    min_reward: Only rollouts with at least this reward.
    target_agent: Only calls of agents whose name matches.
    overwrite: Replace the file of --out, if there is one.
    precision: Of the matrices of a GGUF file (default: f16).

    \b
    Examples:
      agl export runs/first --to gguf --out my-model.gguf
      agl export runs/first --to trl-jsonl --min-reward 0.5
    """
    from agentlightning.training.export import Selection, export_dataset, export_weights

    run = run_or_newest(run)
    if precision is not None and to != "gguf":
        raise ConfigError(f"--precision is that of a GGUF file, and --to {to} writes none; leave it out")
    path, suffix = out or run / "export" / to, SUFFIXES.get(to, ".jsonl")
    if suffix:
        path = path if path.suffix == suffix else path.with_name(path.name + suffix)
        if out is not None and not overwrite and path.exists():
            raise ConfigError(f"{path} exists; give another --out, or --overwrite")
    if to == "hf" or to == "gguf-ready" or to == "gguf":
        names = ("--min-reward", "--target-agent", "--store", "--reward-weights")
        values = (min_reward, target_agent, store, reward_weights)
        if unused := [name for name, value in zip(names, values, strict=True) if value is not None]:
            raise ConfigError(f"{', '.join(unused)} select rollouts, and --to {to} writes weights; leave them out")
        with writing(path):
            written = export_weights(run, to, path, precision or "f16")
        after = agl("serve", "--allow-unattributed", model=path)
    else:
        selection = Selection(min_reward, target_agent, weights_of(reward_weights, run))
        with writing(path):
            written = await export_dataset(run, to, path, selection, store)
        learning = {"openai-jsonl": "sft", "dpo-jsonl": "dpo"}.get(to)
        after = agl(learning, model="tiny", data=path) if learning else agl("report", run)
    found = to_builtins(written, enc_hook=str)
    return Result(found, [f"{key}: {value}" for key, value in found.items()], [after])
