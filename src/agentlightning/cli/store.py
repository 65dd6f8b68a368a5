"""`agl store`: inspects a store and keeps it small. `agl export`: the weights or the rollouts of a run, for other
programs."""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from msgspec import structs
from rich.console import Console
from rich.filesize import decimal

from agentlightning.cli.options import (
    POSTGRES,
    GivenStore,
    Modes,
    RewardWeights,
    Run,
    RunStore,
    Statuses,
    Store,
    Token,
    checked,
    is_url,
    open_named,
    retention_from,
    run_or_newest,
    store_to_read,
    weights_of,
)
from agentlightning.cli.output import Output, Result, agl
from agentlightning.errors import ConfigError
from agentlightning.models import Precision
from agentlightning.trajectory import RewardWeights as Weights
from agentlightning.util.printable import printable
from agentlightning.util.progress import Progress

if TYPE_CHECKING:
    from agentlightning.dashboard.data.rollouts import RolloutSummary
    from agentlightning.store.base import LightningStoreBase
    from agentlightning.store.types import Pruned, Queue


# -- stats -----------------------------------------------------------------------------------------------------------


async def stats(run: RunStore = None, store: Store = None, token: Token = None) -> Result:
    """Show the contents of a store: rollouts by status, attempts, spans, queues, and its size.

    \b
    Examples:
      agl store stats
      agl store stats --store hub.db --json
    """
    place = store_to_read(run, store)
    async with open_named(place, token) as opened:
        counts = await opened.statistics()
        queues = await opened.query_queues()
    record = {"statistics": counts, "queues": [asdict(queue) for queue in queues]}
    return Result(record, lambda console: _show_stats(counts, queues, console), [agl("store", "list", store=place)])


async def show(
    rollout_id: Annotated[
        str | None, typer.Argument(help="Its id, or the start of it (default: the newest rollout).", show_default=False)
    ] = None,
    run: RunStore = None,
    store: Store = None,
    token: Token = None,
) -> Result:
    """Show a rollout: its attempts, model calls, messages and reward.

    \b
    Examples:
      agl store show
      agl store show ro-01a2 --run runs/first
    """
    from agentlightning.dashboard.data.rollouts import rollout_lines

    place = store_to_read(run, store)
    async with open_named(place, token) as opened:
        rollouts = await opened.query_rollouts(rollout_id_contains=rollout_id, newest_first=True, limit=100)
        rollout = next((each for each in rollouts if each.rollout_id.startswith(rollout_id or "")), None)
        if rollout is None:
            raise ConfigError(f"the store has no rollout {rollout_id!r}" if rollout_id else "the store is empty")
        attempts = await opened.query_attempts(rollout.rollout_id)
        spans = await opened.query_spans(rollout.rollout_id)
    text = "\n".join(rollout_lines(rollout, attempts, spans))
    record = {
        "rollout": asdict(rollout) | {"config": rollout.config.model_dump()},
        "attempts": [asdict(attempt) for attempt in attempts],
        "spans": [asdict(span) for span in spans],
    }
    after = [agl("store", "list", store=place, sort="reward")]
    return Result(record, lambda console: console.print(text), after)


async def list_rollouts(
    run: RunStore = None,
    statuses: Statuses = None,
    modes: Modes = None,
    sort: Annotated[Order, typer.Option(help="newest, reward (lowest first) or seconds (slowest first).")] = "newest",
    limit: Annotated[int, typer.Option(min=1, help="Rows to show.")] = 20,
    reward_weights: RewardWeights = None,
    store: Store = None,
    token: Token = None,
) -> Result:
    """List rollouts with their reward, calls and failure.

    \b
    Examples:
      agl store list --run runs/first --status failed
      agl store list --sort reward --limit 5
    """
    place = store_to_read(run, store)
    async with open_named(place, token) as opened:
        table = await rollout_table(opened, statuses, modes, sort, limit, weights_of(reward_weights, place))
    record = {"rollouts": [vars(row) for row in table.rows], "read": table.read, "matching": table.matching}
    after = [agl("store", "show", row.rollout_id, store=place) for row in table.rows[:1]]
    return Result(record, lambda console: print_rollouts(table, console), after)


