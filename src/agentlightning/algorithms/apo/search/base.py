"""The contract of a search: it proposes candidates, has them tried, and says which is the best.

A search is a state machine with one proposal a step. After each step `state_dict` holds all it needs to go on, so a run
that is interrupted continues from its last step; rollouts of the broken step are found in the store again.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentlightning.algorithms.apo.budget import Spending
from agentlightning.algorithms.apo.config import APOConfig
from agentlightning.algorithms.apo.models.critic import Writer
from agentlightning.algorithms.apo.record import Evaluator, Outcome, Trial
from agentlightning.algorithms.apo.text.candidate import Candidate
from agentlightning.algorithms.apo.text.edits import ReplyError, apply_edits, read_edits
from agentlightning.algorithms.apo.text.placeholders import schema_violation
from agentlightning.algorithms.apo.text.playbook import Playbook
from agentlightning.resources import PromptTemplate


class BudgetSpentError(Exception):
    """The budget does not allow the evaluations that a step needs: the step ends there."""


@dataclass(slots=True)
class SearchContext:
    """What a search works with."""

    config: APOConfig
    start: Mapping[str, PromptTemplate]
    """The templates to begin with."""
    train_tasks: int
    validation_tasks: int
    evaluator: Evaluator
    writer: Writer
    spending: Spending
    counts: Counter[str] = field(default_factory=Counter[str])
    """What was proposed, accepted, rejected and skipped, by reason."""
    first: dict[str, str] = field(default_factory=dict[str, str])
    """The first message of each kind of refused edit."""
    on_favourite: Callable[[Candidate], object] = lambda candidate: None
    """Called with the candidate that would be the result if the search ended now."""
    directory: Path = Path()
    """Where a search may keep files of its own."""

    @property
    def seed(self) -> Candidate:
        return Candidate({name: template.template for name, template in self.start.items()})

    async def evaluate(self, candidate: Candidate, trials: Sequence[Trial]) -> list[Outcome]:
        """Outcomes, accounted for. Raises BudgetSpentError where the budget does not allow so many."""
        if self.spending.left() < len(trials):
            raise BudgetSpentError
        outcomes = await self.evaluator.evaluate(candidate, trials) if trials else []
        for outcome in outcomes:
            self.spending.count_evaluation(outcome.tokens, outcome.money)
        self.counts["failed_rollouts"] += sum(outcome.score is None for outcome in outcomes)
        return outcomes

    def check(self, candidate: Candidate) -> None:
        """Raises ReplyError for a candidate that does not keep the placeholders of its templates."""
        for name, template in self.start.items():
            problem = schema_violation(template, candidate.texts[name])
            if problem is not None:
                raise ReplyError("schema_violations", f"an edit of {name!r} {problem}")

    def refuse(self, error: ReplyError) -> None:
        """Count an edit that cannot be used."""
        self.counts[error.reason] += 1
        self.first.setdefault(error.reason, str(error))

    async def propose(
        self, parent: Candidate, critique: str, rejected: Sequence[str], playbook: Playbook
    ) -> tuple[Candidate, str] | None:
        """A child with the editor's bounded edits, and these in words. None: there was none, which is counted."""
        config = self.config
        reply = await self.writer.edit(parent.texts, critique, rejected, playbook.notes(parent))
        if reply is None:
            return None
        try:
            edits, dropped = read_edits(reply, config.max_edits, config.max_edit_chars)
        except ReplyError as error:
            self.writer.refuse(error, reply)
            return None
        self.counts["edits_left_out"] += dropped
        try:
            child = playbook.pruned(apply_edits(parent, edits))
            self.check(child)
        except ReplyError as error:
            self.refuse(error)
            self.writer.refuse(error, reply)
            return None
        self.writer.accept()
        if child == parent:
            self.counts["unchanged"] += 1
            return None
        return child, "; ".join(map(str, edits))


class Search(ABC):
    """A way to find better texts."""

    def __init__(self, context: SearchContext) -> None:
        self.context = context
        self.random = random.Random(context.config.seed)
        self.ended: str | None = None
        """Why the search ended, in words; None while it goes on."""
        self.ended_for_budget = False

    @property
    @abstractmethod
    def favourite(self) -> Candidate:
        """The candidate that would be the result if the search ended now."""

    @property
    @abstractmethod
    def reserved(self) -> int:
        """Evaluations that are put aside for validation."""

    @property
    @abstractmethod
    def smallest_budget(self) -> int:
        """Evaluations below which nothing can be shown."""

    @abstractmethod
    async def step(self) -> None:
        """One proposal. Sets `ended` where it is the last."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that the search has learned, as JSON holds it."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def reopen(self) -> None:
        """Go on with a search that ended, because its budget has grown."""
        self.ended, self.ended_for_budget = None, False

    def end(self, why: str, *, budget: bool = False) -> None:
        self.ended, self.ended_for_budget = why, budget


def score_of(outcome: Outcome, lowest: float = 0.0) -> float:
    """The score of an outcome; a failed rollout has the lowest."""
    return lowest if outcome.score is None else outcome.score
