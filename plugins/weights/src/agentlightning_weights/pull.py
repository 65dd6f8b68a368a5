"""Pulls versions of weights to a directory of this host: by their differences where it has the version before, else
from the last full one.

DIR/version-000007/      a Hugging Face directory, complete as soon as it has this name
DIR/state.json           which version that is
"""

from __future__ import annotations

import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

from agentlightning_weights.bucket import (
    WANTED,
    Bucket,
    DamagedDifferenceError,
    Manifest,
    WeightStoreError,
    folder_of,
    restore,
)

STATE: Final = "state.json"


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull cost, and what it found."""

    version: int
    directory: Path
    bytes: int
    """Read."""
    seconds: float
    steps: int
    """Versions that were applied one after the other; 0: the newest one was here."""


class WeightPuller:
    """Keeps `directory` at the newest version of a URL. Not thread safe; blocks."""

    def __init__(self, url: str, directory: Path, *, host: str | None = None) -> None:
        """Raises as `Bucket`."""
        self.bucket = Bucket(url)
        self.directory = directory.absolute()
        self._host = host or socket.gethostname()

    @property
    def current(self) -> tuple[int, str] | None:
        """Version and id of what is here; None: nothing."""
        try:
            state = orjson.loads((self.directory / STATE).read_bytes())
            version, name = int(state["version"]), str(state["id"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return (version, name) if self._place(version).is_dir() else None

    def pull(self) -> Pulled | None:
        """Bring the newest version here; None where none was published. Raises WeightStoreError where it cannot be: a
        damaged version is refused, and a full one asked for, which the next publication is."""
        since = time.monotonic()
        newest, current = max(self.bucket.versions(), default=None), self.current
        if newest is None:
            return None
        try:
            chain = self._chain(newest, current)
            for manifest in chain:
                self._write(manifest)
        except DamagedDifferenceError as error:
            raise WeightStoreError(
                f"version {newest} at {self.bucket.url} is refused: {error}; {self._ask_for_full()}"
            ) from error
        read = sum(entry.stored for manifest in chain for entry in manifest.files)
        return Pulled(newest, self._place(newest), read, time.monotonic() - since, len(chain))

    def _ask_for_full(self) -> str:
        """Says what comes of it."""
        try:
            self.bucket.write(f"{WANTED}/{self._host}.json", orjson.dumps({"since": time.time()}))
        except WeightStoreError as error:
            return f"wait for the next full version, which this host could not ask for: {error}"
        return "a full version was asked for, which the next publication is"

    def _chain(self, version: int, current: tuple[int, str] | None) -> list[Manifest]:
        """What leads to a version: from what is here, else from a full one. Raises DamagedDifferenceError for a
        version that is a difference from another than what is there now."""
        chain: list[Manifest] = []
        manifest = self.bucket.manifest(version)
        while (manifest.version, manifest.id) != current:
            chain.append(manifest)
            if manifest.base is None:
                break
            before = self.bucket.manifest(manifest.base[0])
            if before.id != manifest.base[1]:
                raise DamagedDifferenceError(
                    f"version {manifest.version} is a difference from a version {before.version} that was published"
                    " again since"
                )
            manifest = before
        return chain[::-1]

    def _write(self, manifest: Manifest) -> None:
        place, folder = self._place(manifest.version), folder_of(manifest.version)
        beside = place.with_name(f".{place.name}")
        shutil.rmtree(beside, ignore_errors=True)
        try:
            for entry in manifest.files:
                target = beside / entry.name
                target.parent.mkdir(parents=True, exist_ok=True)
                # Some stores refuse a range of an empty object.
                data = self.bucket.read(f"{folder}/{entry.object_name}", entry.stored) if entry.stored else b""
                restore(entry, data, manifest.base and self._place(manifest.base[0]) / entry.name, target)
            shutil.rmtree(place, ignore_errors=True)
            beside.rename(place)
            state = self.directory / f".{STATE}"
            state.write_text(manifest.model_dump_json(include={"version", "id"}))
            state.replace(self.directory / STATE)
        except OSError as error:
            raise WeightStoreError(f"cannot write weights to {self.directory}: {error}; free space there") from error
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        self._prune(manifest.version)

    def _prune(self, newest: int) -> None:
        """Keep the newest, and the one before it, which a server may still be reading."""
        places = sorted(self.directory.glob("version-*"))
        for place in [each for each in places if each != self._place(newest)][:-1]:
            shutil.rmtree(place, ignore_errors=True)

    def _place(self, version: int) -> Path:
        return self.directory / f"version-{version:06d}"
