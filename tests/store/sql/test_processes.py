"""Several processes on one file, processes that are killed, and a disk that fills up."""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.waiting import until

from agentlightning.errors import StoreFullError
from agentlightning.rollouts import EnqueueRolloutRequest, RolloutConfig
from agentlightning.span import PROMPT_TOKEN_IDS, Span
from agentlightning.store import LightningStore, LightningStoreBase

pytestmark = pytest.mark.integration

Start = Callable[..., "subprocess.Popen[str]"]

CLAIMER = """
import asyncio, sys
from agentlightning.store import LightningStore

async def main():
    store = LightningStore(sys.argv[1])
    while (attempted := await store.dequeue_rollout("there", timeout=1)) is not None:
        await store.update_attempt(attempted.rollout_id, attempted.attempt.attempt_id, status="succeeded")
        print(attempted.rollout_id)
    await store.close()

asyncio.run(main())
"""

WRITER = """
import asyncio, sys
from agentlightning.span import Span
from agentlightning.store import LightningStore

async def write(store, caller):
    number = 0
    while True:
        attempted = await store.start_rollout(number)
        ids = attempted.rollout_id, attempted.attempt.attempt_id
        for _ in range(3):
            span = await store.add_span(Span(*ids, "work", 1.0))
            print("span", attempted.rollout_id, span.span_id, file=heard)
        await store.update_attempt(*ids, status="succeeded")
        print("done", attempted.rollout_id, file=heard)
        number += 1

heard = open(sys.argv[2], "a", buffering=1)

async def main():
    store = LightningStore(sys.argv[1])
    print("open")
    await asyncio.gather(*(write(store, caller) for caller in range(8)))

asyncio.run(main())
"""

CLAIM_AND_HANG = """
import asyncio, sys
from agentlightning.store import LightningStore

async def main():
    store = LightningStore(sys.argv[1])
    attempted = await store.dequeue_rollout(timeout=30)
    print(attempted.rollout_id)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_two_processes_share_one_queue(tmp_path: Path, start_process: Start) -> None:
    path = tmp_path / "store.db"
    store = LightningStore(path)
    other = start_process(CLAIMER, path)
    made = await store.enqueue_many_rollouts([EnqueueRolloutRequest(index) for index in range(40)])
    ids = [rollout.rollout_id for rollout in made]
    here: list[str] = []
    for _ in range(10):
        attempted = await store.dequeue_rollout("here")
        assert attempted is not None
        await store.update_attempt(attempted.rollout_id, attempted.attempt.attempt_id, status="succeeded")
        here.append(attempted.rollout_id)
    finished = await store.wait_for_rollouts(rollout_ids=ids, timeout=60)
    there = (await asyncio.to_thread(other.communicate))[0].split()
    assert len(finished) == 40
    assert sorted(here + there) == sorted(ids)
    assert len(there) == 30
    await store.close()


async def test_what_another_process_enqueues_wakes_a_waiting_runner(tmp_path: Path, start_process: Start) -> None:
    path = tmp_path / "store.db"
    store = LightningStore(path)
    waiting = asyncio.create_task(store.dequeue_rollout(timeout=60))
    await asyncio.sleep(0.05)
    code = "import asyncio, sys; from agentlightning.store import LightningStore\n"
    code += "asyncio.run(LightningStore(sys.argv[1]).enqueue_rollout('from afar'))"
    start_process(code, path)
    attempted = await waiting
    assert attempted is not None
    assert attempted.input == "from afar"
    await store.close()


async def test_a_time_limit_holds_although_the_process_that_claimed_was_killed(
    tmp_path: Path, start_process: Start
) -> None:
    path = tmp_path / "store.db"
    store = LightningStore(path)
    made = await store.enqueue_rollout("task", config=RolloutConfig(unresponsive_seconds=0.3, max_attempts=2))
    other = start_process(CLAIM_AND_HANG, path)
    assert other.stdout is not None
    assert (await asyncio.to_thread(other.stdout.readline)).strip() == made.rollout_id
    other.kill()
    again = await store.dequeue_rollout(timeout=60)
    assert again is not None
    assert again.attempt.sequence_id == 2
    await store.close()


async def kill_a_writer(path: Path, start_process: Start, seconds: float) -> int:
    """Kill a process while it writes; check that everything it was told is kept is there. Returns how much that was."""
    heard = path.with_suffix(".heard")
    heard.unlink(missing_ok=True)
    writer = start_process(WRITER, path, heard)
    assert writer.stdout is not None
    assert await asyncio.to_thread(writer.stdout.readline) == "open\n"
    await until(lambda: heard.exists() and heard.stat().st_size > 0)
    await asyncio.sleep(seconds)
    assert writer.poll() is None
    writer.kill()
    writer.wait()
    lines = [line.split() for line in heard.read_text().splitlines(keepends=True) if line.endswith("\n")]
    store = LightningStore(path)
    rollouts = {rollout.rollout_id: rollout for rollout in await store.query_rollouts()}
    spans = {span.span_id async for _, found in store.iter_spans(list(rollouts)) for span in found}
    for kind, rollout_id, *span_id in lines:
        assert rollout_id in rollouts
        if kind == "span":
            assert span_id[0] in spans
        else:
            assert rollouts[rollout_id].status == "succeeded"
    await store.close()
    return len(lines)


async def test_every_acknowledged_write_survives_kill_9(tmp_path: Path, start_process: Start) -> None:
    assert await kill_a_writer(tmp_path / "store.db", start_process, 0.3) > 0


@pytest.mark.chaos
async def test_every_acknowledged_write_survives_kill_9_three_times_on_one_file(
    tmp_path: Path, start_process: Start
) -> None:
    chance = random.Random(7)
    for _ in range(3):
        assert await kill_a_writer(tmp_path / "store.db", start_process, chance.uniform(0.2, 2.0)) > 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.chaos
async def test_a_disk_that_fills_up_loses_nothing_that_was_acknowledged(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 500_000)
    store = LightningStore(small_disk / "store.db")
    attempted = await store.start_rollout("task")
    ids = attempted.rollout_id, attempted.attempt.attempt_id
    kept = await fill(store, ids)
    ballast.unlink()
    after = await store.add_span(Span(*ids, "after", 1.0))
    assert [span.span_id for span in await store.query_spans(ids[0])] == [*kept, after.span_id]
    await store.close()
    store = LightningStore(small_disk / "store.db")
    assert len(await store.query_spans(ids[0])) == len(kept) + 1
    await store.close()


async def fill(store: LightningStoreBase, ids: tuple[str, str]) -> list[str]:
    """Write until the disk is full; the ids of the spans that were acknowledged."""
    kept: list[str] = []
    end = time.monotonic() + 60
    while time.monotonic() < end:
        tokens = {PROMPT_TOKEN_IDS: list(range(len(kept), len(kept) + 5_000))}  # equal ones would be stored once
        try:
            kept.append((await store.add_span(Span(*ids, "work", 1.0, attributes=tokens))).span_id)
        except StoreFullError:
            return kept
    raise AssertionError("the disk never filled up")
