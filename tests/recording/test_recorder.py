"""Promises about what happens to records when the store, the disk, the server or the process fails."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from tests.support.threads import in_thread
from tests.support.waiting import wait_until

import agentlightning as agl
from agentlightning.recording import recorder as module
from agentlightning.server.app import Server
from agentlightning.store.types import RolloutRecord

pytestmark = pytest.mark.integration

Read = Callable[..., list[RolloutRecord]]


def run(script: str, directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_everything_is_written_when_the_process_ends(tmp_path: Path, recorded: Read) -> None:
    done = run(
        """
        import agentlightning as agl
        for number in range(50):
            with agl.track_session(number):
                agl.emit_reward(number)
        """,
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [(r.rollout.input, agl.find_final_reward(r.spans)) for r in recorded()] == [(n, n) for n in range(50)]


@pytest.mark.chaos
def test_what_was_flushed_survives_kill_9(tmp_path: Path, recorded: Read) -> None:
    done = run(
        """
        import os, signal
        import agentlightning as agl
        with agl.track_session("ended"):
            agl.emit_reward(1.0)
        with agl.track_session("open"):
            agl.emit_message("here")
            assert agl.flush_recording()
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    )
    assert done.returncode == -signal.SIGKILL
    ended, opened = recorded()
    assert (ended.rollout.status, agl.find_final_reward(ended.spans)) == ("succeeded", 1.0)
    assert (opened.rollout.status, len(opened.spans)) == ("running", 1)
    # The store ends it after a while without a sign of life.
    assert opened.rollout.config.unresponsive_seconds


