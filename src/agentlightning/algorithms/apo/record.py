"""The record of a search: which candidate earned what on which task. Nothing in it is bought twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from agentlightning.algorithms.apo.text.candidate import Candidate

Split = Literal["train", "validation"]
"""The tasks that a search may see. Those held out are the trainer's alone."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One evaluation to make: a task by its place in a split; `repeat` tells repetitions apart."""

    task: int
    repeat: int = 0
    split: Split = "train"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a candidate earned in one rollout."""

    task: int
    score: float | None
    """None: the rollout failed or has no usable reward; it counts as the lowest score seen, or 0."""
    transcript: str = ""
    """The rollout as the critic reads it."""
    tokens: int = 0
    money: float = 0.0

    def as_json(self) -> list[Any]:
        return [self.task, self.score, self.transcript]


class Evaluator(Protocol):
    """Runs the agent with a candidate."""

    async def evaluate(self, candidate: Candidate, trials: Sequence[Trial]) -> list[Outcome]:
        """One rollout for each trial, in their order; they run at the same time."""
        ...
