"""Agents that hang are named while the step still waits for them, with their task and what will end them."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rich.console import Console

from agentlightning.store import LightningStore
from agentlightning.training import watch
from agentlightning.util.progress import Progress


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LightningStore]:
    store = LightningStore(tmp_path / "store.db")
    yield store
    await store.close()


async def said(store: LightningStore, timeout: float, until: str) -> str:
    """What the display of run r1 says, up to some text."""
    out = io.StringIO()
    progress = Progress(Console(file=out, width=200))
    watching = asyncio.create_task(watch.watch_rollouts(store, "r1", progress, timeout, own_store=True))
    try:
        async with asyncio.timeout(10):
            while until not in out.getvalue():  # noqa: ASYNC110  a display has no event
                await asyncio.sleep(0.02)
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    return " ".join(out.getvalue().split())


async def test_a_rollout_that_has_used_half_of_its_time_is_named_with_its_task(store, monkeypatch):
    monkeypatch.setattr(watch, "SECONDS", 0.05)
    await store.start_rollout({"word": "red"}, rollout_id="r1-train-000000-0000-000")
    text = await said(store, 0.2, "hangs")
    assert "warning: rollout r1-train-000000-0000-000 hangs" in text
    assert 'on task {"word":"red"}' in text.replace('": "', '":"')
    assert "and got 0 answers of a model" in text
    assert "it is stopped after 0.2 s (runner.timeout_seconds)" in text
    assert text.count("hangs") == 1, "each is named once"


async def test_three_are_named_and_the_others_are_not(store, monkeypatch):
    monkeypatch.setattr(watch, "SECONDS", 0.05)
    for number in range(5):
        await store.start_rollout({"word": "red"}, rollout_id=f"r1-train-000000-0000-{number:03d}")
    text = await said(store, 0.1, "Further ones are not named")
    assert text.count(" hangs") == watch.MOST_NAMED


async def test_one_that_is_within_its_time_or_of_another_run_is_not_named(store, monkeypatch):
    monkeypatch.setattr(watch, "SECONDS", 0.05)
    await store.start_rollout({"word": "red"}, rollout_id="r1-train-000000-0000-000")
    await store.start_rollout({"word": "red"}, rollout_id="r2-train-000000-0000-000")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.4):
            await said(store, 600, "hangs")


async def test_where_more_run_than_are_looked_at_the_oldest_are(store, monkeypatch):
    monkeypatch.setattr(watch, "SECONDS", 0.05)
    monkeypatch.setattr(watch, "MOST_RUNNING", 1)
    for number in range(3):
        await store.start_rollout({"word": "red"}, rollout_id=f"r1-train-000000-0000-{number:03d}")
    text = await said(store, 0.1, "hangs")
    assert "r1-train-000000-0000-000 hangs" in text
