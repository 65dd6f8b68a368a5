"""What the searches for better texts have in common; `reflective.py`, `beam.py` and `gepa.py` are the three of them.

A search proposes candidates, has them tried, and says which is the best. It is a state machine with one proposal a
step. After each step `state_dict` holds all it needs to go on, so a run that is interrupted continues from its last
step; rollouts of the broken step are found in the store again.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentlightning.algorithms.apo.config import APOConfig, Spending
from agentlightning.algorithms.apo.models import Writer
from agentlightning.algorithms.apo.text import (
    Candidate,
    Playbook,
    ReplyError,
    apply_edits,
    read_edits,
    schema_violation,
)
from agentlightning.algorithms.apo.trials import Evaluator, Outcome, Trial
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
        """Raises ReplyError, and counts it, for a candidate that does not keep the placeholders of its templates."""
        for name, template in self.start.items():
            problem = schema_violation(template, candidate.texts[name])
            if problem is not None:
                raise self.refused(ReplyError("schema_violations", f"an edit of {name!r} {problem}"))

    def refused(self, error: ReplyError) -> ReplyError:
        """The error of an edit that cannot be used, counted."""
        self.counts[error.reason] += 1
        self.first.setdefault(error.reason, str(error))
        return error

    async def propose(
        self, parent: Candidate, critique: str, rejected: Sequence[str], playbook: Playbook
    ) -> tuple[Candidate, str] | None:
        """A child with the editor's bounded edits, and these in words. None: there was none, which is counted."""
        reply = await self.writer.edit(parent.texts, critique, rejected, playbook.notes(parent))
        if reply is None:
            return None
        try:
            edits, dropped = read_edits(reply, self.config.max_edits, self.config.max_edit_chars)
            self.counts["edits_left_out"] += dropped
            try:
                child = playbook.pruned(apply_edits(parent, edits))
            except ReplyError as error:
                raise self.refused(error) from None
            self.check(child)
        except ReplyError as error:
            self.writer.refuse(error, reply)
            return None
        self.writer.accept()
        if child == parent:
            self.counts["unchanged"] += 1
            return None
        return child, "; ".join(map(str, edits))


class Search(ABC):
    """A way to find better texts."""

    reserved = 0
    """Evaluations that are put aside for validation."""

    def __init__(self, context: SearchContext) -> None:
        self.context = context
        self.random = random.Random(context.config.seed)
        self.playbook = Playbook(context.config.playbooks)
        self.best = context.seed
        self.ended: str | None = None
        """Why the search ended, in words; None while it goes on."""
        self.ended_for_budget = False

    @property
    def favourite(self) -> Candidate:
        """The candidate that would be the result if the search ended now."""
        return self.best

    @property
    @abstractmethod
    def smallest_budget(self) -> int:
        """Evaluations below which nothing can be shown."""

    @abstractmethod
    async def step(self) -> None:
        """One proposal. Sets `ended` where it is the last."""

    def state_dict(self) -> dict[str, Any]:
        """All that the search has learned, as JSON holds it."""
        version, internal, gauss = self.random.getstate()
        return {"playbook": self.playbook.state_dict(), "random": [version, list(internal), gauss]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        version, internal, gauss = state["random"]
        self.playbook.load_state_dict(state["playbook"])
        self.random.setstate((version, tuple(internal), gauss))

    def reopen(self) -> None:
        """Go on with a search that ended, because its budget has grown."""
        self.ended, self.ended_for_budget = None, False

    def end(self, why: str, *, budget: bool = False) -> None:
        self.ended, self.ended_for_budget = why, budget

    async def write(
        self, parent: Candidate, rollouts: Sequence[Outcome], rejected: Sequence[str] = ()
    ) -> tuple[Candidate, str] | None:
        """A child of the critic's and the editor's, after these rollouts, and the edits in words. None: there is none,
        which is counted. `rejected`: edits that did not help."""
        critique = await self.context.writer.critique(parent.texts, rollouts, self.playbook.names)
        if critique is None:
            return None
        self.playbook.count(parent, critique.helpful, critique.harmful)
        return await self.context.propose(parent, critique.text, rejected, self.playbook)


def score_of(outcome: Outcome) -> float:
    """The score of an outcome; a failed rollout has 0."""
    return outcome.score or 0.0
