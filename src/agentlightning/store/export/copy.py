"""Copies between a store and a file, batch by batch, so that memory does not grow with the store."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from agentlightning.errors import ConfigError, ConflictError, DatasetError, NotFoundError
from agentlightning.rollouts import RolloutMode, RolloutStatus
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.export.jsonl import Item, JsonlWriter, ResourcesRecord, read_items
from agentlightning.store.paging import PageSizer, read_pages
from agentlightning.store.types import RolloutRecord

if TYPE_CHECKING:
    from agentlightning.store.export.parquet import ParquetWriter

    Writer = JsonlWriter | ParquetWriter

T = TypeVar("T")

BATCH_BYTES: Final = 4 << 20
"""Approximate size of a batch; only a single larger rollout exceeds it."""
BATCH_ROLLOUTS: Final = 256
FORMATS: Final = (".jsonl", ".jsonl.gz", ".parquet")

Report = Callable[[int, int | None], None]
"""Called with the number of rollouts done and the total, None if unknown."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of `export_store`."""

    resources: int
    rollouts: int
    spans: int
    bytes: int
    """Size of the file."""
    keys_left_out: int = 0
    """Resources whose API key was left out: files are passed on."""


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of `import_store`."""

    resources: int
    rollouts: int
    """New rollouts."""
    known: int
    """Rollouts that the store already had; they are unchanged."""


def _suffix(path: Path) -> str:
    suffix = next((suffix for suffix in FORMATS if path.name.lower().endswith(suffix)), None)
    if suffix is None:
        raise ConfigError(f"{path}: the name of an export ends in {', '.join(FORMATS)}")
    return suffix


async def _in_thread(run: Callable[..., T], *arguments: Any) -> T:
    """Call `run` in a thread. Waits for it even when cancelled, as it uses the file."""
    work = asyncio.ensure_future(asyncio.to_thread(run, *arguments))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise


# -- export ----------------------------------------------------------------------------------------------------------


async def export_store(
    store: LightningStoreBase,
    path: str | Path,
    *,
    status_in: Sequence[RolloutStatus] | None = None,
    mode_in: Sequence[RolloutMode] | None = None,
    queue_in: Sequence[str] | None = None,
    overwrite: bool = False,
    report: Report | None = None,
) -> Exported:
    """Write the resources of a store and the rollouts that match all filters to a file: `.jsonl`, `.jsonl.gz` or
    `.parquet`.

    Each rollout is exported as of one moment; the store may be written to meanwhile. The file appears under its name
    when it is complete. Raises ConfigError for another suffix or an existing file, MissingExtraError if Parquet needs
    pyarrow, ConflictError if the store is pruned meanwhile, OSError if the file cannot be written.
    """
    target = Path(path)
    suffix = _suffix(target)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    filters: dict[str, Any] = {"status_in": status_in, "mode_in": mode_in, "queue_in": queue_in}
    try:
        with closing(await _in_thread(_open_writer, target, part, suffix, overwrite)) as writer:
            resources, keys = await _export_resources(store, writer)
            rollouts, spans = await _export_rollouts(store, writer, filters, report)
            size = await _in_thread(_finish, writer, part, target)
    finally:
        part.unlink(missing_ok=True)
    return Exported(resources, rollouts, spans, size, keys)


def _open_writer(target: Path, part: Path, suffix: str, overwrite: bool) -> Writer:
    if target.exists() and not overwrite:
        raise ConfigError(f"{target} exists; use another name, or allow overwriting")
    target.parent.mkdir(parents=True, exist_ok=True)
    if suffix == ".parquet":
        from agentlightning.store.export.parquet import ParquetWriter

        return ParquetWriter(part)
    return JsonlWriter(part, compress=suffix.endswith(".gz"))


def _finish(writer: Writer, part: Path, target: Path) -> int:
    """Returns the size of the file."""
    writer.finish()
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    return part.replace(target).stat().st_size


async def _export_resources(store: LightningStoreBase, writer: Writer) -> tuple[int, int]:
    """Export in the order of publication, which is that of the versions, not that in which the store lists them. How
    many, and how many had an API key, which stays behind."""
    records: list[ResourcesRecord] = []
    keys = 0
    for update in await store.query_resources(sort_by="version"):
        secret = [name for name, each in update.resources.items() if getattr(each, "api_key", None)]
        public = {name: update.resources[name].model_copy(update={"api_key": None}) for name in secret}
        records.append(ResourcesRecord(update.resources_id, {**update.resources, **public}))
        keys += len(secret)
    await _in_thread(writer.write, records)
    return len(records), keys


async def _export_rollouts(
    store: LightningStoreBase, writer: Writer, filters: dict[str, Any], report: Report | None
) -> tuple[int, int]:
    """(rollouts, spans)."""
    total = await store.count_rollouts(**filters)
    sizer = PageSizer(BATCH_BYTES, BATCH_ROLLOUTS)
    rollouts = spans = 0
    try:
        async for page in read_pages(store.query_rollouts, {**filters, "limit": -1}, "rollout_id", sizer):
            if not page:
                break
            records = await store.read_records([rollout.rollout_id for rollout in page])
            sizer.record(len(records), await _in_thread(writer.write, records))
            rollouts += len(records)
            spans += sum(len(record.spans) for record in records)
            if report is not None:
                report(rollouts, max(total, rollouts))
    except NotFoundError as error:
        raise ConflictError(
            f"rollouts were removed during the export ({error}); export again while the store is not pruned"
        ) from error
    return rollouts, spans


# -- import ----------------------------------------------------------------------------------------------------------


async def import_store(store: LightningStoreBase, path: str | Path, *, report: Report | None = None) -> Imported:
    """Add what an export in lines of JSON holds to a store: resources by their ids, then rollouts, in order.

    What the store already has is unchanged, so that an import can be repeated. Unfinished rollouts are queued again.
    Raises DatasetError, with the line, if the file is not an export, damaged or truncated; what comes before has
    then been imported, and the import of a complete file adds the rest. Raises ConflictError if the store has other
    resources with the same id; no rollout has been added then.
    """
    done = Imported(0, 0, 0)
    source = Path(path)
    check_source(source)
    with closing(_batches(source)) as batches:
        try:
            while batch := await _in_thread(partial(next, batches, list[Item]())):
                done = await _add(store, batch, done)
                if report is not None:
                    report(done.rollouts + done.known, None)
        except DatasetError as error:
            there = (
                f"What comes before is in the store ({done.rollouts + done.known:,} rollouts); importing a complete "
                "file adds the rest and repeats nothing"
            )
            raise DatasetError(f"{error}. {'Nothing was imported' if done == Imported(0, 0, 0) else there}") from error
    return done


def check_source(path: Path) -> None:
    """Raises ConfigError or DatasetError for a file that cannot be imported."""
    if _suffix(path) == ".parquet":
        raise ConfigError(f"{path}: Parquet is for other programs to read; import an export in .jsonl or .jsonl.gz")
    if not path.is_file():
        raise DatasetError(f"there is no file {str(path)!r}; give the path of an export")


def _batches(path: Path) -> Generator[list[Item]]:
    """The items of a file, those before a damaged one too."""
    batch: list[Item] = []
    size, damage = 0, None
    try:
        for item, bytes_of_item in read_items(path):
            batch.append(item)
            size += bytes_of_item
            if size >= BATCH_BYTES or len(batch) >= BATCH_ROLLOUTS:
                yield batch
                batch, size = [], 0
    except DatasetError as error:
        damage = error
    if batch:
        yield batch
    if damage is not None:
        raise damage


async def _add(store: LightningStoreBase, batch: Sequence[Item], done: Imported) -> Imported:
    records: list[RolloutRecord] = []
    for item in batch:
        if isinstance(item, ResourcesRecord):
            await store.add_resources(item.resources, resources_id=item.resources_id)
        else:
            records.append(item)
    new = await store.add_records(records) if records else 0
    resources = done.resources + len(batch) - len(records)
    return Imported(resources, done.rollouts + new, done.known + len(records) - new)
