"""The files of a journal, as bytes: records appended to one after the other, and read when their process is gone.

One process writes each file and holds a lock on it while it lives; a folder may be shared by several. What a record
means is the business of `journal`.
"""

from __future__ import annotations

import errno
import glob
import os
import struct
import zlib
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from agentlightning.errors import StoreError, StoreFullError

try:
    import fcntl
except ImportError:  # Windows: there a file that is open cannot be removed by another process
    fcntl = None

SEGMENT_BYTES: Final = 16 * 1024 * 1024
"""A file that is longer is followed by another."""
_HEAD: Final = struct.Struct("<II")
"""Of a record: its length and its CRC-32."""
_MAX_TRIES: Final = 1000
"""Names that are tried for a new file: another container that shares the folder may have our process id."""


class Segments:
    """The files that begin with `stem`: ours, and those others have left behind."""

    def __init__(self, stem: Path) -> None:
        self._stem = stem
        self._number = 0
        self._segments: deque[_Segment] = deque()

    def append(self, record: bytes) -> None:
        """Raises StoreFullError where the disk has no room, StoreError where it cannot be written."""
        segment = self._segments[-1] if self._segments else None
        if segment is None or segment.size > SEGMENT_BYTES:
            segment = self._begin()
        try:
            segment.append(_HEAD.pack(len(record), zlib.crc32(record)) + record)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            kind = StoreFullError if full else StoreError
            raise kind(f"the journal {segment.path} cannot be written: {error.strerror}; make room there") from error

    def written(self, count: int) -> None:
        """The next so many records are in the store. Raises StoreError where a file cannot be emptied or removed."""
        failed: list[str] = []
        while count:
            segment = self._segments[0]
            done = min(count, segment.records)
            segment.records -= done
            count -= done
            try:
                if segment.records == 0 and len(self._segments) > 1:
                    self._segments.popleft().remove()
                elif segment.records == 0 and segment.size > SEGMENT_BYTES // 16:
                    segment.empty()
            except OSError as error:
                failed.append(f"the journal {segment.path} cannot be cleared: {error.strerror}")
        if failed:
            raise StoreError("; ".join(failed))

    def close(self, keep: bool = False) -> None:
        """Remove the files; `keep` those that hold what is not written."""
        while self._segments:
            segment = self._segments.popleft()
            segment.close() if keep and segment.records else segment.remove()

    def left_behind(self) -> Generator[tuple[Path, list[bytes]]]:
        """Files of processes that are gone, with their records; each is removed when the next is asked for, and left
        where it is when that never happens."""
        for path in sorted(self._stem.parent.glob(f"{glob.escape(self._stem.name)}-*")):
            try:
                segment = _Segment(path, os.O_RDWR)
            except (BlockingIOError, FileNotFoundError):  # its process lives, or somebody else has just read it
                continue
            try:
                yield path, list(_records(path.read_bytes()))
            except BaseException:
                segment.close()
                raise
            segment.remove()

    def _begin(self) -> _Segment:
        for _ in range(_MAX_TRIES):
            self._number += 1
            path = self._stem.with_name(f"{self._stem.name}-{os.getpid()}-{self._number}")
            try:
                segment = _Segment(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
            except (FileExistsError, BlockingIOError):  # another's
                continue
            except OSError as error:
                raise StoreError(f"the journal {path} cannot be made: {error.strerror}") from error
            if not segment.is_there():  # it was taken for one left behind, before it was locked
                segment.close()
                continue
            self._segments.append(segment)
            return segment
        raise StoreError(f"no journal can be made beside {self._stem}: {_MAX_TRIES} names are taken")


class _Segment:
    """One file, locked while its process lives."""

    def __init__(self, path: Path, flags: int) -> None:
        self.path = path
        self.size = 0
        self.records = 0
        """Those in it that are not written to the store."""
        self._file = os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o600)
        if fcntl is not None:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(self._file)
                raise

    def is_there(self) -> bool:
        """Whether the path still leads to this file."""
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self.path))
        except FileNotFoundError:
            return False

    def append(self, data: bytes) -> None:
        done = 0
        try:
            while done < len(data):
                done += os.write(self._file, data[done:] if done else data)
        except OSError:
            with suppress(OSError):  # what is left of the record does not fit its sum, and ends the file
                os.ftruncate(self._file, self.size)
            raise
        self.size += done
        self.records += 1

    def empty(self) -> None:
        os.ftruncate(self._file, 0)
        self.size = 0

    def close(self) -> None:
        os.close(self._file)

    def remove(self) -> None:
        try:
            self.path.unlink(missing_ok=True)
        finally:
            os.close(self._file)


def _records(data: bytes) -> Iterator[bytes]:
    """Up to the first that is not whole."""
    start = 0
    while start + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, start)
        record = data[start + _HEAD.size : start + _HEAD.size + length]
        if len(record) != length or zlib.crc32(record) != checksum:
            return
        yield record
        start += _HEAD.size + length
