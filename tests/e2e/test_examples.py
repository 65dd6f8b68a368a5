"""The examples train, as their READMEs say."""

import json
import shutil
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
AGENTS = {
    "a command in Node.js": [
        *("--agent", f"node {EXAMPLES}/node_agent/agent.mjs"),
        *("--reward", f"{EXAMPLES}/node_agent/reward.py:score"),
    ],
    "a class that reads the environment": ["--agent", f"{EXAMPLES}/agent_class/agent.py:Agent"],
}
SMALL = ["algorithm.steps=1", "algorithm.tasks_per_step=2", "algorithm.group_size=2", "policy.max_context=160"]


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
def test_an_example_trains(job, name):
    if "Node.js" in name and shutil.which("node") is None:
        pytest.skip("node is not installed")
    tasks = [{"question": f"Tom has {n} boxes of 14 pens. How many pens?", "answer": 14 * n} for n in range(8)]
    (job.directory / "sums.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    agl = job.command()[0]
    done = job.run([agl, "train", *AGENTS[name], "--data", "sums.jsonl", "--json", "--run", "run", *SMALL])
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["rollouts"] == 4
    assert report["failed_rollouts"] == 0
