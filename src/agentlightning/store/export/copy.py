"""Copying between a store and a file, piece by piece: what is held in memory does not grow with the store."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from agentlightning.errors import ConfigError, ConflictError, DatasetError, NotFoundError
from agentlightning.rollouts import RolloutMode, RolloutStatus
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.export.schema import Exported, Imported, Item, Reader, ResourcesRecord, Writer
from agentlightning.store.types import RolloutRecord

T = TypeVar("T")

PIECE_BYTES: Final = 4 << 20
"""What is read or added at once, about; more only where one rollout is larger."""
PIECE_ROLLOUTS: Final = 256
FORMATS: Final = (".jsonl", ".jsonl.gz", ".parquet")

Report = Callable[[int, int | None], None]
"""Is told how many rollouts are done, and of how many; None where that is not known."""


def _ending(path: Path) -> str:
    ending = next((ending for ending in FORMATS if path.name.lower().endswith(ending)), None)
    if ending is None:
        raise ConfigError(f"{path}: an export is a file that ends in {', '.join(FORMATS)}")
    return ending


async def _aside(run: Callable[..., T], *arguments: Any) -> T:
    """`run` in another thread. Does not return before it has, even when cancelled: the file is still in use."""
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
    """Write the resources of a store and its rollouts, those that fit every filter given, to a file: `.jsonl`,
    `.jsonl.gz` or `.parquet`.

    Each rollout is exported as it is at one moment; others may write to the store meanwhile. The file appears under its
    name when it is whole. Raises ConfigError for another ending or a file that exists, MissingExtraError where Parquet
    needs pyarrow, ConflictError where the store is pruned meanwhile, OSError where the file cannot be written.
    """
    target = _target(path, overwrite)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    filters: dict[str, Any] = {"status_in": status_in, "mode_in": mode_in, "queue_in": queue_in}
    try:
        writer = await _aside(_open_writer, part, _ending(target))
        try:
            resources = await _export_resources(store, writer)
            rollouts, spans = await _export_rollouts(store, writer, filters, report)
        except BaseException:
            writer.abandon()
            raise
        size = await _aside(_finish, writer, part, target)
    finally:
        part.unlink(missing_ok=True)
    return Exported(resources, rollouts, spans, size)


def _target(path: str | Path, overwrite: bool) -> Path:
    target = Path(path)
    _ending(target)
    if target.exists() and not overwrite:
        raise ConfigError(f"{target} exists; give another name, or allow it to be overwritten")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _open_writer(path: Path, ending: str) -> Writer:
    if ending == ".parquet":
        from agentlightning.store.export.parquet import ParquetWriter

        return ParquetWriter(path)
    from agentlightning.store.export.jsonl import JsonlWriter

    return JsonlWriter(path, compress=ending.endswith(".gz"))


def _finish(writer: Writer, part: Path, target: Path) -> int:
    """Returns the size of the file."""
    writer.finish()
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    return part.replace(target).stat().st_size


async def _export_resources(store: LightningStoreBase, writer: Writer) -> int:
    """In order of publication, which is that of the versions: of what was updated, the store keeps the place."""
    versions: list[tuple[int, str]] = []
    after: str | None = None
    while page := await store.query_resources(after=after, limit=PIECE_ROLLOUTS):
        versions += [(update.version, update.resources_id) for update in page]
        after = page[-1].resources_id
    count = 0
    for _, resources_id in sorted(versions):
        update = await store.get_resources_by_id(resources_id)
        if update is not None:
            writer.write([ResourcesRecord(update.resources_id, update.resources)])
            count += 1
    return count


async def _export_rollouts(
    store: LightningStoreBase, writer: Writer, filters: dict[str, Any], report: Report | None
) -> tuple[int, int]:
    """(rollouts, spans)."""
    total = await store.count_rollouts(**filters)
    piece = _PieceSize()
    rollouts = spans = 0
    after: str | None = None
    while True:
        try:
            page = await store.query_rollouts(**filters, after=after, limit=piece.rollouts)
            records = await store.read_records([rollout.rollout_id for rollout in page]) if page else []
        except NotFoundError as error:
            raise ConflictError(
                f"rollouts were removed while they were being exported ({error}); export again while nobody prunes"
            ) from error
        if not page:
            return rollouts, spans
        piece.learn(await _aside(writer.write, records), len(records))
        after = page[-1].rollout_id
        rollouts += len(records)
        spans += sum(len(record.spans) for record in records)
        if report is not None:
            report(rollouts, max(total, rollouts))


class _PieceSize:
    """How many rollouts to read at once, from how large they have been so far."""

    def __init__(self) -> None:
        self.rollouts = 16

    def learn(self, size: int, rollouts: int) -> None:
        fitting = PIECE_BYTES * rollouts // max(size, 1)
        self.rollouts = max(1, min(fitting, 2 * self.rollouts, PIECE_ROLLOUTS))


# -- import ----------------------------------------------------------------------------------------------------------


async def import_store(store: LightningStoreBase, path: str | Path, *, report: Report | None = None) -> Imported:
    """Add what an export holds to a store: resources by their ids, then rollouts, in order.

    What the store has already is left as it is, so that an import can be repeated. An unfinished rollout waits again.
    Raises DatasetError, naming the line or the row, where the file is no export, damaged or cut off; what came before
    that place has then been imported, and the import of a whole file adds the rest. Raises ConflictError where the
    store has other resources under an id; no rollout has been added then.
    """
    done = _Done()
    with closing(_open_reader(Path(path)).items()) as items:
        while True:
            piece, error = await _aside(_next_piece, items)
            await _add(store, piece, done)
            if error is not None:
                raise DatasetError(f"{error}. {done.so_far()}") from error
            if not piece:
                return Imported(done.resources, done.rollouts, done.known)
            if report is not None:
                report(done.rollouts + done.known, None)


def check_source(path: Path) -> str:
    """The ending of a file to import. ConfigError or DatasetError for one that cannot be."""
    ending = _ending(path)
    if not path.is_file():
        raise DatasetError(f"there is no file {str(path)!r}; give the path of an export")
    return ending


def _open_reader(path: Path) -> Reader:
    ending = check_source(path)
    if ending == ".parquet":
        from agentlightning.store.export.parquet import ParquetReader

        return ParquetReader(path)
    from agentlightning.store.export.jsonl import JsonlReader

    return JsonlReader(path)


@dataclass(slots=True)
class _Done:
    resources: int = 0
    rollouts: int = 0
    known: int = 0

    def so_far(self) -> str:
        found = self.rollouts + self.known
        if not found and not self.resources:
            return "Nothing was imported"
        return (
            f"What comes before is in the store ({found:,} rollouts); "
            "importing a whole file adds the rest and repeats nothing"
        )


def _next_piece(items: Iterator[tuple[Item, int]]) -> tuple[list[Item], DatasetError | None]:
    """(the next items, what is wrong with the one after them)."""
    piece: list[Item] = []
    size = 0
    try:
        while size < PIECE_BYTES and len(piece) < PIECE_ROLLOUTS:
            item, bytes_of_item = next(items)
            piece.append(item)
            size += bytes_of_item
    except StopIteration:
        pass
    except DatasetError as error:
        return piece, error
    return piece, None


async def _add(store: LightningStoreBase, piece: Sequence[Item], done: _Done) -> None:
    records: list[RolloutRecord] = []
    for item in piece:
        if isinstance(item, ResourcesRecord):
            await store.add_resources(item.resources, resources_id=item.resources_id)
            done.resources += 1
        else:
            records.append(item)
    if records:
        new = await store.add_records(records)
        done.rollouts += new
        done.known += len(records) - new
