"""`agl store`: inspects a store and keeps it small: stats, show, prune, vacuum, export, import."""

from __future__ import annotations

import asyncio
import errno
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from agentlightning.cli.formatting.units import retention_from, show_size
from agentlightning.cli.opening import POSTGRES, store_to_read, weights_of
from agentlightning.cli.options import Json, RewardWeights, RunStore, Store, Token
from agentlightning.cli.output import Output, agl, open_output
from agentlightning.cli.viewing.rollouts import Order, print_rollouts, rollout_table
from agentlightning.errors import ConfigError

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStoreBase
    from agentlightning.store.export.copy import Report
    from agentlightning.store.types import Pruned, Queue, Retention
    from agentlightning.util.progress import Progress

PROGRESS_SECONDS = 2.0
"""Work that takes longer shows its progress, updated this often."""
RETRY_SECONDS = 3.0
"""How long calls are retried if no server answers; the user can repeat the command."""

Server = Annotated[
    str | None, typer.Option(help="Use the store of the server at this URL instead.", show_default=False)
]
Statuses = Annotated[list[str] | None, typer.Option("--status", help="Only rollouts with this status; repeatable.")]
Modes = Annotated[list[str] | None, typer.Option("--mode", help="Only rollouts with this mode; repeatable.")]

Result = tuple[dict[str, Any], Callable[[Console], None], *tuple[str, ...]]
"""The record of a verb for programs, a function that prints it for people, and the commands that lead on."""


# -- opening ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_named(
    store: str | None, server: str | None, token: str | None, create: bool = False
) -> AsyncGenerator[LightningStoreBase]:
    from agentlightning.store.base import store_url

    if store is None and server is None and str(store_url(None)).startswith(("http://", "https://")):
        server = str(store_url(None))
    opened = _open_client(server, token, store) if server is not None else _open_database(store, create)
    try:
        yield opened
    finally:
        await opened.close()


def _open_client(server: str, token: str | None, store: str | None) -> LightningStoreBase:
    from agentlightning.store.http.client import LightningStoreClient

    if store is not None:
        raise ConfigError("--store opens a database, and --server uses that of a server; give only one of them")
    return LightningStoreClient(server, token=token, patience=RETRY_SECONDS)


def _open_database(store: str | None, create: bool) -> LightningStoreBase:
    """Open the database. Without `create`, it must exist."""
    from agentlightning.store import LightningStore
    from agentlightning.store.base import store_url
    from agentlightning.store.sql.sqlite import locate

    store = str(store_url(store))
    if not store.startswith(POSTGRES):
        path = locate(store)
        if path is None:
            raise ConfigError("an in-memory store ends with its process; give --store PATH or --server URL")
        if not create and not path.exists():
            raise ConfigError(f"there is no store at {path}; give --store PATH or --server URL")
    return LightningStore(store)


def run_verb(
    as_json: bool,
    work: Callable[[Output, Progress], Awaitable[Result]],
) -> None:
    """Run the work of a verb and print its result."""
    with open_output(as_json) as output:
        from agentlightning.util.progress import Progress

        async def main() -> Result:
            with Progress(output.console) as progress:
                return await work(output, progress)

        output.finish(*asyncio.run(main()))


# -- stats -----------------------------------------------------------------------------------------------------------


def stats(
    run: RunStore = None, store: Store = None, server: Server = None, token: Token = None, as_json: Json = False
) -> None:
    """Show the contents of a store: rollouts by status, attempts, spans, queues, and its size.

    \b
    Examples:
      agl store stats
      agl store stats --store hub.db --json
    """

    async def work(output: Output, progress: Progress) -> Result:
        place = store_to_read(run, store, server)
        async with open_named(place, server, token) as opened:
            counts = await opened.statistics()
            queues = await opened.query_queues()
        record = {"statistics": counts, "queues": [asdict(queue) for queue in queues]}
        return (
            record,
            lambda console: _show_stats(counts, queues, console),
            agl("store", "list", store=place, server=server),
        )

    run_verb(as_json, work)


