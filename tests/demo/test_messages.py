"""The demo on a pretrained model: its tasks and their score, and the whole command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.models import tiny_checkpoint

from agentlightning.demo import job, messages

PROGRAM = "from agentlightning.cli.main import build; build()()"


def test_a_task_says_what_its_answer_is() -> None:
    for task in messages.make_tasks("train", 50, 1) + messages.make_tasks("test", 50, 1):
        assert task["product"] in task["message"]
        assert task["order"] in task["message"]
    assert (
        messages.make_tasks("train", 5, 1) == messages.make_tasks("train", 5, 1) != messages.make_tasks("train", 5, 2)
    )


def test_the_settings_have_any_name_that_a_user_gives() -> None:
    for name in ("runs/\N{GRINNING FACE}/demonstrations.jsonl", 'a "quoted" \\ é'):
        assert job.settings("messages.toml", policy__model=name).policy.model == name


def test_no_product_and_no_sentence_of_training_is_measured() -> None:
    train, test = messages.make_tasks("train", 2000, 0), messages.make_tasks("test", 2000, 0)
    assert {task["product"] for task in train}.isdisjoint(task["product"] for task in test)
    for sentence in messages.SENTENCES:
        longest = max(re.split(r"\{\w+\}", sentence), key=len)
        found = [any(longest in task["message"] for task in tasks) for tasks in (train, test)]
        assert sum(found) == 1, sentence


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ("A1234", 1.0),
        (" a1234.", 1.0),
        ("Order A1234", 2 / 3),
        ("lamp A1234 A1234", 0.5),
        ("The lamp of order A1234 is broken", 0.25),
        ("A12345", 0.0),
        ("", 0.0),
    ],
)
def test_the_score_is_the_f1_of_the_words(output: str, reward: float) -> None:
    assert messages.score({"product": "lamp", "order": "A1234"}, output) == pytest.approx(reward)


@pytest.mark.integration
def test_any_model_can_be_named(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    command = [sys.executable, "-c", PROGRAM, "demo", "--model", str(model), "--steps", "1", "--json"]
    done = subprocess.run([*command, "--run", "run"], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 1
    assert "agentlightning.demo.messages:read" in (tmp_path / "run" / "config.toml").read_text()
