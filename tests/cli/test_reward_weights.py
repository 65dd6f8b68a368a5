"""Rewards of several dimensions on the command line: weighed as the run does, or as the option says, or named."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner, Result

import agentlightning as agl
from agentlightning import span as names
from agentlightning.cli.main import build
from agentlightning.span import new_span_id
from agentlightning.training.persistence.run_dir import RunDir, RunState

pytestmark = pytest.mark.integration

Agl = Callable[..., Result]
REWARDS = {"right": 1.0, "short": 1.0}, {"right": 0.0, "short": 1.0}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose two rollouts of one task have rewards of two dimensions; its settings weigh them."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run"
    made = RunDir.create(path)
    made.write_state(RunState("run1"))
    made.close()
    (path / "config.toml").write_text("[algorithm]\nreward_weights = {right = 1.0, short = 0.1}\n")
    asyncio.run(record(path / "store.db"))
    return path


async def record(path: Path) -> None:
    store = agl.LightningStore(path)
    for number, reward in enumerate(REWARDS):
        rollout = await store.start_rollout({"q": 1}, mode="train", rollout_id=f"run1-train-{number}")
        ids = rollout.rollout_id, rollout.attempt.attempt_id
        said = {
            names.OPERATION_NAME: "chat",
            names.INPUT_MESSAGES: message("user", "a question"),
            names.OUTPUT_MESSAGES: message("assistant", f"answer {number}"),
        }
        for name, attributes in (("chat", said), (names.REWARD, {names.REWARD_VALUES: reward})):
            await store.add_span(agl.Span(*ids, name, 0.0, span_id=new_span_id(), attributes=attributes))
        await store.update_attempt(*ids, status="succeeded")
    await store.close()


def message(role: str, content: str) -> str:
    return orjson.dumps([{"role": role, "parts": [{"type": "text", "content": content}]}]).decode()


def call(*words: Any) -> Any:
    done = CliRunner().invoke(build(), [*map(str, words), "--json"])
    found = json.loads(done.output.strip().splitlines()[-1])
    return found if done.exit_code == 0 else found["error"]["message"]


@pytest.mark.parametrize("option", [(), ("--reward-weights", '{"right": 0.0, "short": 1.0}')])
def test_the_list_of_rollouts_weighs_them_as_the_run_does_or_the_option_says(run: Path, option: Any) -> None:
    rows = call("store", "list", "--run", run, "--sort", "reward", *option)["rollouts"]
    assert [row["reward_number"] for row in rows] == pytest.approx([1.0, 1.0] if option else [0.1, 1.1])


def test_without_weights_the_list_shows_the_dimensions(run: Path) -> None:
    (run / "config.toml").unlink()
    assert call("store", "list", "--run", run)["rollouts"][0]["reward"] == REWARDS[1]
    shown = CliRunner().invoke(build(), ["store", "list", "--run", str(run)]).output
    assert "right=0 short=1" in shown


@pytest.mark.parametrize("form", ["openai-jsonl", "trl-jsonl", "dpo-jsonl"])
def test_an_export_selects_by_the_weighed_reward(run: Path, form: str) -> None:
    selected = () if form == "dpo-jsonl" else ("--min-reward", 0.5)
    assert call("export", run, "--to", form, *selected)["records"] == 1
    if form != "dpo-jsonl":
        heavy = ("--reward-weights", '{"right": 0.0, "short": 1.0}', "--out", run / "all.jsonl")
        assert call("export", run, "--to", form, *selected, *heavy)["records"] == 2


def test_without_weights_an_export_names_the_dimensions(run: Path) -> None:
    (run / "config.toml").write_text("")
    assert "right and short, without weights (--reward-weights)" in call("export", run, "--to", "openai-jsonl")


def test_supervised_learning_and_preferences_name_them_too(run: Path) -> None:
    (run / "config.toml").write_text("")
    for verb in ("sft", "dpo"):
        said = call(verb, "--store", run / "store.db", "--model", "tiny", "--run", run.parent / verb)
        assert "no weight for reward dimensions ['right', 'short']" in said, said
        assert "--reward-weights" in said
        assert not (run.parent / verb).exists()


@pytest.mark.parametrize("option", [(), ("--reward-weights", '{"right": 3.0, "short": 1.0}')])
def test_supervised_learning_selects_by_the_weighed_reward(run: Path, option: Any) -> None:
    words = ("sft", "--store", run / "store.db", "--model", "tiny", "--threshold", 5, "--run", run.parent / "sft")
    assert ("from 1 to 4" if option else "from 0.1 to 1.1") in call(*words, *option)
