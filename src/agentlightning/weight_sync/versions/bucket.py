"""Access to a URL through fsspec, with its errors as ours."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Final

from pydantic import ValidationError

from agentlightning.errors import ConfigError, MissingExtraError, PolicyError
from agentlightning.weight_sync.versions.manifest import FORMAT, MANIFEST, Manifest


class WeightStoreError(PolicyError):
    """Weights cannot be written to a URL, or read from it."""


def require_packages() -> None:
    """Raises MissingExtraError."""
    for package in ("fsspec", "zstandard", "numpy"):
        if find_spec(package) is None:
            raise MissingExtraError(package, "weights")


OBJECT_STORES: Final = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "memory"})
"""Protocols of stores that need no folders; where one is made in a bucket that does not exist, some make the bucket."""


MOST_MANIFEST: Final = 2**25
"""Bytes of a manifest: so many name 150,000 tensors."""


class Bucket:
    """The objects below a URL."""

    def __init__(self, url: str) -> None:
        """Raises MissingExtraError, and ConfigError for a URL that nothing here can open."""
        require_packages()
        import fsspec

        self.url = url
        try:
            self._files: Any
            self._files, self._root = fsspec.url_to_fs(url)
            self._has_folders = OBJECT_STORES.isdisjoint(_protocols(self._files))
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

    def read(self, name: str, begin: int | None = None, end: int | None = None) -> bytes:
        """An object, or a part of it. Raises WeightStoreError."""
        with self._errors(f"read {name}"):
            return bytes(self._files.cat_file(self._path(name), start=begin, end=end))

    def read_at_most(self, name: str, size: int) -> bytes:
        """An object of at most so many bytes. Raises WeightStoreError for a larger one."""
        data = self.read(name, 0, size + 1)
        if len(data) > size:
            raise WeightStoreError(f"{self.url}/{name} has more than the {size} bytes that it should have")
        return data

    def exists(self, name: str) -> bool:
        with self._errors(f"look for {name}"):
            self._files.invalidate_cache()
            return bool(self._files.exists(self._path(name)))

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
        return [int(name) for name in numbers if self.exists(f"{name}/{MANIFEST}")]

    def manifest(self, version: int) -> Manifest:
        """Raises WeightStoreError for one that is missing, damaged or of a newer format."""
        name = f"{folder_of(version)}/{MANIFEST}"
        body = self.read_at_most(name, MOST_MANIFEST)
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
        except (PolicyError, ConfigError):
            raise
        except Exception as error:
            raise WeightStoreError(
                f"cannot {what} at {self.url}: {type(error).__name__}: {error}; check the address, its permissions and"
                " credentials"
            ) from error


def _protocols(files: Any) -> tuple[str, ...]:
    found: str | tuple[str, ...] = files.protocol
    return (found,) if isinstance(found, str) else tuple(found)


def folder_of(version: int) -> str:
    """The folder of a version below the URL."""
    return f"{version:06d}"
