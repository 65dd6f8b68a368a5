"""Versions of weights at a URL, through fsspec with its errors as ours, and what a version consists of.

URL/000007/manifest.json      written last: a version without it does not exist
URL/000007/NAME               a file of a full version, or one that has no difference
URL/000007/NAME.xor           the differences of the parts of a file, one behind the other
URL/wanted/HOST.json          a host that needs a full version

What is stored of a file is all of it, or its difference from another of the same size: XOR, a part of CHUNK bytes after
the other, compressed by zstd. Most bytes of weights in bfloat16 do not change in a step, so the difference is mostly
zeros. Each part of the result is checked against its digest; an unchanged part has no difference. Works on bytes: it
needs no torch, and the result is the same file, byte for byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal, Self

import fsspec  # pyright: ignore[reportMissingImports]
import numpy as np
import zstandard  # pyright: ignore[reportMissingImports]
from fsspec.utils import get_protocol  # pyright: ignore[reportMissingImports]
from pydantic import AfterValidator, NonNegativeInt, ValidationError, model_validator

from agentlightning.errors import ConfigError, PolicyError
from agentlightning.util.settings import Section

FORMAT: Final = 2
"""Of manifests; a host refuses a newer one."""
MANIFEST: Final = "manifest.json"
WANTED: Final = "wanted"
LEVEL: Final = 1
CHUNK: Final = 32 << 20


def _checked_name(name: str) -> str:
    """A file name is a path below the directory that a version is written to, whoever wrote the manifest."""
    parts = PurePosixPath(name).parts
    if name != "/".join(parts) or not parts or {"/", ".."} & set(parts) or any(each in name for each in "\\:\0"):
        raise ValueError(f"{name!r} is no path below the directory of a version")
    return name


class Part(Section):
    """The bytes of a file from `begin` to `end`."""

    name: str
    begin: NonNegativeInt
    end: NonNegativeInt
    digest: str
    """BLAKE2b of these bytes in the new version, 16 bytes."""
    stored: NonNegativeInt = 0
    """Bytes of the compressed difference; 0: there is none."""


class FileEntry(Section):
    """A file of the directory."""

    name: Annotated[str, AfterValidator(_checked_name)]
    size: NonNegativeInt
    kind: Literal["whole", "same", "xor"]
    """whole: stored as it is; same: that of the base, in format 1; xor: its difference from that of the base."""
    digest: str = ""
    """Of the whole file."""
    parts: tuple[Part, ...] = ()

    @property
    def object_name(self) -> str:
        """Of what is stored of it, below the folder of its version."""
        return f"{self.name}.xor" if self.kind == "xor" else self.name

    @property
    def stored(self) -> int:
        """Bytes that are stored of it."""
        return self.size if self.kind == "whole" else sum(part.stored for part in self.parts)

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        ends = (0, *(part.end for part in self.parts))
        if self.kind == "xor" and (
            ends[-1] != self.size or any(p.begin != e for p, e in zip(self.parts, ends, strict=False))
        ):
            raise ValueError(f"the parts of {self.name} do not follow one another from its first byte to its last")
        return self


class Manifest(Section):
    """A version."""

    format: int = FORMAT
    version: NonNegativeInt
    id: str
    """A random name: a version that was published again has another one."""
    base: tuple[int, str] | None = None
    """Version and id that the differences are from; None: a full version."""
    files: tuple[FileEntry, ...]
    stored: int
    """Bytes written for it, without this file."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.base is not None and not 0 <= self.base[0] < self.version:
            raise ValueError(f"version {self.version} is a difference from {self.base[0]}, which is no earlier version")
        names = {file.name for file in self.files}
        if len(names) != len(self.files) or any(str(each) in names for n in names for each in PurePosixPath(n).parents):
            raise ValueError("two of its files have one name, or one of them is a folder of another")
        return self


class DamagedDifferenceError(Exception):
    """A difference, or the file it is applied to, is not what it should be."""


def digest(data: Any) -> str:
    """BLAKE2b of bytes or a NumPy array, 16 bytes."""
    return hashlib.blake2b(memoryview(data), digest_size=16).hexdigest()


def stored_form(file: Path, name: str, base: Path | None) -> tuple[FileEntry, bytes]:
    """The entry of a file, and what is stored of it: its difference from `base`, or all where that has another size."""
    size = file.stat().st_size
    if base is None or not base.exists() or base.stat().st_size != size:
        data = file.read_bytes()
        return FileEntry(name=name, size=size, kind="whole", digest=digest(data)), data
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    old, own = _mapped(base), _mapped(file)
    entries: list[Part] = []
    stored: list[bytes] = []
    for number, begin in enumerate(range(0, size, CHUNK)):
        end = min(begin + CHUNK, size)
        changed = np.bitwise_xor(old[begin:end], own[begin:end])
        stored.append(compressor.compress(changed.tobytes()) if changed.any() else b"")
        checked = digest(own[begin:end])
        entries.append(Part(name=str(number), begin=begin, end=end, digest=checked, stored=len(stored[-1])))
    return FileEntry(name=name, size=size, kind="xor", parts=tuple(entries)), b"".join(stored)