def _show_stats(counts: dict[str, int], queues: list[Queue], console: Console) -> None:
    by_status = {name.partition(".")[2]: count for name, count in counts.items() if name.startswith("rollouts.")}
    statuses = "  ".join(f"{count:,} {status}" for status, count in by_status.items() if count)
    console.print(f"{'rollouts':<12} {sum(by_status.values()):>12,}  {statuses}".rstrip())
    for name, count in counts.items():
        if name in ("rollouts", "bytes") or name.startswith("rollouts."):
            continue
        console.print(f"{name:<12} {count:>12,}")
    if "bytes" in counts:
        console.print(f"{'size':<12} {decimal(counts['bytes']):>12}")
    for queue in queues:
        limit = "" if queue.limit is None else f" of at most {queue.limit:,}"
        console.print(f"queue {queue.name}: {queue.waiting:,} waiting, {queue.open:,} open{limit}")


# -- prune and vacuum ------------------------------------------------------------------------------------------------


async def prune(
    ctx: typer.Context,
    store: Store = None,
    token: Token = None,
    older_than: Annotated[
        str | None, typer.Option(help="Remove rollouts that finished longer ago: 12h, 30d, 2w.")
    ] = None,
    keep: Annotated[int | None, typer.Option(help="Keep this number of finished rollouts, the newest ones.")] = None,
    max_size: Annotated[str | None, typer.Option(help="Keep the newest rollouts up to this size: 500MB, 10GB.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be removed, and stop.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> Result:
    """Remove the oldest finished rollouts until the others fit.

    Their attempts and spans are removed too. Unfinished rollouts and resources stay, and in the store of a training run
    also the rollouts that the run still needs. The file becomes smaller only with `agl store vacuum`.

    \b
    Examples:
      agl store prune --older-than 30d --dry-run
      agl store prune --store hub.db --keep 100000 --yes
    """

    output: Output = ctx.obj
    retention = replace(retention_from(older_than, keep, max_size), spare=_rollouts_in_use(store))
    async with open_named(store, token) as opened:
        planned = await opened.prune(retention, dry_run=True)
        if dry_run or not planned.rollouts:
            text = f"would remove {_describe(planned)}" if planned.rollouts else "nothing to remove"
            return Result({"dry_run": dry_run, **asdict(planned)}, lambda console: console.print(text))
        if not yes:
            _confirm(planned, output)
        with Progress() as progress:
            progress.phase(f"pruning {planned.rollouts:,} rollouts")
            removed = await opened.prune(retention)
    text = f"removed {_describe(removed)}; vacuum returns the space to the file system"
    after = [agl("store", "vacuum", store=store)]
    return Result({"dry_run": False, **asdict(removed)}, lambda console: console.print(text), after)


def _rollouts_in_use(store: str | None) -> tuple[str, ...]:
    """Prefixes of the ids of rollouts that a training run still needs, if this is the store of one."""
    from agentlightning.store.base import store_url
    from agentlightning.store.sql.sqlite import locate
    from agentlightning.training.persistence.run_dir import rollouts_in_use

    place = str(store_url(store))
    path = None if place.startswith(POSTGRES) or is_url(place) else locate(place)
    return () if path is None else rollouts_in_use(path.parent)


def _confirm(planned: Pruned, output: Output) -> None:
    if output.as_json or not sys.stdin.isatty():
        raise ConfigError(f"this would remove {_describe(planned)}; confirm with --yes, or add --dry-run")
    if not typer.confirm(f"Remove {_describe(planned)}?"):
        output.console.print("nothing was removed")
        raise typer.Exit(1)


def _describe(pruned: Pruned) -> str:
    return f"{pruned.rollouts:,} rollouts with {pruned.spans:,} spans, {decimal(pruned.bytes)}"


async def vacuum(store: Store = None, token: Token = None) -> Result:
    """Return free space to the file system.

    Also deletes tokens that no span refers to. Needs as much free disk space as the store is large. The store stays
    usable, but writes may wait.

    \b
    Examples:
      agl store vacuum
      agl store vacuum --store runs/first/store.db
    """
    with Progress() as progress:
        async with open_named(store, token) as opened:
            before = (await opened.statistics())["bytes"]
            progress.phase("vacuuming")
            await opened.vacuum()
            after = (await opened.statistics())["bytes"]
    text = f"{decimal(before)} before, {decimal(after)} now"
    record = {"bytes_before": before, "bytes": after}
    return Result(record, lambda console: console.print(text), [agl("store", "stats", store=store)])


# -- export and import -----------------------------------------------------------------------------------------------


async def export_(
    file: Annotated[Path, typer.Argument(help="Ends in .jsonl, .jsonl.gz or .parquet.")],
    run: RunStore = None,
    store: Store = None,
    token: Token = None,
    statuses: Statuses = None,
    modes: Modes = None,
    queues: Annotated[
        list[str] | None, typer.Option("--queue", help="Only rollouts of this queue; repeatable.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> Result:
    """Write resources, rollouts, attempts and spans to a file that `agl store import` reads.

    The store may be written to meanwhile. The file appears when it is complete.

    \b
    Examples:
      agl store export rollouts.jsonl.gz --run runs/first
      agl store export train.jsonl --store hub.db --mode train --status succeeded
    """

    from agentlightning.store.export import export_store

    with Progress() as progress:
        async with open_named(store_to_read(run, store), token) as opened:
            progress.phase("exporting rollouts")
            try:
                exported = await export_store(
                    opened,
                    file,
                    status_in=checked(statuses, "status"),
                    mode_in=checked(modes, "mode"),
                    queue_in=queues or None,
                    overwrite=force,
                    report=lambda done, total: progress.update(done),
                )
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise ConfigError(f"{file} cannot be written: {error}") from error
    after = [] if file.suffix == ".parquet" else [agl("store", "import", file, store="copy.db")]
    return Result(
        {"file": str(file), **asdict(exported)}, lambda console: _show_exported(file, exported, console), after
    )


def _show_exported(file: Path, exported: Any, console: Console) -> None:
    console.print(
        f"{exported.rollouts:,} rollouts with {exported.spans:,} spans and {exported.resources:,} resources "
        f"in {file}, {decimal(exported.bytes)}",
    )
    if exported.keys_left_out:
        console.print(f"the API keys of {exported.keys_left_out} resources were left out")


async def import_(
    file: Annotated[Path, typer.Argument(help="Written by `agl store export`.")],
    store: Store = None,
    token: Token = None,
) -> Result:
    """Add the contents of a file to a store.

    What the store already has stays as it is, so that an import can be repeated. Unfinished rollouts are queued. Of a
    truncated or damaged file, the part before the damage is imported.

    \b
    Examples:
      agl store import rollouts.jsonl.gz
      agl store import train.jsonl --store copy.db
    """

    from agentlightning.store.export import import_store
    from agentlightning.store.export.copy import check_source

    check_source(file)  # before a database is created for it
    with Progress() as progress:
        async with open_named(store, token, create=True) as opened:
            progress.phase("importing rollouts")
            imported = await import_store(opened, file, report=lambda done, total: progress.update(done))
    known = f"; {imported.known:,} were already there" if imported.known else ""
    text = f"{imported.rollouts:,} rollouts and {imported.resources:,} resources imported from {file}{known}"
    after = [agl("store", "list", store=store)]
    return Result({"file": str(file), **asdict(imported)}, lambda console: console.print(text), after)


VERBS: Final = {
    "stats": stats,
    "list": list_rollouts,
    "show": show,
    "prune": prune,
    "vacuum": vacuum,
    "export": export_,
    "import": import_,
}


# -- rollouts as a table ----------------------------------------------------------------------------------------------


Order = Literal["newest", "reward", "seconds"]
MOST_READ: Final = 5000
"""Rollouts that are read to sort them by what their spans say, the newest."""


@dataclass(frozen=True, slots=True)
class RolloutTable:
    """Rows, and what they were chosen from."""

    rows: list[RolloutSummary]
    read: int
    matching: int


async def rollout_table(
    store: LightningStoreBase,
    statuses: Sequence[str] | None,
    modes: Sequence[str] | None,
    order: Order,
    limit: int,
    weights: Weights = None,
) -> RolloutTable:
    """The table. To sort by reward or time, the newest `MOST_READ` are read."""
    from agentlightning.dashboard.data.rollouts import Summaries

    wanted: dict[str, Any] = {"status_in": statuses, "mode_in": modes}
    matching = await store.count_rollouts(**wanted)
    read = limit if order == "newest" else MOST_READ
    found = await Summaries(store, weights).of(await store.query_rollouts(**wanted, newest_first=True, limit=read))
    if order == "reward":
        found.sort(key=lambda row: (row.reward_number is None, row.reward_number or 0.0))
    elif order == "seconds":
        found.sort(key=lambda row: -(row.seconds or 0.0))
    return RolloutTable(found[:limit], len(found), matching)


def print_rollouts(table: RolloutTable, console: Console) -> None:
    """Print a line for each, and how many there are besides."""
    for row in table.rows:
        reward = "-" if row.reward_number is None else f"{row.reward_number:.3f}"
        if isinstance(row.reward, dict) and row.reward_number is None:
            reward = " ".join(f"{name}={value:g}" for name, value in row.reward.items())
        seconds = "" if row.seconds is None else f"{row.seconds:.1f} s"
        failure = "" if row.failure is None else f"  {row.failure_kind or ''}: {row.failure.strip().splitlines()[-1]}"
        text = f"{row.rollout_id}  {row.status:<9} {reward:>7}  {row.calls:>2} calls {seconds:>8}  {row.task}{failure}"
        console.print(printable(text)[:240])
    console.print(f"{len(table.rows)} of {table.matching:,} rollouts")
    if table.read < table.matching and len(table.rows) < table.read:
        console.print(f"sorted among the newest {table.read:,} only")


# -- agl export -------------------------------------------------------------------------------------------------------


Form = Literal["hf", "gguf-ready", "gguf", "openai-jsonl", "trl-jsonl", "dpo-jsonl"]
"""What is written."""
SUFFIXES: Final = {"hf": "", "gguf-ready": "", "gguf": ".gguf"}
"""What the names of weights end in; of rollouts, it is `.jsonl`."""


async def export(
    run: Run = None,
    to: Annotated[
        Form, typer.Option("--to", help="hf, gguf-ready and gguf: weights; the others: rollouts as lines.")
    ] = "hf",
    out: Annotated[Path | None, typer.Option(help="File or directory (default: RUN/export/FORM).")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only rollouts with at least this reward.")] = None,
    target_agent: Annotated[str | None, typer.Option(help="Only calls of agents whose name matches.")] = None,
    store: GivenStore = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file of --out, if there is one.")] = False,
    reward_weights: RewardWeights = None,
    precision: Annotated[Precision | None, typer.Option(help="Of the matrices of a GGUF file (default: f16).")] = None,
) -> Result:
    """Write the weights of a run for transformers, llama.cpp or Ollama, or its training rollouts as a data set.

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
        only = {
            "--min-reward": min_reward,
            "--target-agent": target_agent,
            "--store": store,
            "--reward-weights": reward_weights,
        }
        if unused := [name for name, value in only.items() if value is not None]:
            raise ConfigError(f"{', '.join(unused)} select rollouts, and --to {to} writes weights; leave them out")
        weights = export_weights(run, to, path, precision or "f16")
        found = {"path": str(path), "files": list(weights.files), "merged": weights.merged}
        after = agl("serve", "--allow-unattributed", model=path)
    else:
        selection = Selection(min_reward, target_agent, weights_of(reward_weights, run))
        rows = await export_dataset(run, to, path, selection, store)
        found = structs.asdict(rows) | {"path": str(path)}
        learning = {"openai-jsonl": "sft", "dpo-jsonl": "dpo"}.get(to)
        after = agl(learning, model="tiny", data=path) if learning else agl("report", run)
    lines = "\n".join(printable(f"{key}: {value}") for key, value in found.items())
    return Result(found, lambda console: console.print(lines), [after])
