"""Every kind of store the contract is tested on. A kind is a function in KINDS: it opens a store and closes it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreBase
from agentlightning.store.http.client import LightningStoreClient

Opened = AsyncIterator[LightningStoreBase]


@asynccontextmanager
async def memory(request: pytest.FixtureRequest) -> Opened:
    store = InMemoryLightningStore()
    yield store
    await store.close()


@asynccontextmanager
async def file(request: pytest.FixtureRequest) -> Opened:
    folder: Path = request.getfixturevalue("tmp_path")
    store = LightningStore(folder / "store.db")
    yield store
    await store.close()


@asynccontextmanager
async def postgres(request: pytest.FixtureRequest) -> Opened:
    url: str = request.getfixturevalue("postgres_store_url")
    store = LightningStore(url)
    yield store
    await store.close()


@asynccontextmanager
async def http(request: pytest.FixtureRequest) -> Opened:
    store = InMemoryLightningStore()
    client = LightningStoreClient(request.getfixturevalue("hub").serve(store), patience=5.0)
    yield client
    await client.close()
    await store.close()


KINDS: dict[str, Callable[[pytest.FixtureRequest], AbstractAsyncContextManager[LightningStoreBase]]] = {
    "memory": memory,
    "file": file,
    "postgres": postgres,
    "http": http,
}


TIMED = ("test_signs_of_life_keep_an_attempt_alive", "test_an_attempt_that_is_said_to_run_is_watched_from_then_on")
"""These wait for seconds while the store behind a client does what it does without one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name.startswith(TIMED) and "[http-" in item.name:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=list(KINDS))
async def store(request: pytest.FixtureRequest) -> AsyncIterator[LightningStoreBase]:
    async with KINDS[request.param](request) as store:
        yield store
