"""Locks that end with their process, and a package that can be imported where POSIX's are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentlightning.util.file_lock import lock_file

HOLD = """
import sys
from agentlightning.util.file_lock import lock_file
file = open(sys.argv[1], "w")
print(lock_file(file.fileno()), flush=True)
sys.stdin.read()
"""


def test_a_lock_keeps_others_out_until_its_process_ends(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLD, path], stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        with path.open("w") as mine:
            assert not lock_file(mine.fileno())
            holder.kill()
            holder.wait()
            assert lock_file(mine.fileno())


WITHOUT_POSIX = """
import importlib, os, signal, sys, types
import agentlightning

def load(names):
    for name in names:
        importlib.import_module(name)

names = ["agentlightning" + name for name in (
    "", ".store", ".server", ".gateway.app", ".gateway.upstream.limits",
    ".training.persistence.run_dir", ".cli.main", ".cli.run", ".tracing.tracer",
    ".store.http.client", ".runner.runner", ".trainer",
)]
load(names)  # what others need of POSIX they have from here on
for name in [name for name in sys.modules if name.split(".")[0] == "agentlightning"]:
    del sys.modules[name]
for name in ("fcntl", "pwd", "grp", "termios", "resource"):
    sys.modules[name] = None
for name in ("fork", "register_at_fork", "waitid", "pwrite", "fchmod", "geteuid", "killpg", "setsid", "O_CLOEXEC"):
    delattr(os, name)
gone = ("SIGHUP", "SIGKILL", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGSTOP", "SIGCONT")
for name in gone:
    delattr(signal, name)
members = signal.Signals.__members__
signal.Signals = type("Signals", (), {"__members__": {n: m for n, m in members.items() if n not in gone},
                                      "__class_getitem__": classmethod(lambda cls, name: members[name])})
sys.platform, sys.modules["msvcrt"] = "win32", types.ModuleType("msvcrt")
load(names)
"""


@pytest.mark.slow
def test_the_package_can_be_imported_without_what_windows_lacks() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_POSIX], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
