"""In teams of real frameworks only the agents that are told to learn do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.frameworks.measuring import sharing_imports
from tests.frameworks.service import ENVIRONMENTS, EXAMPLES

TEAMS = {"graph.py": "modern", "runs.py": "modern", "round_robin.py": "modern", "crew.py": "crewai"}
HANDOFFS = "handoffs.py"
TWO = ['algorithm.agents.editor={ type = "lora", r = 4 }']

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def train(file: str, folder: Path, *changes: str) -> dict[str, float]:
    """The metrics of the last step."""
    name = TEAMS.get(file, "modern")
    home, teams = ENVIRONMENTS / name, EXAMPLES / "teams"
    if not (home / ".installed").exists():
        pytest.skip(f"{home} is not there; run: tests/frameworks/setup.sh {name}")
    files = [f"reward={teams}/reward.py:score", f"data.train={teams}/topics.jsonl", "--config", f"{teams}/writer.toml"]
    program = f"{home}/bin/python {EXAMPLES / 'warm.py'} {teams / file}"
    agent = ["--agent", program, "--run-dir", str(folder / "run")]
    command = [str(Path(sys.executable).with_name("agl")), "train", "--json", *agent, *files, *changes]
    environment = {**os.environ, "HOME": str(folder)}
    with sharing_imports():
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])


def changed(folder: Path) -> dict[str, bool]:
    """Whether the adapter of each agent is another than at the start, where its second factor is zero."""
    from safetensors.numpy import load_file

    adapters = folder / "run" / "checkpoint" / "adapters"
    weights = {path.name: load_file(path / "adapter_model.safetensors") for path in adapters.iterdir()}
    return {
        agent: any(values.any() for name, values in own.items() if "lora_B" in name) for agent, own in weights.items()
    }


@pytest.mark.parametrize("file", TEAMS)
def test_only_the_writer_learns(file: str, tmp_path: Path) -> None:
    step = train(file, tmp_path)
    calls = step["calls_per_rollout"] * step["rollouts"]
    assert step["calls_per_rollout"] == 3
    assert (step["calls_frozen"], step["calls_unlisted"]) == (calls * 2 / 3, 0)
    assert step["tokens_trained"] == step["writer/tokens_trained"] > 0
    assert changed(tmp_path) == {"writer": True}


@pytest.mark.parametrize("file", TEAMS)
def test_two_of_three_learn_together(file: str, tmp_path: Path) -> None:
    step = train(file, tmp_path, *TWO)
    assert step["calls_frozen"] == step["rollouts"]
    assert step["tokens_trained"] == step["writer/tokens_trained"] + step["editor/tokens_trained"]
    assert changed(tmp_path) == {"writer": True, "editor": True}


@pytest.fixture(scope="module")
def hands_over(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The settings of a tiny model whose writer hands over now and then."""
    home, folder = ENVIRONMENTS / "modern", tmp_path_factory.mktemp("start")
    if not (home / ".installed").exists():
        pytest.skip(f"{home} is not there; run: tests/frameworks/setup.sh modern")
    program = [sys.executable, str(EXAMPLES / "teams" / "handoffs_start.py"), "--output", str(folder)]
    agent = ["--agent", f"{home}/bin/python {EXAMPLES / 'teams' / HANDOFFS}"]
    done = subprocess.run([*program, *agent], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return f"policy.model={folder / 'model'}"


REWARD = f"reward={EXAMPLES}/teams/reward.py:handed_over"


def test_a_writer_that_is_handed_the_work_learns_to_hand_it_over(hands_over: str, tmp_path: Path) -> None:
    step = train(HANDOFFS, tmp_path, hands_over, REWARD, "algorithm.steps=8", "algorithm.tasks_per_step=4")
    assert step["calls_frozen"] > 0
    assert step["calls_unlisted"] == 0
    assert step["tokens_trained"] == step["writer/tokens_trained"]
    assert changed(tmp_path) == {"writer": True}
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [each["reward"] for each in steps if "reward" in each]
    assert sum(rewards[-2:]) > sum(rewards[:2])


def test_two_that_hand_over_learn_together(hands_over: str, tmp_path: Path) -> None:
    step = train(HANDOFFS, tmp_path, hands_over, REWARD, *TWO, "algorithm.steps=4", "algorithm.tasks_per_step=4")
    assert step["calls_frozen"] == step["rollouts"] / 4, "the researcher speaks once in each of the last step"
    assert step["tokens_trained"] == step["writer/tokens_trained"] + step["editor/tokens_trained"]
    assert changed(tmp_path) == {"writer": True, "editor": True}
