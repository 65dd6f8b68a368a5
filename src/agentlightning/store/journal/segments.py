"""Segment files of a journal: records with checksums, written by one process and recovered once that is gone.

Each file is written by one process, which holds a lock on it as long as it lives; several processes may share a folder.
The last file is overwritten once its records are all in the store: a page that is in memory takes a record in a third
of the time of a new one. The file header has a generation number that changes then and seeds the checksums of the
records, so that leftovers of the former generation are recognised.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import struct
import time
import zlib
from collections import deque
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Final

from agentlightning.errors import StoreError, StoreFullError

SEGMENT_BYTES: Final = 2 * 1024 * 1024
"""A file that is longer is followed by a new one."""
_FILE_HEADER: Final = struct.Struct("<8sIQ")
"""(magic, generation, when the generation began in nanoseconds since the epoch)"""
_MAGIC: Final = b"AGLcalls"
_RECORD_HEADER: Final = struct.Struct("<II")
"""(length, CRC-32 seeded with the generation)"""
_MAX_NAMES: Final = 1000
"""Names tried for a new file: another container that shares the folder may have the same process id."""


class Segments:
    """The files whose names begin with `stem`: those of this process, and orphaned ones."""

    def __init__(self, stem: Path) -> None:
        self._stem = stem
        self._number = 0
        self._segments: deque[_Segment] = deque()

    def append(self, record: bytes) -> None:
        """Raises StoreFullError where the disk has no room, StoreError where it cannot be written."""
        segment = self._segments[-1] if self._segments else None
        if segment is None or segment.size > SEGMENT_BYTES:
            segment = self._create()
        try:
            segment.append(record)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            kind = StoreFullError if full else StoreError
            raise kind(f"the journal {segment.path} cannot be written: {error.strerror}; make room there") from error

    def written(self, count: int) -> None:
        """The next `count` records are in the store. Raises StoreError if a file cannot be cleared or removed."""
        failed: list[str] = []
        while count:
            segment = self._segments[0]
            done = min(count, segment.records)
            segment.records -= done
            count -= done
            try:
                if segment.records == 0:
                    self._clear(segment)
            except OSError as error:
                failed.append(f"the journal {segment.path} cannot be cleared: {error.strerror}")
        if failed:
            raise StoreError("; ".join(failed))

    def _clear(self, segment: _Segment) -> None:
        """Overwrite the last file, and remove any other, once its records are in the store."""
        if len(self._segments) > 1:
            self._segments.popleft().remove()
        else:
            segment.empty()

    def close(self, keep: bool = False) -> None:
        """Remove the files; with `keep`, only those whose records are all in the store."""
        while self._segments:
            segment = self._segments.popleft()
            segment.close() if keep and segment.records else segment.remove()

    def orphaned(self) -> Generator[tuple[Path, list[bytes]]]:
        """Files of processes that are gone, with their records, the oldest first. Each file is removed when the next
        one is requested, and stays if that never happens."""
        found: list[tuple[int, _Segment, list[bytes]]] = []
        for path in self._stem.parent.glob(f"{glob.escape(self._stem.name)}-*"):
            try:
                segment = _Segment(path, os.O_RDWR)
            except (BlockingIOError, FileNotFoundError):  # its process lives, or another one has just recovered it
                continue
            data = path.read_bytes()
            found.append((_began_at(data), segment, list(_records(data))))
        found.sort(key=lambda each: each[0])
        remaining = deque(segment for _, segment, _ in found)
        try:
            for _, segment, records in found:
                yield segment.path, records
                remaining.popleft().remove()
        finally:
            for segment in remaining:
                segment.close()

    def _create(self) -> _Segment:
        for _ in range(_MAX_NAMES):
            self._number += 1
            path = self._stem.with_name(f"{self._stem.name}-{os.getpid()}-{self._number}")
            try:
                segment = _Segment(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            except (FileExistsError, BlockingIOError):  # of another process
                continue
            except OSError as error:
                raise StoreError(f"the journal {path} cannot be made: {error.strerror}") from error
            if segment.is_linked():
                self._segments.append(segment)
                return segment
            segment.close()  # another process took it for an orphan before it was locked
        raise StoreError(f"no journal can be made beside {self._stem}: {_MAX_NAMES} names are taken")


class _Segment:
    """One file, locked by its process."""

    def __init__(self, path: Path, flags: int) -> None:
        self.path = path
        self.size = 0
        """Bytes in use; 0 before the first write."""
        self.records = 0
        """Records that are not in the store."""
        self._generation = secrets.randbits(32) | 1
        self._file = os.open(path, flags | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise

    def is_linked(self) -> bool:
        """Whether the path still leads to this file."""
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self.path))
        except FileNotFoundError:
            return False

    def append(self, record: bytes) -> None:
        if self.size == 0:
            self._write_header()
        self._write(_RECORD_HEADER.pack(len(record), zlib.crc32(record, self._generation)) + record, self.size)
        self.size += _RECORD_HEADER.size + len(record)
        self.records += 1

    def empty(self) -> None:
        """Begin a new generation: the records are no longer valid."""
        self._generation = (self._generation + 2) % 2**32
        self._write_header()

    def _write_header(self) -> None:
        self._write(_FILE_HEADER.pack(_MAGIC, self._generation, time.time_ns()), 0)
        self.size = _FILE_HEADER.size

    def _write(self, data: bytes, place: int) -> None:
        # After a failure, the partial record does not match its checksum, and is overwritten by the next one.
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:] if done else data, place + done)

    def close(self) -> None:
        os.close(self._file)

    def remove(self) -> None:
        try:
            self.path.unlink(missing_ok=True)
        finally:
            os.close(self._file)


def _began_at(data: bytes) -> int:
    return _FILE_HEADER.unpack_from(data)[2] if data.startswith(_MAGIC) and len(data) >= _FILE_HEADER.size else 0


def _records(data: bytes) -> Iterator[bytes]:
    """The records up to the first invalid one."""
    if not data.startswith(_MAGIC) or len(data) < _FILE_HEADER.size:
        return
    _, generation, _ = _FILE_HEADER.unpack_from(data)
    start = _FILE_HEADER.size
    while start + _RECORD_HEADER.size <= len(data):
        length, checksum = _RECORD_HEADER.unpack_from(data, start)
        record = data[start + _RECORD_HEADER.size : start + _RECORD_HEADER.size + length]
        if len(record) != length or zlib.crc32(record, generation) != checksum:
            return
        yield record
        start += _RECORD_HEADER.size + length
