"""Locks that end with their process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
