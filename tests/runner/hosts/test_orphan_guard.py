"""What the guard of a host's commands does at the end of a process (what it kills: tests/runner/test_isolation.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
from agentlightning.runner.hosts.orphan_guard import guard

guard().start()
print("done")
"""


def test_a_process_that_ends_leaves_no_guard_behind_and_no_warning(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = subprocess.run([sys.executable, "-X", "dev", "program.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
