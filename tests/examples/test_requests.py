"""Two algorithms that search trees, each a file of its own: what they ask for, and that they learn the calculator."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import agentlightning as agl

HERE = Path(__file__).parents[2] / "examples" / "requests"
AGL = str(Path(sys.executable).parent / "agl")


def rollout(name: str, reward: float, *answers: tuple[int, float]) -> agl.Trajectory:
    """A call for each answer: (its only token, log-probability)."""
    calls: list[agl.Transition] = []
    prompt = (1,)
    for number, (token, logprob) in enumerate(answers):
        calls.append(agl.Transition(name, "at", f"{name}-{number}", number, prompt, (token,), (logprob,)))
        prompt = (*prompt, token, 1)
    return agl.Trajectory(name, "at", tuple(calls), reward, group="task")


def test_the_calls_of_least_certainty_are_branched_and_shared_by_what_branched_there(
    module_of: Callable[[str, str], ModuleType],
) -> None:
    search = module_of("requests", "tree_search")
    trajectories = (rollout("a", 1.0, (2, -0.1), (3, -2.0)), rollout("b", 0.0, (2, -1.5)))
    first = search.least_sure(trajectories, 1, Counter())
    assert first == [agl.BranchPoint("a", "a-1")]
    assert search.least_sure(trajectories, 1, Counter(first)) == [agl.BranchPoint("b", "b-0")]


def test_answers_are_compared_at_their_own_point_by_all_that_went_through_them(
    module_of: Callable[[str, str], ModuleType],
) -> None:
    best = module_of("requests", "best_of_n")
    group = [rollout("a", 1.0, (2, 0.0), (3, 0.0)), rollout("b", 0.0, (2, 0.0), (4, 0.0)), rollout("c", 0.0, (5, 0.0))]
    pairs = [(good.span_id, bad.span_id) for good, bad in best.best_and_worst(group)]
    assert pairs == [("a-0", "c-0"), ("a-1", "b-1")], "2 is worth 0.5, and 5 nothing"
    assert [want.branch for want in best.later_points(group, 3)] == [agl.BranchPoint("a", "a-1")]
    assert best.best_and_worst(group[2:]) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("algorithm", ["tree_search.py:TreeSearch", "best_of_n.py:BestOfN"])
def test_both_learn_the_calculator(algorithm: str, tmp_path: Path) -> None:
    folder = tmp_path / "requests"
    shutil.copytree(HERE, folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "prepare.py"], cwd=folder, check=True)
    command = [AGL, "train", "--config", "train.toml", "--run", "run", "--json", f"algorithm.type={algorithm}"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    gain = json.loads(done.stdout.splitlines()[-1])["held_out"]["sampled"]
    assert gain["interval"][0] > 0, gain
