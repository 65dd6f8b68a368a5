"""Ranks that are started elsewhere, and join the trainer at an address."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.models import tiny_checkpoint

import agentlightning
from agentlightning.errors import ConfigError, RankError
from agentlightning.policy.config import TOKEN, LocalPolicyConfig
from agentlightning.policy.open import open_policy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Machines:
    """Ranks with working directories of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, directory: Path, **environment: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "agentlightning.policy.fsdp.rank", self.address]
        self.processes.append(subprocess.Popen(command, cwd=directory, env={**os.environ, **environment}))
        return self.processes[-1]

    def config(self, model: str, processes: int = 2, seconds: float = 300) -> LocalPolicyConfig:
        settings: Any = {"kind": "fsdp", "processes": processes, "address": self.address}
        return LocalPolicyConfig(model=model, device="cpu", rank_timeout_seconds=seconds, **settings)


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    monkeypatch.setenv(TOKEN, "a secret")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = Machines(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


async def test_they_train_and_end_with_the_trainer(machines: Machines, tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    for rank in (1, 0):
        machines.start(tmp_path, RANK=str(rank))
    policy = await open_policy(machines.config(str(model)))
    scores = await policy.score([], {"logprobs"})
    assert scores == {"logprobs": []}
    await policy.close()
    for process in machines.processes:
        assert await asyncio.to_thread(process.wait, 120) == 0


async def test_another_model_under_the_same_name_is_refused(
    machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seed in (("here", 0), ("there", 1)):
        tiny_checkpoint(tmp_path / name / "model", seed=seed)
    monkeypatch.chdir(tmp_path / "here")
    machines.start(tmp_path / "here", RANK="0")
    other = machines.start(tmp_path / "there", RANK="1")
    with pytest.raises(ConfigError, match=rf"rank 1 of 2 .process {other.pid} .* has loaded another model under model"):
        await open_policy(machines.config("model"))


async def test_other_code_is_refused(machines: Machines, tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    source = Path(agentlightning.__file__).parent
    shutil.copytree(source, tmp_path / "src" / source.name)
    with (tmp_path / "src" / source.name / "task.py").open("a") as file:
        file.write("\n# A change.\n")
    other = machines.start(tmp_path, PYTHONPATH=str(tmp_path / "src"))
    with pytest.raises(ConfigError, match=rf"process {other.pid} .* other source files of agentlightning"):
        await open_policy(machines.config(str(model), processes=1))
    assert await asyncio.to_thread(other.wait, 120) == 1


async def test_ranks_that_do_not_come_are_counted(machines: Machines, tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    machines.start(tmp_path, **{TOKEN: "a guess"})
    given: Any = machines.config(str(model), seconds=30)
    with pytest.raises(RankError, match="0 of 2 ranks have joined in 30 seconds"):
        await open_policy(given)
