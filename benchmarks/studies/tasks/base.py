"""What a task for measurements is: episodes of model calls that end with a reward, and the answers that are optimal.

An episode is a generator: it yields its model calls, is sent each answer, and returns its reward. So one definition is
played in lockstep in this process (`tasks.rollouts`), where a step of all episodes is one forward pass, and through an
endpoint compatible with OpenAI's, by calling the environment with a task and an address.

Prompts and answers are words between spaces, one token each (`tasks.word_policy`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import agentlightning as agl

Split = Literal["train", "held_out"]
Task = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One model call."""

    prompt: str
    agent: str = "agent"
    """Who asks."""
    max_words: int = 1
    """The longest answer. One of a single word needs no end of turn."""


Episode = Generator[Call, str, float]


class Environment(ABC):
    """A family of tasks that one policy can solve."""

    name: ClassVar[str]
    optimum: ClassVar[float] = 1.0
    """The expected reward of the best policy."""

    @property
    @abstractmethod
    def words(self) -> tuple[str, ...]:
        """Every word of its prompts and answers."""

    @abstractmethod
    def tasks(self, split: Split, count: int, seed: int = 0) -> list[Task]:
        """`count` different tasks; none of one split is in the other, whatever the seeds."""

    @abstractmethod
    def episode(self, task: Task) -> Episode:
        """One episode."""

    @abstractmethod
    def best_answer(self, task: Task, call: Call) -> str:
        """What the best policy answers to a call of an episode of the task."""

    @abstractmethod
    def demonstrations(self, count: int, seed: int = 0) -> list[tuple[Call, str]]:
        """Calls with answers of mixed quality, which a starting policy imitates: it then explores all that it needs to
        find, and is far from the optimum."""

    def __call__(self, task: Task, base_url: str, model: str = "policy") -> float:
        """One episode through an endpoint compatible with OpenAI's; returns its reward."""
        from openai import OpenAI

        chat = OpenAI(base_url=base_url, api_key="unused").chat.completions
        episode = self.episode(task)
        call = next(episode)
        while True:
            with agl.track_agent(call.agent):
                messages: Any = [{"role": "user", "content": call.prompt}]
                answer = chat.create(model=model, messages=messages, max_tokens=call.max_words)
            try:
                call = episode.send(answer.choices[0].message.content or "")
            except StopIteration as ended:
                return ended.value
