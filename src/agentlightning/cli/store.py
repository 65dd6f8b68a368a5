"""`agl store`: what a store holds, and keeping it small: stats, show, prune, vacuum, export, import."""

from __future__ import annotations

import asyncio
import errno
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from agentlightning.cli.main import Output, reported
from agentlightning.cli.train import Json
from agentlightning.errors import ConfigError

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStoreBase
    from agentlightning.store.export.copy import Report
    from agentlightning.store.types import Pruned, Queue, Retention
    from agentlightning.util.progress import Progress

POSTGRES = ("postgresql:", "postgresql+", "postgres:")
QUIET_SECONDS = 2.0
"""What is done sooner needs no progress; what takes longer tells it this often at least."""
PATIENCE_SECONDS = 3.0
"""How long a server may be away: somebody waits who can try again."""

Store = Annotated[
    str | None,
    typer.Option(help="A SQLite file, or postgresql://... (default: .agentlightning/store.db)", show_default=False),
]
Server = Annotated[str | None, typer.Option(help="Ask the server at this URL instead.", show_default=False)]
Token = Annotated[str | None, typer.Option(envvar="AGL_TOKEN", help="The server's access token.", show_default=False)]


def register(app: typer.Typer) -> None:
    verbs = typer.Typer(name="store", no_args_is_help=True, help="Look into a store, and keep it small.")
    for name, verb in (
        ("stats", stats),
        ("show", show),
        ("prune", prune),
        ("vacuum", vacuum),
        ("export", export_),
        ("import", import_),
    ):
        verbs.command(name)(verb)
    app.add_typer(verbs)


# -- opening ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _opened(
    store: str | None, server: str | None, token: str | None, create: bool = False
) -> AsyncGenerator[LightningStoreBase]:
    from agentlightning.gateway.recording import raw_exchange
    from agentlightning.store.journal.store import take_over

    opened = _open_client(server, token, store) if server is not None else _open(store, create)
    try:
        await take_over(opened, raw_exchange.read)
        yield opened
    finally:
        await opened.close()


def _open_client(server: str, token: str | None, store: str | None) -> LightningStoreBase:
    from agentlightning.store.http.client import LightningStoreClient

    if store is not None:
        raise ConfigError("--store opens a database and --server asks a server that has one open; give one of them")
    return LightningStoreClient(server, token=token, patience=PATIENCE_SECONDS)


def _open(store: str | None, create: bool) -> LightningStoreBase:
    """The database. One that is not there is made only where something is to be written to it."""
    from agentlightning.store import LightningStore
    from agentlightning.store.sql.sqlite.backend import locate

    if store is None or not store.startswith(POSTGRES):
        path = locate(store)
        if path is None:
            raise ConfigError("an in-memory store ends with its process; give --store PATH or --server URL")
        if not create and not path.exists():
            raise ConfigError(f"there is no store at {path}; give --store PATH or --server URL")
    return LightningStore(store)


def _run(
    as_json: bool,
    work: Callable[[Output, Progress], Awaitable[tuple[dict[str, Any], Callable[[Console], None]]]],
) -> None:
    """Do a verb's work; it returns the record for machines, and what prints it for people."""
    output = Output(as_json)
    with reported(output):
        from agentlightning.util.progress import Progress

        async def main() -> tuple[dict[str, Any], Callable[[Console], None]]:
            with Progress(output.console) as progress:
                return await work(output, progress)

        output.finish(*asyncio.run(main()))


# -- stats -----------------------------------------------------------------------------------------------------------


def stats(store: Store = None, server: Server = None, token: Token = None, as_json: Json = False) -> None:
    """Show what a store holds.

    Rollouts by status, attempts, spans, queues, and its size.
    """

    async def work(output: Output, progress: Progress) -> tuple[dict[str, Any], Callable[[Console], None]]:
        async with _opened(store, server, token) as opened:
            counts = await opened.statistics()
            queues = await opened.query_queues()
        record = {"statistics": counts, "queues": [asdict(queue) for queue in queues]}
        return record, lambda console: _show_stats(counts, queues, console)

    _run(as_json, work)


