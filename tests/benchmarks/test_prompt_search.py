"""The comparison of prompt searches counts a seed that never arrives, and keeps its limits."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "studies"
sys.path.insert(0, str(BENCHMARKS))
try:
    import prompt_search
finally:
    sys.path.remove(str(BENCHMARKS))


def results(*calls: int | None) -> list[dict]:
    return [{"calls": each, "share": 1.0} for each in calls]


def test_a_seed_that_never_arrives_counts_as_the_whole_budget():
    assert prompt_search.median(results(10, None, 30), 1000) == 30
    assert prompt_search.median(results(10, None, None), 1000) == 1000


@pytest.mark.parametrize(
    ("ours", "peer", "kept"),
    [((100, 110), (400, 500), True), ((200, 200), (400, 500), False), ((10, None), (8000, None), False)],
)
def test_the_limit_is_on_the_best_peer_and_on_seeds_that_are_stuck(capsys, ours, peer, kept):
    options = argparse.Namespace(seeds=2, budget=8000, share=0.95)
    arms = {"ours": results(*ours), "gepa": results(*peer), "agl03": results(7000, 8000)}
    assert prompt_search.report("instructions", arms, options) is kept
    assert "ours / the best of the others" in capsys.readouterr().out


@pytest.mark.slow
def test_our_arm_finds_the_prompt_and_peers_that_are_not_there_are_named():
    command = [sys.executable, str(BENCHMARKS / "prompt_search.py"), "--seeds", "1", "--worlds", "instructions"]
    command += ["--gepa", "nowhere/python", "--agl03", "nowhere/python", "--budget", "600"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "reached 1" in done.stdout
    assert "gepa is left out: there is no nowhere/python" in done.stderr
