"""The guard of a host's commands: what it leaves at the end, and what becomes of commands when it dies itself."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

PROGRAM = """
from agentlightning.runner.hosts.orphan_guard import guard

guard().start()
print("done")
"""
KILLED = """
import os, signal, subprocess, sys, time
from agentlightning.runner.hosts.orphan_guard import guard

def command():
    process = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
    guard().add(process.pid)
    return process

def kill_guard():
    died = guard()._process
    died.kill()
    while guard()._process in (died, None):
        time.sleep(0.01)

guard().start()
ended, *running = command(), command()
guard().remove(ended.pid)
for _ in range(2):
    kill_guard()
    running.append(command())
print(ended.pid, *(process.pid for process in running), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_ends_leaves_no_guard_behind_and_no_warning(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = subprocess.run([sys.executable, "-X", "dev", "program.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


@pytest.mark.integration
def test_a_guard_that_dies_is_replaced_and_knows_every_command(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(KILLED)
    command = [sys.executable, "-W", "ignore", "program.py"]
    with (tmp_path / "err").open("w") as err:
        output = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=err, timeout=60).stdout
    assert (tmp_path / "err").read_text().count("another one replaces it") == 2
    ended, *killed = map(int, output.split())
    deadline = time.monotonic() + 20
    while any(_runs(pid) for pid in killed) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [_runs(pid) for pid in killed] == [False] * 3
    assert _runs(ended), "the guard has killed what it was told to leave"
    psutil.Process(ended).kill()


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
