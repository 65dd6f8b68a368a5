"""Where everything meets: rollouts, attempts, spans, resources. `LightningStore()` opens one."""

from __future__ import annotations

from pathlib import Path

from agentlightning.store.base import UNSET, LightningStoreBase, Unset, Worker

__all__ = ["UNSET", "InMemoryLightningStore", "LightningStore", "LightningStoreBase", "Unset", "Worker"]


def LightningStore(url: str | Path | None = None) -> LightningStoreBase:  # noqa: N802
    """Open a store that is embedded in this process and durable.

    url: None for `.agentlightning/store.db` under the current directory, a path, `sqlite:///PATH`, or `:memory:` for
    one that is gone with the process. Directories are made as needed. Raises ConfigError for a url that is none of
    these, StoreError where the file cannot be opened.
    """
    from agentlightning.store.sql import SqlStore

    return SqlStore(url)


def InMemoryLightningStore() -> LightningStoreBase:  # noqa: N802
    """Open a store that is gone with the process: for tests and quick tries."""
    return LightningStore(":memory:")
