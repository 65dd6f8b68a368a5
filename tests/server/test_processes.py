"""Processes that serve one port: one that hangs is noticed, as one that dies is (tests/cli/test_serve_workers.py)."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from agentlightning.observability.metrics import Metrics
from agentlightning.server import processes
from agentlightning.server.processes import Processes, ServerProcess
from agentlightning.store.memory import InMemoryLightningStore


@pytest.mark.parametrize("hang", [lambda: os.kill(os.getpid(), signal.SIGSTOP), lambda: time.sleep(60)])
def test_a_process_whose_event_loop_has_stopped_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hang
) -> None:
    for name, value in (("BEAT_SECONDS", 0.02), ("LOOK_SECONDS", 0.2), ("MOST_SILENT_LOOKS", 5)):
        monkeypatch.setattr(processes, name, value)

    async def serve(process: ServerProcess) -> None:
        async with process.sharing(Metrics(InMemoryLightningStore())):
            process.ready()
            (tmp_path / f"{process.number}-{process.restarts}").touch()
            await asyncio.sleep(0.5)
            if (process.number, process.restarts) == (1, 0):
                hang()
            await asyncio.sleep(60)

    def stop_once_it_is_replaced() -> None:
        deadline = time.monotonic() + 30
        while not (tmp_path / "1-1").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    stopping = threading.Thread(target=stop_once_it_is_replaced)
    served = Processes(2, "127.0.0.1", 0, lambda each: asyncio.run(serve(each)) or 0, lambda port: stopping.start())
    served.run()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["1-0", "1-1", "2-0"]
    assert "process 1 of the server has done nothing for 1 s; it is killed" in caplog.text
