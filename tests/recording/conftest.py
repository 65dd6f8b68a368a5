from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.recording import recorder
from agentlightning.store.types import RolloutRecord
from agentlightning.tracing import outbox


@pytest.fixture(autouse=True)
def _own_counters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Every test records from zero, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGL_STORE", raising=False)
    monkeypatch.setattr(outbox.counters, "_counts", {})
    monkeypatch.setattr(outbox.counters, "_warned", set())
    monkeypatch.setattr(outbox.counters, "_problem", "")
    yield
    agl.configure_recording()
    for each in recorder._recorders.values():
        each.close(0.2)
    recorder._recorders.clear()


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[[], list[RolloutRecord]]:
    """What the store in this directory holds, once everything is written."""

    def read(place: str | Path | agl.LightningStore | None = None) -> list[RolloutRecord]:
        assert agl.flush_recording()
        return asyncio.run(records(place))

    return read


async def records(place: str | Path | agl.LightningStore | None = None) -> list[RolloutRecord]:
    store = place if isinstance(place, agl.LightningStore) else agl.LightningStore(place)
    try:
        return await store.read_records([rollout.rollout_id for rollout in await store.query_rollouts()])
    finally:
        if store is not place:
            await store.close()
