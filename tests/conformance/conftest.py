"""Every kind of store the contract is tested on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreBase


@pytest.fixture(params=["memory", "file"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LightningStoreBase]:
    store = InMemoryLightningStore() if request.param == "memory" else LightningStore(tmp_path / "store.db")
    yield store
    await store.close()
