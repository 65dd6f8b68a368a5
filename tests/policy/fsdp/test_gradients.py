"""Several processes have the gradient of one, whatever the trees, the loss and what is trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_gradient_is_that_of_one_process(ranks: int) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "tests.policy.fsdp.gradients", str(ranks)],
        cwd=ROOT,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert found.returncode == 0, found.stderr
    cases = [json.loads(line) for line in found.stdout.splitlines()]
    assert len(cases) > 40
    assert sum(case["norm"] > 1e-3 for case in cases) > 35
    assert not [case for case in cases if not case["apart"] < 1e-5]
