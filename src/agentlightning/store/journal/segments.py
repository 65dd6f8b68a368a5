"""The files of a journal, as bytes: records written one after the other, and read when their process is gone.

One process writes each file and holds a lock on it while it lives; a folder may be shared by several. What a record
means is the business of `journal`. A file whose records are in the store is written over: a page that is in memory
already takes a record in a third of the time of a new one. It begins with a number that changes then, and that the sums
of its records depend on, so that what is left of former records is known as such.
"""

from __future__ import annotations

import errno
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

try:
    import fcntl
except ImportError:  # Windows: there a file that is open cannot be removed by another process
    fcntl = None

SEGMENT_BYTES: Final = 2 * 1024 * 1024
"""A file that is longer is followed by another."""
MAX_SPARE: Final = 4
"""Files that are kept to be written over."""
_START: Final = struct.Struct("<8sIQ")
"""Of a file: what it is, its number, and since when it holds these records (nanoseconds since the epoch)."""
_MARK: Final = b"AGLcalls"
_HEAD: Final = struct.Struct("<II")
"""Of a record: its length, and its CRC-32 begun with the file's number."""
_MAX_TRIES: Final = 1000
"""Names that are tried for a new file: another container that shares the folder may have our process id."""


class Segments:
    """The files that begin with `stem`: ours, and those others have left behind."""

    def __init__(self, stem: Path) -> None:
        self._stem = stem
        self._number = 0
        self._segments: deque[_Segment] = deque()
        self._spare: list[_Segment] = []

    def append(self, record: bytes) -> None:
        """Raises StoreFullError where the disk has no room, StoreError where it cannot be written."""
        segment = self._segments[-1] if self._segments else None
        if segment is None or segment.size > SEGMENT_BYTES:
            segment = self._begin()
        try:
            segment.append(record)
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
                if segment.records == 0:
                    self._clear(segment)
            except OSError as error:
                failed.append(f"the journal {segment.path} cannot be cleared: {error.strerror}")
        if failed:
            raise StoreError("; ".join(failed))

    def _clear(self, segment: _Segment) -> None:
        """Its records are in the store."""
        if len(self._segments) > 1:
            self._segments.popleft()
            if len(self._spare) >= MAX_SPARE:
                return segment.remove()
            self._spare.append(segment)
        segment.empty()

    def close(self, keep: bool = False) -> None:
        """Remove the files; `keep` those that hold what is not written."""
        while self._segments or self._spare:
            segment = self._segments.popleft() if self._segments else self._spare.pop()
            segment.close() if keep and segment.records else segment.remove()

    def left_behind(self) -> Generator[tuple[Path, list[bytes]]]:
        """Files of processes that are gone, with their records, the oldest first; each is removed when the next is
        asked for, and left where it is when that never happens."""
        found: list[tuple[int, _Segment, list[bytes]]] = []
        for path in self._stem.parent.glob(f"{glob.escape(self._stem.name)}-*"):
            try:
                segment = _Segment(path, os.O_RDWR)
            except (BlockingIOError, FileNotFoundError):  # its process lives, or somebody else has just read it
                continue
            data = path.read_bytes()
            found.append((_since(data), segment, list(_records(data))))
        found.sort(key=lambda each: each[0])
        left = deque(segment for _, segment, _ in found)
        try:
            for _, segment, records in found:
                yield segment.path, records
                left.popleft().remove()
        finally:
            for segment in left:
                segment.close()

    def _begin(self) -> _Segment:
        if not self._spare:
            segment = self._make()
        else:
            segment = self._spare[-1]
            try:
                segment.empty()  # again: since now it holds what comes
            except OSError as error:
                raise StoreError(f"the journal {segment.path} cannot be written: {error.strerror}") from error
            self._spare.pop()
        self._segments.append(segment)
        return segment

    def _make(self) -> _Segment:
        for _ in range(_MAX_TRIES):
            self._number += 1
            path = self._stem.with_name(f"{self._stem.name}-{os.getpid()}-{self._number}")
            try:
                segment = _Segment(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            except (FileExistsError, BlockingIOError):  # another's
                continue
            except OSError as error:
                raise StoreError(f"the journal {path} cannot be made: {error.strerror}") from error
            if segment.is_there():
                return segment
            segment.close()  # it was taken for one left behind, before it was locked
        raise StoreError(f"no journal can be made beside {self._stem}: {_MAX_TRIES} names are taken")


class _Segment:
    """One file, locked while its process lives."""

    def __init__(self, path: Path, flags: int) -> None:
        self.path = path
        self.size = 0
        """Bytes in use; 0: nothing was written yet."""
        self.records = 0
        """Those in it that are not written to the store."""
        self._number = secrets.randbits(32) | 1
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

    def append(self, record: bytes) -> None:
        if self.size == 0:
            self._start()
        self._write(_HEAD.pack(len(record), zlib.crc32(record, self._number)) + record, self.size)
        self.size += _HEAD.size + len(record)
        self.records += 1

    def empty(self) -> None:
        """What is in it counts no more."""
        self._number = (self._number + 2) % 2**32
        self._start()

    def _start(self) -> None:
        self._write(_START.pack(_MARK, self._number, time.time_ns()), 0)
        self.size = _START.size

    def _write(self, data: bytes, place: int) -> None:
        # Where it fails, what is there of the record does not fit its sum, and is written over by the next.
        done = 0
        while done < len(data):
            done += _write_at(self._file, data[done:] if done else data, place + done)

    def close(self) -> None:
        os.close(self._file)

    def remove(self) -> None:
        try:
            self.path.unlink(missing_ok=True)
        finally:
            os.close(self._file)


def _write_at(file: int, data: bytes, place: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(file, data, place)
    os.lseek(file, place, os.SEEK_SET)
    return os.write(file, data)


def _since(data: bytes) -> int:
    return _START.unpack_from(data)[2] if data.startswith(_MARK) and len(data) >= _START.size else 0


def _records(data: bytes) -> Iterator[bytes]:
    """Up to the first that is not whole."""
    if not data.startswith(_MARK) or len(data) < _START.size:
        return
    _, number, _ = _START.unpack_from(data)
    start = _START.size
    while start + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, start)
        record = data[start + _HEAD.size : start + _HEAD.size + length]
        if len(record) != length or zlib.crc32(record, number) != checksum:
            return
        yield record
        start += _HEAD.size + length
