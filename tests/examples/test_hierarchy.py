"""The example of three levels: trained together they pass what each reaches alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "examples" / "hierarchy"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_three_levels_that_learn_together_pass_each_that_learns_alone(tmp_path: Path) -> None:
    program = f"import json, pathlib, warehouse; print(json.dumps(warehouse.main(pathlib.Path('{tmp_path}'), 30)))"
    ran = subprocess.run([sys.executable, "-c", program], cwd=HERE, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    together = found.pop("together")
    assert together > max(found.values()) + 0.2, (together, found)
