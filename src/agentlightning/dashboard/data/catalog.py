"""The runs and stores that a dashboard shows, by name. A store is opened when it is first looked at."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from agentlightning.dashboard.data.run_data import RunData, Source
from agentlightning.dashboard.data.run_files import RunFiles
from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.store import LightningStore
from agentlightning.store.base import LightningStoreBase
from agentlightning.training.persistence.run_dir import holds_run

STORE: Final = "store"
"""The name of a store that is shown by itself."""
MOST_OPEN: Final = 16
"""Databases that are open at the same time."""


class Catalog:
    """Finds runs below `roots`, and those of `directories`. `store` is shown by itself, unless it belongs to the one
    run of `directories` (`owns_store`): then it is that run's, which this process has open. `writable`: requests with
    the token may change stores."""

    def __init__(
        self,
        store: LightningStoreBase | None = None,
        *,
        directories: Iterable[Path] = (),
        roots: Iterable[Path] = (),
        owns_store: bool = False,
        writable: bool = False,
    ) -> None:
        self._store, self.writable = store, writable
        self._directories = [path.resolve() for path in directories]
        self._roots = [path.resolve() for path in roots]
        self._owns_store = owns_store
        self._files: dict[Path, RunFiles] = {}
        self._opened: dict[Path, LightningStoreBase] = {}
        self._data: dict[str, RunData] = {}

    def sources(self) -> list[Source]:
        """All of them, the newest run first."""
        found = [Source(name, self._files_of(path)) for name, path in self._runs().items()]
        found.sort(key=lambda each: -_changed(each.run().path))
        alone = self._store is not None and not self._owns_store
        return [*found, Source(STORE)] if alone else found

    def source(self, name: str) -> Source:
        """Raises NotFoundError."""
        if name == STORE and self._store is not None and not self._owns_store:
            return Source(STORE)
        path = self._runs().get(name)
        if path is None:
            raise NotFoundError(f"there is no run {name!r} here; /dashboard/api/runs lists all")
        return Source(name, self._files_of(path))

    async def run(self, name: str) -> RunData:
        """Raises NotFoundError for an unknown name, and ConfigError for a run whose store is not known."""
        source = self.source(name)
        store, known = await self._store_of(source), self._data.get(name)
        if known is None or known.store is not store or known.files is not source.files:
            shares = source.files is not None and not (source.files.path / "store.db").exists()
            known = self._data[name] = RunData(source, store, shares)
        return known

    async def _store_of(self, source: Source) -> LightningStoreBase:
        if source.files is None or (self._owns_store and source.files.path in self._directories):
            assert self._store is not None
            return self._store
        path = source.files.path / "store.db"
        if path.exists():
            return await self._open(path)
        if self._store is not None:
            return self._store
        raise ConfigError(
            f"the rollouts of {source.name} are in another store, which the run was given; open that as well: "
            "agl dashboard DATABASE"
        )

    async def _open(self, path: Path) -> LightningStoreBase:
        store = self._opened.pop(path, None) or LightningStore(path)
        self._opened[path] = store  # the one used last comes last
        if len(self._opened) > MOST_OPEN:
            await self._opened.pop(next(iter(self._opened))).close()
        return store

    async def close(self) -> None:
        """Stop reading, and close the stores that were opened here."""
        for run in self._data.values():
            await run.attempts.close()
        while self._opened:
            await self._opened.popitem()[1].close()

    def _files_of(self, path: Path) -> RunFiles:
        return self._files.setdefault(path, RunFiles(path))

    def _runs(self) -> dict[str, Path]:
        """The run directories by name, which is that of the directory."""
        paths = [*self._directories]
        for root in self._roots:
            paths += sorted(each.parent for pattern in ("state.json", "*/state.json") for each in root.glob(pattern))
        found: dict[str, Path] = {}
        for path in dict.fromkeys(paths):
            if holds_run(path):
                name, number = path.name, 2
                while name in found or name == STORE:
                    name, number = f"{path.name}-{number}", number + 1
                found[name] = path
        return found


def _changed(path: Path) -> float:
    try:
        return (path / "state.json").stat().st_mtime
    except OSError:
        return 0.0


def catalog_of_run(directory: Path, store: LightningStoreBase) -> Catalog:
    """A run in this process, which has its store open, and the runs beside it."""
    roots = [directory.resolve().parent]
    return Catalog(store, directories=[directory], roots=roots, owns_store=True, writable=True)