@pytest.mark.chaos
def test_a_full_disk_is_one_warning_and_a_counter(tmp_path: Path) -> None:
    done = run(
        """
        import json, resource, signal
        import agentlightning as agl
        from agentlightning.recording import recorder
        recorder.EXIT_SECONDS = 0.5
        with agl.track_session("before"):
            agl.emit_reward(1.0)
        assert agl.flush_recording()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        for number in range(20):
            with agl.track_session(number):
                agl.emit_message("x" * 100_000)
        import time
        while not agl.recording_status().problem:
            time.sleep(0.05)
        flushed = agl.flush_recording(0.3)
        status = agl.recording_status()
        print(json.dumps([flushed, status.sessions, status.sessions_written, status.waiting > 0, status.problem]))
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    flushed, sessions, written, waits, problem = json.loads(done.stdout)
    assert (flushed, sessions, written, waits) == (False, 21, 1, True)
    assert "cannot be recorded" in problem
    assert done.stderr.count("cannot be recorded") == 1
    assert "20 sessions (20 spans) that could not be written" in done.stderr


def test_a_dead_server_costs_nothing_but_a_warning_and_gets_everything_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    with reserved_port() as port:
        place = f"http://127.0.0.1:{port}"
        for number in range(3):
            with agl.track_session(number, store=place):
                agl.emit_reward(1.0)
        wait_until(lambda: agl.recording_status().problem)
        assert not agl.flush_recording(0.3)
        assert agl.recording_status().waiting
        assert len([r for r in caplog.records if "cannot be recorded" in r.message]) == 1
        with in_thread(lambda: served(tmp_path / "served.db", port)):
            assert agl.flush_recording(30)
            module.recorder_of(place).close()
    store = agl.LightningStore(tmp_path / "served.db")
    assert [r.status for r in asyncio.run(store.query_rollouts())] == ["succeeded"] * 3
    assert (agl.recording_status().sessions_written, agl.recording_status().waiting) == (3, 0)
    asyncio.run(store.close())


@asynccontextmanager
async def served(path: Path, port: int) -> AsyncIterator[None]:
    """A server of a store on this port."""
    store = agl.LightningStore(path)
    async with Server(store, secret="s", port=port):
        yield
    await store.close()


def test_a_store_that_cannot_be_opened_does_not_disturb_the_program(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no directory")
    for _ in range(2):
        with agl.track_session(store=tmp_path / "file" / "store.db"):
            agl.emit_message("the agent goes on")
    wait_until(lambda: agl.recording_status().problem)
    assert not agl.flush_recording(0.5)
    assert len([r for r in caplog.records if "cannot be recorded" in r.message]) == 1


def test_beyond_what_can_wait_is_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 3)
    monkeypatch.setattr(module, "LINGER_SECONDS", 60.0)
    with agl.track_session("first"):
        for number in range(10):
            agl.emit_message(str(number))
    with agl.track_session("second"):
        agl.emit_message("nothing of it is kept")
    status = agl.recording_status()
    assert status.sessions_lost == 1
    assert agl.flush_recording()
    (record,) = asyncio.run(read_all())
    assert record.rollout.status == "succeeded"
    assert 2 <= len(record.spans) < 10  # More where the thread writes some in between.
    assert status.spans_dropped == 10 - len(record.spans)
    assert len([r for r in caplog.records if "falls behind" in r.message]) == 1


def test_what_waits_is_limited_by_its_size_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 10_000)
    monkeypatch.setattr(module, "LINGER_SECONDS", 60.0)
    with agl.track_session("large"):
        for _ in range(10):
            agl.emit_message("x" * 4_000)
        assert agl.recording_status().spans_dropped == 7
        assert agl.flush_recording()
        agl.emit_message("x" * 4_000)  # there is room again
    assert agl.flush_recording()
    (record,) = asyncio.run(read_all())
    assert len(record.spans) == 4


async def read_all() -> list[RolloutRecord]:
    store = agl.LightningStore()
    try:
        return await store.read_records([rollout.rollout_id for rollout in await store.query_rollouts()])
    finally:
        await store.close()


def test_a_value_that_no_store_can_hold_does_not_take_others_with_it(recorded: Read) -> None:
    with agl.track_session("good"):
        agl.emit_message("fine")
    with agl.track_session("bad"):
        agl.emit_message("half an emoji \ud83d")
    with agl.track_session("open"):
        agl.emit_message("half an emoji \ud83d")
        agl.emit_message("fine")
        recorded()
    found = {r.rollout.input: (r.rollout.status, len(r.spans)) for r in recorded()}
    assert found == {"good": ("succeeded", 1), "bad": ("succeeded", 1), "open": ("succeeded", 2)}


def test_a_store_the_user_has_closed_is_opened_again(tmp_path: Path) -> None:
    store = agl.LightningStore(tmp_path / "a.db")
    with agl.track_session("before", store=store):
        asyncio.run(store.close())
    assert agl.flush_recording()
    again = agl.LightningStore(tmp_path / "a.db")
    assert [r.status for r in asyncio.run(again.query_rollouts())] == ["succeeded"]
    asyncio.run(again.close())


def test_what_comes_after_the_end_of_recording_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with agl.track_session("in time"):
        module.recorder_of().close()
        agl.emit_message("too late")
    with agl.track_session("too late"):
        pass
    assert (agl.recording_status().spans_dropped, agl.recording_status().sessions_lost) == (1, 1)
    assert len([r for r in caplog.records if "nothing more is recorded" in r.message]) == 1


def test_threads_may_record_at_the_same_time(recorded: Read) -> None:
    def agent(number: int) -> None:
        for turn in range(20):
            with agl.track_session([number, turn]):
                agl.emit_reward(float(turn))

    threads = [threading.Thread(target=agent, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {tuple(r.rollout.input): agl.find_final_reward(r.spans) for r in recorded()}
    assert found == {(number, turn): float(turn) for number in range(8) for turn in range(20)}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_forked_worker_records_in_the_session_of_its_parent_and_in_its_own(tmp_path: Path, recorded: Read) -> None:
    done = run(
        """
        import multiprocessing, warnings
        warnings.simplefilter("ignore")
        import agentlightning as agl

        def work(number):
            agl.emit_message(f"from a worker {number}")

        def alone():
            with agl.track_session("alone"):
                agl.emit_reward(1.0)

        if __name__ == "__main__":
            context = multiprocessing.get_context("fork")
            with agl.track_session("parent"):
                worker = context.Process(target=work, args=[1])
                worker.start()
                worker.join()
            worker = context.Process(target=alone)
            worker.start()
            worker.join()
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = {r.rollout.input: (r.rollout.status, len(r.spans)) for r in recorded()}
    assert found == {"parent": ("succeeded", 1), "alone": ("succeeded", 1)}


WORKERS = """
import multiprocessing, sys, warnings
from concurrent.futures import ProcessPoolExecutor
warnings.simplefilter("ignore")
import agentlightning as agl

def work(number):
    for turn in range(3):
        with agl.track_session([number, turn]):
            agl.emit_reward(1.0)

def processes(context):
    workers = [context.Process(target=work, args=[number]) for number in range(2)]
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]

def pool(context):
    with context.Pool(2) as workers:  # its workers end by SIGTERM
        workers.map(work, range(2), chunksize=1)

def executor(context):
    with ProcessPoolExecutor(2, mp_context=context) as workers:
        list(workers.map(work, range(2)))

def loky(context):
    import joblib
    joblib.Parallel(n_jobs=2, backend="loky")(joblib.delayed(work)(number) for number in range(2))

if __name__ == "__main__":
    globals()[sys.argv[1]](multiprocessing.get_context(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        *(f"processes {method}" for method in ("fork", "forkserver", "spawn")),
        "pool fork",
        "executor fork",
        "loky spawn",
    ],
)
def test_workers_whose_parent_has_recorded_nothing_lose_no_session(start: str, tmp_path: Path, recorded: Read) -> None:
    (tmp_path / "workers.py").write_text(WORKERS)
    command = [sys.executable, "workers.py", *start.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(r.rollout.input for r in recorded()) == [[number, turn] for number in range(2) for turn in range(3)]
    assert {(r.rollout.status, len(r.spans)) for r in recorded()} == {("succeeded", 1)}


def test_a_session_that_goes_on_gives_signs_of_life(recorded: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.02)
    with agl.track_session():
        first = recorded()[0].attempts[0].last_heartbeat_time or 0.0
        wait_until(lambda: (recorded()[0].attempts[0].last_heartbeat_time or 0.0) > first)


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nobody listens at, and that only a server made here may take.

    Connections to it are refused. Without the reservation the system may give it to another test meanwhile.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