def show(
    rollout_id: Annotated[
        str | None, typer.Argument(help="Its id, or the beginning of it (default: the newest).", show_default=False)
    ] = None,
    store: Store = None,
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Show one rollout: its attempts, its calls, what was said, and its reward."""

    async def work(output: Output, progress: Progress) -> tuple[dict[str, Any], Callable[[Console], None]]:
        from agentlightning.cli.rollout_text import shown

        async with _opened(store, server, token) as opened:
            found = await opened.query_rollouts(rollout_id_contains=rollout_id, newest_first=True, limit=100)
            rollout = next((each for each in found if each.rollout_id.startswith(rollout_id or "")), None)
            if rollout is None:
                raise ConfigError(f"the store has no rollout {rollout_id!r}" if rollout_id else "the store is empty")
            attempts = await opened.query_attempts(rollout.rollout_id)
            spans = await opened.query_spans(rollout.rollout_id)
        lines = list(shown(rollout, attempts, spans))
        record = {
            "rollout": asdict(rollout) | {"config": rollout.config.model_dump()},
            "attempts": [asdict(attempt) for attempt in attempts],
            "spans": [asdict(span) for span in spans],
        }
        return record, lambda console: console.print("\n".join(lines), markup=False)

    _run(as_json, work)


def _show_stats(counts: dict[str, int], queues: list[Queue], console: Console) -> None:
    from agentlightning.cli.units import show_size

    by_status = {name.partition(".")[2]: count for name, count in counts.items() if name.startswith("rollouts.")}
    shown = "  ".join(f"{count:,} {status}" for status, count in by_status.items() if count)
    console.print(f"{'rollouts':<12} {sum(by_status.values()):>12,}  {shown}".rstrip())
    for name, count in counts.items():
        if name in ("rollouts", "bytes") or name.startswith("rollouts."):
            continue
        console.print(f"{name:<12} {count:>12,}")
    if "bytes" in counts:
        console.print(f"{'size':<12} {show_size(counts['bytes']):>12}")
    for queue in queues:
        limit = "" if queue.limit is None else f" of at most {queue.limit:,}"
        console.print(f"queue {queue.name}: {queue.waiting:,} waiting, {queue.open:,} open{limit}", markup=False)


# -- keeping it small ------------------------------------------------------------------------------------------------


def prune(
    store: Store = None,
    server: Server = None,
    token: Token = None,
    older_than: Annotated[str | None, typer.Option(help="Remove what finished longer ago: 12h, 30d, 2w.")] = None,
    keep: Annotated[int | None, typer.Option(help="Keep so many finished rollouts, the newest ones.")] = None,
    max_size: Annotated[str | None, typer.Option(help="Keep so much of the newest: 500MB, 10GB.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and stop.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove the oldest finished rollouts until what is left fits.

    Their attempts and spans go with them; unfinished rollouts and resources stay, and in the store of a training run
    what the run has not made use of yet. The file does not become smaller before `agl store vacuum`.
    """

    async def work(output: Output, progress: Progress) -> tuple[dict[str, Any], Callable[[Console], None]]:
        from agentlightning.cli.units import retention_from

        spared = () if server is not None else _in_use(store)
        retention = replace(retention_from(older_than, keep, max_size), spare=spared)
        async with _opened(store, server, token) as opened:
            planned = await opened.prune(retention, dry_run=True)
            if dry_run or not planned.rollouts:
                removed = None
            else:
                _ask(planned, yes, output, progress)
                removed = await _prune(opened, retention, planned, progress)
        record = {"dry_run": dry_run, **asdict(removed or planned)}
        return record, lambda console: _show_pruned(removed, planned, console)

    _run(as_json, work)


def _in_use(store: str | None) -> tuple[str, ...]:
    """What the ids of rollouts begin with that the run needs whose store this is."""
    from agentlightning.store.sql.sqlite.backend import locate
    from agentlightning.training.run_dir import rollouts_in_use

    if store is not None and store.startswith(POSTGRES):
        return ()
    path = locate(store)
    return () if path is None else rollouts_in_use(path.parent)


def _ask(planned: Pruned, yes: bool, output: Output, progress: Progress) -> None:
    if yes:
        return
    if output.as_json or not sys.stdin.isatty():
        raise ConfigError(f"this would remove {_told(planned)}, and nobody is there to ask; add --yes, or --dry-run")
    if not typer.confirm(f"Remove {_told(planned)}?"):
        progress.note("nothing was removed")
        raise typer.Exit(1)


async def _prune(store: LightningStoreBase, retention: Retention, planned: Pruned, progress: Progress) -> Pruned:
    async with _meanwhile(_watch(store, await _finished(store), planned.rollouts, progress)):
        return await store.prune(retention)


@asynccontextmanager
async def _meanwhile(work: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    """Inside, `work` goes on; what becomes of it is of no interest."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _watch(store: LightningStoreBase, before: int, total: int, progress: Progress) -> None:
    """Tell how far it is, by what is left of the rollouts `before`; others may finish some meanwhile."""
    await asyncio.sleep(QUIET_SECONDS)
    progress.phase("pruning rollouts", total)
    while True:
        progress.update(max(0, min(total, before - await _finished(store))))
        await asyncio.sleep(QUIET_SECONDS)


async def _finished(store: LightningStoreBase) -> int:
    from agentlightning.rollouts import FINISHED

    counts = await store.statistics()
    return sum(counts.get(f"rollouts.{status}", 0) for status in FINISHED)


def _told(pruned: Pruned) -> str:
    from agentlightning.cli.units import show_size

    return f"{pruned.rollouts:,} rollouts with {pruned.spans:,} spans, {show_size(pruned.bytes)}"


def _show_pruned(removed: Pruned | None, planned: Pruned, console: Console) -> None:
    if removed is not None:
        console.print(f"removed {_told(removed)}; `agl store vacuum` gives the space back to the system")
    elif planned.rollouts:
        console.print(f"would remove {_told(planned)}")
    else:
        console.print("nothing to remove: everything fits")


def vacuum(store: Store = None, server: Server = None, token: Token = None, as_json: Json = False) -> None:
    """Give free space back to the system.

    Also drops tokens that no span refers to any more. Needs as much free disk as the store is large; others can go on
    meanwhile, but their writes may wait.
    """

    async def work(output: Output, progress: Progress) -> tuple[dict[str, Any], Callable[[Console], None]]:
        async with _opened(store, server, token) as opened:
            before = (await opened.statistics())["bytes"]
            async with _meanwhile(_say_later(progress, "giving space back")):
                await opened.vacuum()
            after = (await opened.statistics())["bytes"]
        return {"bytes_before": before, "bytes": after}, lambda console: _show_vacuum(before, after, console)

    _run(as_json, work)


async def _say_later(progress: Progress, name: str) -> None:
    await asyncio.sleep(QUIET_SECONDS)
    progress.phase(name)


def _show_vacuum(before: int, after: int, console: Console) -> None:
    from agentlightning.cli.units import show_size

    console.print(f"{show_size(before)} before, {show_size(after)} now")


# -- files -----------------------------------------------------------------------------------------------------------


def export_(
    file: Annotated[Path, typer.Argument(help="Ends in .jsonl, .jsonl.gz or .parquet.")],
    store: Store = None,
    server: Server = None,
    token: Token = None,
    status: Annotated[list[str] | None, typer.Option(help="Only rollouts of this status; may be given again.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="Only rollouts of this mode; may be given again.")] = None,
    queue: Annotated[list[str] | None, typer.Option(help="Only rollouts of this queue; may be given again.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that exists.")] = False,
    as_json: Json = False,
) -> None:
    """Write resources and rollouts to a file.

    Attempts and spans go with them; `agl store import` reads it all. Others may write to the store meanwhile. The file
    appears when it is whole.
    """

    async def work(output: Output, progress: Progress) -> tuple[dict[str, Any], Callable[[Console], None]]:
        from agentlightning.store.export import export_store

        filters: dict[str, Any] = {"status_in": _known(status, "status"), "mode_in": _known(mode, "mode")}
        async with _opened(store, server, token) as opened:
            with _writing(file):
                report = _report(progress, "exporting")
                exported = await export_store(
                    opened, file, **filters, queue_in=queue or None, overwrite=force, report=report
                )
        return {"file": str(file), **asdict(exported)}, lambda console: _show_exported(file, exported, console)

    _run(as_json, work)


@contextmanager
def _writing(file: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(f"{file} cannot be written: {error}") from error


def _known(values: list[str] | None, name: str) -> list[str] | None:
    from typing import get_args

    from agentlightning.rollouts import RolloutMode, RolloutStatus

    allowed = get_args(RolloutStatus if name == "status" else RolloutMode)
    for value in values or ():
        if value not in allowed:
            raise ConfigError(f"--{name} {value!r} is not one of {', '.join(allowed)}")
    return values or None


def _report(progress: Progress, name: str) -> Report:
    """What is told how far a copy is, and begins to tell it on when the copy takes long."""
    start, begun = time.monotonic(), False

    def report(done: int, total: int | None) -> None:
        nonlocal begun
        if not begun and time.monotonic() - start >= QUIET_SECONDS:
            progress.phase(f"{name} rollouts", total, done)
            begun = True
        if begun:
            progress.update(done)

    return report


def _show_exported(file: Path, exported: Any, console: Console) -> None:
    from agentlightning.cli.units import show_size

    console.print(
        f"{exported.rollouts:,} rollouts with {exported.spans:,} spans and {exported.resources:,} resources "
        f"in {file}, {show_size(exported.bytes)}",
        markup=False,
    )


def import_(
    file: Annotated[Path, typer.Argument(help="Written by `agl store export`.")],
    store: Store = None,
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Add what a file holds to a store.

    What the store has already stays as it is, so this can be repeated. Unfinished rollouts wait again. Of a file that
    is cut off or damaged, what comes before that place is imported.
    """

    async def work(output: Output, progress: Progress) -> tuple[dict[str, Any], Callable[[Console], None]]:
        from agentlightning.store.export import import_store
        from agentlightning.store.export.copy import check_source

        check_source(file)  # before a database is made for it
        async with _opened(store, server, token, create=True) as opened:
            imported = await import_store(opened, file, report=_report(progress, "importing"))
        known = f"; {imported.known:,} were there already" if imported.known else ""
        text = f"{imported.rollouts:,} rollouts and {imported.resources:,} resources imported from {file}{known}"
        return {"file": str(file), **asdict(imported)}, lambda console: console.print(text, markup=False)

    _run(as_json, work)