def restore(entry: FileEntry, data: bytes, base: Path | None, target: Path) -> None:
    """Write the file that is stored so. Raises DamagedDifferenceError where it is not what was published."""
    if entry.kind == "whole":
        if digest(data) != entry.digest:
            raise DamagedDifferenceError(f"{entry.name} is not the file that was published")
        target.write_bytes(data)
        return
    if base is None or not base.exists():
        raise DamagedDifferenceError(f"{entry.name}: the version before is not here")
    if base.stat().st_size != entry.size or len(data) != entry.stored:
        raise DamagedDifferenceError(f"{entry.name}: the sizes do not fit")
    unchanged = Part(name="all of it", begin=0, end=entry.size, digest=entry.digest)
    old, decompressor, start = _mapped(base), zstandard.ZstdDecompressor(), 0
    with target.open("wb") as opened:
        for part in (unchanged,) if entry.kind == "same" else entry.parts:
            size = part.end - part.begin
            own: Any = old[part.begin : part.end]
            if part.stored:
                try:
                    # A frame says itself how large it becomes, and the one-shot call would believe it.
                    raw = decompressor.stream_reader(data[start : start + part.stored]).read(size + 1)
                except zstandard.ZstdError as error:
                    raise DamagedDifferenceError(f"{entry.name}: {part.name}: {error}") from error
                start += part.stored
                own = np.bitwise_xor(own, np.frombuffer(raw, np.uint8)) if len(raw) == size else own[:0]
            if digest(own) != part.digest:
                raise DamagedDifferenceError(f"{entry.name}: {part.name} is not what was published")
            opened.write(memoryview(own))


def _mapped(file: Path) -> Any:
    return np.memmap(file, np.uint8, mode="r") if file.stat().st_size else np.zeros(0, np.uint8)


class WeightStoreError(PolicyError):
    """Weights cannot be written to a URL, or read from it."""


OBJECT_STORES: Final = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "memory"})
"""Protocols of stores that need no folders; where one is made in a bucket that does not exist, some make the bucket."""


MOST_MANIFEST: Final = 2**25
"""Bytes of a manifest: so many name 150,000 parts."""


class Bucket:
    """The objects below a URL."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for a URL that nothing here can open."""
        self.url = url
        try:
            self._files: Any
            self._files, self._root = fsspec.url_to_fs(url)
            self._has_folders = get_protocol(url) not in OBJECT_STORES
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{url} cannot be opened: {error}; give file:///DIR, s3://BUCKET/DIR (pip install s3fs), gs://BUCKET/DIR"
                " (pip install gcsfs) or another URL of fsspec"
            ) from error

    def write(self, name: str, data: bytes) -> None:
        """Write an object. Raises WeightStoreError."""
        with self._errors(f"write {name}"):
            if self._has_folders:
                self._files.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(self._path(name), data)

    def read(self, name: str, most: int = MOST_MANIFEST) -> bytes:
        """An object of at most so many bytes. Raises WeightStoreError, also for a larger one."""
        with self._errors(f"read {name}"):
            data = bytes(self._files.cat_file(self._path(name), start=0, end=most + 1))
        if len(data) > most:
            raise WeightStoreError(f"{self.url}/{name} has more than the {most} bytes that it should have")
        return data

    def names(self, folder: str = "") -> list[str]:
        """The last part of the names directly below a folder, sorted; none where there is no such folder."""
        with self._errors(f"list {folder or 'it'}"):
            self._files.invalidate_cache()
            try:
                found: list[str] = self._files.ls(self._path(folder), detail=False)
            except FileNotFoundError:
                return []
            return sorted(each.rstrip("/").rpartition("/")[2] for each in found)

    def remove(self, name: str) -> None:
        """Remove an object, or all below it."""
        with self._errors(f"remove {name}"):
            self._files.rm(self._path(name), recursive=True)

    def versions(self) -> list[int]:
        """The versions that are complete, in order."""
        numbers = [name for name in self.names() if name.isascii() and name.isdigit()]
        return [int(name) for name in numbers if MANIFEST in self.names(name)]

    def manifest(self, version: int) -> Manifest:
        """Raises WeightStoreError for one that is missing, damaged or of a newer format."""
        name = f"{folder_of(version)}/{MANIFEST}"
        body = self.read(name)
        try:
            found = Manifest.model_validate_json(body)
        except ValidationError as error:
            raise WeightStoreError(f"{self.url}/{name} is damaged, and nothing of it was used: {error}") from error
        if found.version != version:
            raise WeightStoreError(f"{self.url}/{name} is damaged: it is that of a version {found.version}")
        if found.format > FORMAT:
            raise WeightStoreError(
                f"{self.url} has versions of format {found.format}, and this host reads up to {FORMAT}; install the"
                " trainer's version of agentlightning here"
            )
        return found

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    @contextmanager
    def _errors(self, what: str) -> Generator[None]:
        try:
            yield
        except Exception as error:
            raise WeightStoreError(
                f"cannot {what} at {self.url}: {type(error).__name__}: {error}; check the address, its permissions and"
                " credentials"
            ) from error


def folder_of(version: int) -> str:
    """The folder of a version below the URL."""
    return f"{version:06d}"
