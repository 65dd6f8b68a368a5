"""The ranks that the trainer's process has started on its own machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Final

from agentlightning.policy.fsdp.config import TOKEN

MODULE: Final = "agentlightning.policy.fsdp.rank"
CLOSE_SECONDS: Final = 5.0
"""How long ranks may take to end by themselves."""
STDERR: Final = 2


class StartedRanks:
    """Processes that join this one. Each is in a session of its own, so that Ctrl-C reaches the trainer alone, and ends
    when its connection does."""

    def __init__(self, count: int, port: int, token: bytes, threads: int) -> None:
        # This process listens already: one that does not find it has outlived it.
        command = [sys.executable, "-m", MODULE, f"127.0.0.1:{port}", "--timeout", "0"]
        environment = _environment(os.environ, token, threads)
        self._processes = [
            subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=STDERR,
                start_new_session=True,
            )
            for rank in range(count)
        ]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def first_end(self) -> str | None:
        """How the first that has ended did so, in words; None while all run."""
        return next((_words(each) for each in self._processes if each.poll() is not None), None)

    def how_ended(self, pid: int) -> str | None:
        """How a process has ended, in words; None where it still runs after a moment."""
        process = next((each for each in self._processes if each.pid == pid), None)
        if process is None:
            return None
        try:
            process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        return _words(process)

    def stop(self, *, gently: bool) -> None:
        """End all that run, at once or with the time to end by themselves."""
        deadline = time.monotonic() + (CLOSE_SECONDS if gently else 0.0)
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _environment(given: Mapping[str, str], token: bytes, threads: int) -> dict[str, str]:
    """Of a rank on this machine, which talks to the others over loopback."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {**loopback, "OMP_NUM_THREADS": str(threads), **given, TOKEN: token.decode()}


def _words(process: subprocess.Popen[bytes]) -> str:
    status = process.returncode
    if status >= 0:
        return f"ended with status {status}"
    return f"was killed by {signal.Signals(-status).name}"
