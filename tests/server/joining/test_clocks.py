"""A trainer whose clock is ten minutes before or behind that of the server it has joined."""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

import pytest
from tests.support.model_server import ScriptedModelServer

from .runs import Hub, account, command, environment

CLOCK = """
import time

real = time.time, time.time_ns
time.time = lambda: real[0]() + {shift}
time.time_ns = lambda: real[1]() + {shift} * 10**9
"""

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


@pytest.mark.parametrize("shift", [600, -600])
async def test_a_run_with_another_clock_keeps_its_lease_and_names_no_agent_that_hangs(
    tmp_path: Path, hub: Hub, model_server: ScriptedModelServer, shift: int
) -> None:
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(CLOCK.format(shift=shift))
    clock = {"PYTHONPATH": f"{tmp_path / 'clock'}:{os.environ.get('PYTHONPATH', '')}"}
    words = command(tmp_path, "run", model_server, hub.url, lease=4.0)
    model_server.delay = 0.05
    process = await asyncio.create_subprocess_exec(
        *words, cwd=tmp_path, env={**environment(), **clock}, stdout=DEVNULL, stderr=PIPE
    )
    said = (await process.communicate())[1].decode()
    assert process.returncode == 0, said
    assert "hangs" not in said
    assert (await account(hub.url, tmp_path / "run"))["rollouts"] == {"succeeded": 64}
    figures = hub.metrics()
    assert (figures["joins"], figures["gone"], figures["left"], figures["failed"]) == (1, 0, 1, 0)
