"""A process that packs spans beside the gateway: it comes when it is needed, and nothing depends on it."""

import asyncio
import os
import signal

import pytest

from agentlightning.gateway.recording import packer_process as packer_process
from agentlightning.gateway.recording import raw_exchange
from agentlightning.gateway.recording.packer_process import PackerProcess
from agentlightning.span import Span, new_span_id
from agentlightning.store.journal.store import with_journal
from agentlightning.store.sql.store import SqlStore

pytestmark = pytest.mark.integration


async def until(true):
    for _ in range(3000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come true")


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture
def busy(monkeypatch):
    """Any record is many."""
    monkeypatch.setattr(packer_process, "START_RATE", 0.001)
    monkeypatch.setattr(packer_process, "_WINDOW_SECONDS", 0.0)


@pytest.fixture
async def bare(tmp_path):
    store = SqlStore(tmp_path / "store.db")
    yield store
    await store.close()


def span_of(attempted, number):
    return Span(
        attempted.rollout_id,
        attempted.attempt.attempt_id,
        f"call {number}",
        1.0,
        2.0,
        span_id=new_span_id(),
        attributes={"agentlightning.prompt_token_ids": list(range(number)), "agentlightning.response_token_ids": [7]},
    )


async def test_the_packer_runs_under_load_and_packs_the_same_records(bare, tmp_path, busy):
    scribe, attempted = PackerProcess(), await bare.start_rollout({})
    async with with_journal(bare, tmp_path / "store.db", raw_exchange.read, scribe) as store:
        store.append([span_of(attempted, 0)])
        await store.flush()
        await until(lambda: scribe.pid is not None)
        pid = scribe.pid
        for number in range(1, 700):
            store.append([span_of(attempted, number)])
        spans = await store.query_spans(attempted.rollout_id)
        assert scribe.pid == pid
    assert [span.name for span in spans] == [f"call {number}" for number in range(700)]
    assert [len(span.attributes["agentlightning.prompt_token_ids"]) for span in spans] == list(range(700))
    assert gone(pid)


async def test_its_death_costs_nothing(bare, tmp_path, busy, caplog):
    scribe, attempted = PackerProcess(), await bare.start_rollout({})
    async with with_journal(bare, tmp_path / "store.db", raw_exchange.read, scribe) as store:
        store.append([span_of(attempted, 0)])
        await store.flush()
        await until(lambda: scribe.pid is not None)
        os.kill(scribe.pid, signal.SIGKILL)
        for number in range(1, 50):
            store.append([span_of(attempted, number)])
        spans = await store.query_spans(attempted.rollout_id)
        assert scribe.pid is None
    assert [span.name for span in spans] == [f"call {number}" for number in range(50)]
    assert "packed in this process" in caplog.text


async def test_few_records_start_nothing(bare, tmp_path):
    scribe, attempted = PackerProcess(), await bare.start_rollout({})
    async with with_journal(bare, tmp_path / "store.db", raw_exchange.read, scribe) as store:
        for number in range(5):
            store.append([span_of(attempted, number)])
            await store.flush()
    assert (scribe.pid, scribe._starting) == (None, None)


async def test_it_ends_when_few_come(bare, tmp_path, busy, monkeypatch):
    scribe, attempted = PackerProcess(), await bare.start_rollout({})
    async with with_journal(bare, tmp_path / "store.db", raw_exchange.read, scribe) as store:
        store.append([span_of(attempted, 0)])
        await store.flush()
        await until(lambda: scribe.pid is not None)
        pid = scribe.pid
        monkeypatch.setattr(packer_process, "START_RATE", float("inf"))
        monkeypatch.setattr(packer_process, "IDLE_SECONDS", 0.0)
        store.append([span_of(attempted, 1)])
        await store.flush()
        assert len(await store.query_spans(attempted.rollout_id)) == 2
    assert gone(pid)


async def test_a_machine_on_which_nothing_can_be_started_packs_for_itself(bare, tmp_path, busy, monkeypatch, caplog):
    monkeypatch.setattr(packer_process.sys, "executable", str(tmp_path / "nothing"))
    scribe, attempted = PackerProcess(), await bare.start_rollout({})
    async with with_journal(bare, tmp_path / "store.db", raw_exchange.read, scribe) as store:
        for number in range(3):
            store.append([span_of(attempted, number)])
            await store.flush()
        await until(lambda: "cannot be started" in caplog.text)
        assert len(await store.query_spans(attempted.rollout_id)) == 3
