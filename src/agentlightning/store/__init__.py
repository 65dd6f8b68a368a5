"""Where everything meets: rollouts, attempts, spans, resources. `LightningStore()` opens one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentlightning.store.base import UNSET, LightningStoreBase, Unset, Worker

if TYPE_CHECKING:
    from agentlightning.store.http.client import LightningStoreClient

__all__ = [
    "UNSET",
    "InMemoryLightningStore",
    "LightningStore",
    "LightningStoreBase",
    "LightningStoreClient",
    "Unset",
    "Worker",
]


def LightningStore(url: str | Path | None = None) -> LightningStoreBase:  # noqa: N802
    """Open a store that is embedded in this process and durable.

    url: None for `.agentlightning/store.db` under the current directory, a path, `sqlite:///PATH`, or `:memory:` for
    one that is gone with the process. Directories are made as needed. Raises ConfigError for a url that is none of
    these, StoreError where the file cannot be opened.
    """
    from agentlightning.store.sql.store import SqlStore

    return SqlStore(url)


def InMemoryLightningStore() -> LightningStoreBase:  # noqa: N802
    """Open a store that is gone with the process: for tests and quick tries."""
    return LightningStore(":memory:")


def __getattr__(name: str) -> Any:
    if name != "LightningStoreClient":
        raise AttributeError(f"module 'agentlightning.store' has no attribute {name!r}")
    from agentlightning.store.http.client import LightningStoreClient

    return LightningStoreClient
