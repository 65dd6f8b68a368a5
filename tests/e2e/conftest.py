"""A small but whole training job: an agent, a reward, tasks, and the `agl` program."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

AGENT = """
from openai import OpenAI

CLIENT = OpenAI()


def say(word: str) -> str:
    answer = CLIENT.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": f"say {word}"}], max_tokens=6
    )
    return answer.choices[0].message.content or ""
"""
REWARD = """
def letters(task, output):
    return sum(character.isalpha() for character in output) / max(1, len(output))
"""
SMALL = [
    "algorithm.tasks_per_step=4",
    "algorithm.group_size=4",
    "algorithm.optimizer.lr=1e-3",
    "evaluation.every=0",
    "runner.concurrency=16",
]
AGL = str(Path(sys.executable).parent / "agl")


class Job:
    """A directory with everything a training run needs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "agent.py").write_text(AGENT)
        (directory / "reward.py").write_text(REWARD)
        words = ["red", "green", "blue", "white", "black", "pink", "grey", "brown", "gold", "teal"]
        (directory / "tasks.jsonl").write_text("".join(json.dumps({"word": word}) + "\n" for word in words))

    @property
    def arguments(self) -> list[str]:
        return ["--agent", "agent.py:say", "--reward", "reward.py:letters", "--data", "tasks.jsonl", *SMALL]

    def command(self, *arguments: str) -> list[str]:
        return [AGL, "train", *self.arguments, *arguments]

    def run(self, command: list[str], **options) -> subprocess.CompletedProcess:
        return subprocess.run(
            command, cwd=self.directory, env=self.environment, capture_output=True, text=True, timeout=300, **options
        )

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1", "OPENAI_API_KEY": "sk-of-its-user"}


@pytest.fixture
def job(tmp_path) -> Job:
    return Job(tmp_path)
