"""`examples/frameworks/warm.py` runs each command as a process of its own, and imports what it needs once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.frameworks.service import EXAMPLES

PATIENCE_SECONDS = 60
FRAMEWORK = """
import os
with open(os.environ["IMPORTS"], "a") as file:
    print(os.environ.get("OPENAI_BASE_URL"), file=file)
"""
AGENT = """
import json, os, sys, time
import slow_framework
print(json.dumps([sys.stdin.read(), sys.argv[1:], os.getcwd(), os.environ["OPENAI_BASE_URL"], __name__]), flush=True)
if "raise" in sys.argv: raise ValueError("no such thing")
if "exit" in sys.argv: sys.exit(3)
if "wait" in sys.argv:
    print(os.getpid(), flush=True)
    time.sleep(1000)
"""
Warm = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "slow_framework.py").write_text(FRAMEWORK)
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "agent.py").write_text(AGENT)
    with tempfile.TemporaryDirectory() as short:  # the server ends with its socket
        paths = {"PYTHONPATH": str(tmp_path / "packages"), "IMPORTS": str(tmp_path / "imports"), "TMPDIR": short}
        yield {"PATH": os.environ["PATH"], **paths}


def command(tmp_path: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(EXAMPLES / "warm.py"), str(tmp_path / "agent" / "agent.py"), *arguments]


@pytest.fixture
def warm(tmp_path: Path, environment: dict[str, str]) -> Warm:
    def run(*arguments: str, given: str = "", url: str = "http://one") -> subprocess.CompletedProcess[str]:
        more = {**environment, "OPENAI_BASE_URL": url}
        words = command(tmp_path, *arguments)
        return subprocess.run(words, cwd=tmp_path, env=more, input=given, capture_output=True, text=True, timeout=120)

    return run


def test_each_run_has_the_streams_arguments_and_environment_of_its_command(warm: Warm, tmp_path: Path) -> None:
    for given, url in (("a", "http://one"), ("b", "http://two"), ("c", "http://three")):
        ran = warm("x", given, given=given, url=url)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert json.loads(ran.stdout) == [given, ["x", given], str(tmp_path), url, "__main__"]
    imports = (tmp_path / "imports").read_text().split()
    assert imports == ["http://one", "None"], "by the first run, then by the server, which knows no run's address"


def test_its_exit_code_and_its_traceback_are_those_of_the_agent(warm: Warm) -> None:
    assert warm("exit").returncode == 3
    failed = warm("raise")
    assert failed.returncode == 1
    assert "ValueError: no such thing" in failed.stderr


def test_an_agent_ends_with_its_command_and_the_server_with_its_socket(
    warm: Warm, tmp_path: Path, environment: dict[str, str]
) -> None:
    more = {**environment, "OPENAI_BASE_URL": "http://one"}
    pipe: Any = subprocess.PIPE
    started = subprocess.Popen(command(tmp_path, "wait"), env=more, stdin=subprocess.DEVNULL, stdout=pipe, text=True)
    assert started.stdout is not None
    started.stdout.readline()
    agent = int(started.stdout.readline())
    started.send_signal(signal.SIGKILL)
    started.wait()
    started.stdout.close()
    ends(agent)
    assert warm().returncode == 0, "the server goes on"
    [socket] = Path(environment["TMPDIR"]).glob("warm-*/*.sock")
    server = the_server(tmp_path)
    socket.unlink()
    ends(server)


def the_server(tmp_path: Path) -> int:
    """The server, once the processes that it forked for runs, which are named like it, have ended."""
    until = time.monotonic() + PATIENCE_SECONDS
    while len(found := servers(tmp_path)) != 1:
        assert time.monotonic() < until, found
        time.sleep(0.02)
    return found[0]


def servers(tmp_path: Path) -> list[int]:
    words = f"--serve\0{tmp_path}/agent/agent.py".encode()
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if words in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def ends(pid: int) -> None:
    """Wait until a process has ended."""
    until = time.monotonic() + PATIENCE_SECONDS
    while alive(pid):
        assert time.monotonic() < until, f"{pid} is still there"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