def show(
    rollout_id: Annotated[
        str | None, typer.Argument(help="Its id, or the start of it (default: the newest rollout).", show_default=False)
    ] = None,
    run: RunStore = None,
    store: Store = None,
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Show a rollout: its attempts, model calls, messages and reward.

    \b
    Examples:
      agl store show
      agl store show ro-01a2 --run runs/first
    """

    async def work(output: Output, progress: Progress) -> Result:
        from agentlightning.cli.formatting.rollout_text import rollout_lines

        place = store_to_read(run, store, server)
        async with open_named(place, server, token) as opened:
            rollouts = await opened.query_rollouts(rollout_id_contains=rollout_id, newest_first=True, limit=100)
            rollout = next((each for each in rollouts if each.rollout_id.startswith(rollout_id or "")), None)
            if rollout is None:
                raise ConfigError(f"the store has no rollout {rollout_id!r}" if rollout_id else "the store is empty")
            attempts = await opened.query_attempts(rollout.rollout_id)
            spans = await opened.query_spans(rollout.rollout_id)
        lines = list(rollout_lines(rollout, attempts, spans))
        record = {
            "rollout": asdict(rollout) | {"config": rollout.config.model_dump()},
            "attempts": [asdict(attempt) for attempt in attempts],
            "spans": [asdict(span) for span in spans],
        }
        after = agl("store", "list", store=place, server=server, sort="reward")
        return record, lambda console: console.print("\n".join(lines), markup=False), after

    run_verb(as_json, work)


def list_rollouts(
    run: RunStore = None,
    statuses: Statuses = None,
    modes: Modes = None,
    sort: Annotated[Order, typer.Option(help="newest, reward (lowest first) or seconds (slowest first).")] = "newest",
    limit: Annotated[int, typer.Option(min=1, help="Rows to show.")] = 20,
    reward_weights: RewardWeights = None,
    store: Store = None,
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """List rollouts with their reward, calls and failure.

    \b
    Examples:
      agl store list --run runs/first --status failed
      agl store list --sort reward --limit 5
    """

    async def work(output: Output, progress: Progress) -> Result:
        place = store_to_read(run, store, server)
        async with open_named(place, server, token) as opened:
            table = await rollout_table(opened, statuses, modes, sort, limit, weights_of(reward_weights, place))
        record = {"rollouts": [asdict(row) for row in table.rows], "read": table.read, "matching": table.matching}
        after = [agl("store", "show", row.rollout_id, store=place, server=server) for row in table.rows[:1]]
        return record, lambda console: print_rollouts(table, console), *after

    run_verb(as_json, work)


def _show_stats(counts: dict[str, int], queues: list[Queue], console: Console) -> None:
    by_status = {name.partition(".")[2]: count for name, count in counts.items() if name.startswith("rollouts.")}
    statuses = "  ".join(f"{count:,} {status}" for status, count in by_status.items() if count)
    console.print(f"{'rollouts':<12} {sum(by_status.values()):>12,}  {statuses}".rstrip())
    for name, count in counts.items():
        if name in ("rollouts", "bytes") or name.startswith("rollouts."):
            continue
        console.print(f"{name:<12} {count:>12,}")
    if "bytes" in counts:
        console.print(f"{'size':<12} {show_size(counts['bytes']):>12}")
    for queue in queues:
        limit = "" if queue.limit is None else f" of at most {queue.limit:,}"
        console.print(f"queue {queue.name}: {queue.waiting:,} waiting, {queue.open:,} open{limit}", markup=False)


# -- prune and vacuum ------------------------------------------------------------------------------------------------


def prune(
    store: Store = None,
    server: Server = None,
    token: Token = None,
    older_than: Annotated[
        str | None, typer.Option(help="Remove rollouts that finished longer ago: 12h, 30d, 2w.")
    ] = None,
    keep: Annotated[int | None, typer.Option(help="Keep this number of finished rollouts, the newest ones.")] = None,
    max_size: Annotated[str | None, typer.Option(help="Keep the newest rollouts up to this size: 500MB, 10GB.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be removed, and stop.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Remove the oldest finished rollouts until the others fit.

    Their attempts and spans are removed too. Unfinished rollouts and resources stay, and in the store of a training run
    also the rollouts that the run still needs. The file becomes smaller only with `agl store vacuum`.

    \b
    Examples:
      agl store prune --older-than 30d --dry-run
      agl store prune --store hub.db --keep 100000 --yes
    """

    async def work(output: Output, progress: Progress) -> Result:
        spared = () if server is not None else _rollouts_in_use(store)
        retention = replace(retention_from(older_than, keep, max_size), spare=spared)
        async with open_named(store, server, token) as opened:
            planned = await opened.prune(retention, dry_run=True)
            if dry_run or not planned.rollouts:
                removed = None
            else:
                _confirm(planned, yes, output, progress)
                removed = await _prune(opened, retention, planned, progress)
        record = {"dry_run": dry_run, **asdict(removed or planned)}
        after = [agl("store", "vacuum", store=store, server=server)] if removed is not None else []
        return record, lambda console: _show_pruned(removed, planned, console), *after

    run_verb(as_json, work)


def _rollouts_in_use(store: str | None) -> tuple[str, ...]:
    """Prefixes of the ids of rollouts that a training run still needs, if this is the store of one."""
    from agentlightning.store.sql.sqlite import locate
    from agentlightning.training.persistence.run_dir import rollouts_in_use

    if store is not None and store.startswith(POSTGRES):
        return ()
    path = locate(store)
    return () if path is None else rollouts_in_use(path.parent)


def _confirm(planned: Pruned, yes: bool, output: Output, progress: Progress) -> None:
    if yes:
        return
    if output.as_json or not sys.stdin.isatty():
        raise ConfigError(f"this would remove {_describe(planned)}; confirm with --yes, or add --dry-run")
    if not typer.confirm(f"Remove {_describe(planned)}?"):
        progress.note("nothing was removed")
        raise typer.Exit(1)


async def _prune(store: LightningStoreBase, retention: Retention, planned: Pruned, progress: Progress) -> Pruned:
    from agentlightning.util.event_loop import in_background

    async with in_background(_show_pruning(store, await _finished(store), planned.rollouts, progress)):
        return await store.prune(retention)


async def _show_pruning(store: LightningStoreBase, before: int, total: int, progress: Progress) -> None:
    """Show the progress, from the number of finished rollouts compared to that `before`."""
    await asyncio.sleep(PROGRESS_SECONDS)
    progress.phase("pruning rollouts", total)
    while True:
        progress.update(max(0, min(total, before - await _finished(store))))
        await asyncio.sleep(PROGRESS_SECONDS)


async def _finished(store: LightningStoreBase) -> int:
    from agentlightning.rollouts import FINISHED

    counts = await store.statistics()
    return sum(counts.get(f"rollouts.{status}", 0) for status in FINISHED)


def _describe(pruned: Pruned) -> str:
    return f"{pruned.rollouts:,} rollouts with {pruned.spans:,} spans, {show_size(pruned.bytes)}"


def _show_pruned(removed: Pruned | None, planned: Pruned, console: Console) -> None:
    if removed is not None:
        console.print(f"removed {_describe(removed)}; vacuum returns the space to the file system")
    elif planned.rollouts:
        console.print(f"would remove {_describe(planned)}")
    else:
        console.print("nothing to remove")


def vacuum(store: Store = None, server: Server = None, token: Token = None, as_json: Json = False) -> None:
    """Return free space to the file system.

    Also deletes tokens that no span refers to. Needs as much free disk space as the store is large. The store stays
    usable, but writes may wait.

    \b
    Examples:
      agl store vacuum
      agl store vacuum --store runs/first/store.db
    """

    async def work(output: Output, progress: Progress) -> Result:
        from agentlightning.util.event_loop import in_background

        async with open_named(store, server, token) as opened:
            before = (await opened.statistics())["bytes"]
            async with in_background(_show_phase_later(progress, "vacuuming")):
                await opened.vacuum()
            after = (await opened.statistics())["bytes"]
        text = f"{show_size(before)} before, {show_size(after)} now"
        record, stats = {"bytes_before": before, "bytes": after}, agl("store", "stats", store=store, server=server)
        return record, lambda console: console.print(text), stats

    run_verb(as_json, work)


async def _show_phase_later(progress: Progress, name: str) -> None:
    await asyncio.sleep(PROGRESS_SECONDS)
    progress.phase(name)


# -- export and import -----------------------------------------------------------------------------------------------


def export_(
    file: Annotated[Path, typer.Argument(help="Ends in .jsonl, .jsonl.gz or .parquet.")],
    run: RunStore = None,
    store: Store = None,
    server: Server = None,
    token: Token = None,
    statuses: Statuses = None,
    modes: Modes = None,
    queues: Annotated[
        list[str] | None, typer.Option("--queue", help="Only rollouts of this queue; repeatable.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    as_json: Json = False,
) -> None:
    """Write resources, rollouts, attempts and spans to a file that `agl store import` reads.

    The store may be written to meanwhile. The file appears when it is complete.

    \b
    Examples:
      agl store export rollouts.jsonl.gz --run runs/first
      agl store export train.jsonl --store hub.db --mode train --status succeeded
    """

    async def work(output: Output, progress: Progress) -> Result:
        from agentlightning.store.export import export_store

        filters: dict[str, Any] = {"status_in": checked(statuses, "status"), "mode_in": checked(modes, "mode")}
        async with open_named(store_to_read(run, store, server), server, token) as opened:
            with _write_errors(file):
                report = _report(progress, "exporting")
                exported = await export_store(
                    opened, file, **filters, queue_in=queues or None, overwrite=force, report=report
                )
        after = agl("store", "import", file, store="copy.db")
        return {"file": str(file), **asdict(exported)}, lambda console: _show_exported(file, exported, console), after

    run_verb(as_json, work)


@contextmanager
def _write_errors(file: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(f"{file} cannot be written: {error}") from error


def checked(values: list[str] | None, name: str) -> list[Any] | None:
    from typing import get_args

    from agentlightning.rollouts import RolloutMode, RolloutStatus

    allowed = get_args(RolloutStatus if name == "status" else RolloutMode)
    for value in values or ():
        if value not in allowed:
            raise ConfigError(f"--{name} {value!r} is not one of {', '.join(allowed)}")
    return values or None


def _report(progress: Progress, name: str) -> Report:
    """A function that shows the progress of a copy that takes long."""
    start, shown = time.monotonic(), False

    def report(done: int, total: int | None) -> None:
        nonlocal shown
        if not shown and time.monotonic() - start >= PROGRESS_SECONDS:
            progress.phase(f"{name} rollouts", total, done)
            shown = True
        if shown:
            progress.update(done)

    return report


def _show_exported(file: Path, exported: Any, console: Console) -> None:
    console.print(
        f"{exported.rollouts:,} rollouts with {exported.spans:,} spans and {exported.resources:,} resources "
        f"in {file}, {show_size(exported.bytes)}",
        markup=False,
    )
    if exported.keys_left_out:
        console.print(f"the API keys of {exported.keys_left_out} resources were left out")


def import_(
    file: Annotated[Path, typer.Argument(help="Written by `agl store export`.")],
    store: Store = None,
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Add the contents of a file to a store.

    What the store already has stays as it is, so that an import can be repeated. Unfinished rollouts are queued. Of a
    truncated or damaged file, the part before the damage is imported.

    \b
    Examples:
      agl store import rollouts.jsonl.gz
      agl store import train.jsonl --store copy.db
    """

    async def work(output: Output, progress: Progress) -> Result:
        from agentlightning.store.export import import_store
        from agentlightning.store.export.copy import check_source

        check_source(file)  # before a database is created for it
        async with open_named(store, server, token, create=True) as opened:
            imported = await import_store(opened, file, report=_report(progress, "importing"))
        known = f"; {imported.known:,} were already there" if imported.known else ""
        text = f"{imported.rollouts:,} rollouts and {imported.resources:,} resources imported from {file}{known}"
        after = agl("store", "list", store=store, server=server)
        return {"file": str(file), **asdict(imported)}, lambda console: console.print(text, markup=False), after

    run_verb(as_json, work)


VERBS: Final = {
    "stats": stats,
    "list": list_rollouts,
    "show": show,
    "prune": prune,
    "vacuum": vacuum,
    "export": export_,
    "import": import_,
}
