"""In teams of real frameworks only the agents that are told to learn do."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.frameworks.measuring import sharing_imports
from tests.frameworks.service import ENVIRONMENTS, EXAMPLES

import agentlightning as agl
from agentlightning import span as names
from agentlightning.assemble import calls

TEAMS = {"graph.py": "modern", "runs.py": "modern", "round_robin.py": "modern", "crew.py": "crewai"}
HANDOFFS = "handoffs.py"
GIVEN = {"writer": ("score", "topics.jsonl"), "triage": ("right_specialist", "questions.jsonl")}
"""Reward and tasks of each of the settings, whose paths are relative to the root of the repository."""
TWO = ['algorithm.agents.editor={ type = "lora", r = 4 }']

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def train(file: str, folder: Path, *changes: str, config: str = "writer") -> dict[str, float]:
    """The metrics of the last step."""
    name = TEAMS.get(file, "modern")
    home, teams = ENVIRONMENTS / name, EXAMPLES / "teams"
    if not (home / ".installed").exists():
        pytest.skip(f"{home} is not there; run: tests/frameworks/setup.sh {name}")
    score, tasks = GIVEN[config]
    files = [f"reward={teams}/reward.py:{score}", f"data.train={teams}/{tasks}", "--config", f"{teams}/{config}.toml"]
    program = f"{home}/bin/python {EXAMPLES / 'warm.py'} {teams / file}"
    agent = ["--agent", program, "--run", str(folder / "run")]
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


# -- a triage agent that chooses whom it hands over to -----------------------------------------------------------------


@pytest.fixture(scope="module")
def hands_over(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The setting of a tiny model whose triage agent hands over, often to the wrong specialist."""
    home, folder = ENVIRONMENTS / "modern", tmp_path_factory.mktemp("start")
    if not (home / ".installed").exists():
        pytest.skip(f"{home} is not there; run: tests/frameworks/setup.sh modern")
    program = [sys.executable, str(EXAMPLES / "teams" / "handoffs_start.py"), "--output", str(folder)]
    agent = ["--agent", f"{home}/bin/python {EXAMPLES / 'teams' / HANDOFFS}"]
    done = subprocess.run([*program, *agent], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return f"policy.model={folder / 'model'}"


def test_a_triage_agent_learns_whom_to_hand_over_to(hands_over: str, tmp_path: Path) -> None:
    train(HANDOFFS, tmp_path, hands_over, config="triage")
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(step["tokens_trained"] for step in steps) > 0
    for step in steps:
        assert step["tokens_trained"] == step.get("triage/tokens_trained", 0), "that of no other agent"
        assert step["calls_unlisted"] == 0
    assert changed(tmp_path) == {"triage": True}
    held_out = json.loads((tmp_path / "run" / "report.json").read_text())["held_out"]["sampled"]
    assert held_out["interval"][0] > 0, held_out
    frozen, seen = 0, Counter[tuple[str, float | None]]()
    for rollout, spans in trained(tmp_path):
        first, *others = calls(spans)
        speakers = [span.attributes[names.AGENT_NAME] for span in (first, *others)]
        chosen = handed_over(first)[:1]
        assert speakers == ["triage", *chosen], "the SDK makes of the tool call that the specialist answers"
        right = chosen == [rollout.input["specialist"]]
        assert agl.find_final_reward(spans) == float(right)
        frozen += len(others)
        seen[chosen[0] if chosen else "nobody", float(right)] += 1
    assert all(seen[name, right] > 0 for name in ("sums", "words") for right in (0.0, 1.0)), seen
    assert sum(step["calls_frozen"] for step in steps) == frozen


def handed_over(span: agl.Span) -> list[str]:
    """Whom the tool calls of an answer name."""
    (message,) = json.loads(span.attributes[names.OUTPUT_MESSAGES])
    called = [part["name"] for part in message["parts"] if part["type"] == "tool_call"]
    return [name.removeprefix("transfer_to_") for name in called]


def trained(folder: Path) -> list[tuple[agl.Rollout, list[agl.Span]]]:
    """The rollouts that a run learned from, with the spans of the last attempt: an earlier one may have failed."""

    async def spans_of(store: agl.LightningStore, rollout_id: str) -> list[agl.Span]:
        attempt = await store.get_latest_attempt(rollout_id)
        assert attempt is not None
        return list(await store.query_spans(rollout_id, attempt.attempt_id))

    async def read() -> list[tuple[agl.Rollout, list[agl.Span]]]:
        store = agl.LightningStore(str(folder / "run" / "store.db"))
        found = await store.query_rollouts(status_in=["succeeded"], mode_in=["train"])
        result = [(each, await spans_of(store, each.rollout_id)) for each in found]
        await store.close()
        return result

    return asyncio.run(read())


def test_a_specialist_may_learn_together_with_triage(hands_over: str, tmp_path: Path) -> None:
    both = 'algorithm.agents.sums={ type = "lora", r = 4 }'
    step = train(
        HANDOFFS, tmp_path, hands_over, both, "algorithm.steps=2", "evaluation.held_out_tasks=4", config="triage"
    )
    assert step["tokens_trained"] == step["triage/tokens_trained"] + step["sums/tokens_trained"]
    assert changed(tmp_path) == {"triage": True, "sums": True}
