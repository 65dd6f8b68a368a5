"""The finals of a search: its best candidates meet on the validation tasks, which it has not used before.

The favourite meets one challenger after the other, task by task. A sequential test looks at the differences as they
come and stops as soon as it can tell the two apart; where it cannot, the higher mean decides. Results of the favourite
are bought once for all challengers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final

from agentlightning.algorithms.apo.record import Trial
from agentlightning.algorithms.apo.search.base import SearchContext, score_of
from agentlightning.algorithms.apo.text.candidate import Candidate
from agentlightning.evaluation.sequential import PairedSequentialTest, fewest_pairs

WAVE: Final = 5
"""Pairs that run at the same time."""


@dataclass(slots=True)
class Duel:
    """What a comparison of two finalists found."""

    verdict: str
    """better or worse: the challenger is; exhausted: no difference could be shown; budget: it was not finished."""
    pairs: int
    difference: float
    """Mean of challenger - favourite."""
    p_value: float


@dataclass(slots=True)
class Finals:
    """Chooses among the finalists."""

    finalists: list[Candidate]
    """The favourite of the search first."""
    why: str = ""
    """Why the search ended."""
    for_budget: bool = False
    span: float = 1.0
    """The largest difference of two rewards; a larger one counts as this."""
    scores: dict[str, dict[int, float]] = field(default_factory=dict[str, dict[int, float]])
    """Digest -> validation task -> score."""
    duels: list[Duel] = field(default_factory=list[Duel])
    winner: Candidate | None = None

    @property
    def best(self) -> Candidate:
        return self.winner or self.finalists[0]

    async def decide(self, context: SearchContext) -> None:
        """Spend the validation tasks, and choose."""
        best = self.finalists[0]
        if context.validation_tasks:
            for challenger in self.finalists[1:]:
                duel = await self._duel(context, best, challenger)
                self.duels.append(duel)
                if duel.verdict == "better" or (duel.verdict in ("exhausted", "budget") and duel.difference > 0):
                    best = challenger
        self.winner = best

    async def _duel(self, context: SearchContext, best: Candidate, challenger: Candidate) -> Duel:
        tasks = range(context.validation_tasks)
        alpha = context.config.alpha
        test = PairedSequentialTest(alpha, (-self.span, self.span), max_pairs=max(len(tasks), fewest_pairs(alpha)))
        differences: list[float] = []
        verdict, start = "continue", 0
        while verdict == "continue" and start < len(tasks):
            wave = tasks[start : start + WAVE]
            if context.spending.left() < 2 * len(wave) or context.spending.exhausted() is not None:
                verdict = "budget"
                break
            theirs, ours = await self._scores(context, best, wave), await self._scores(context, challenger, wave)
            for mine, other in zip(ours, theirs, strict=True):
                differences.append(mine - other)
                verdict = test.update(max(-self.span, min(self.span, mine - other)))
                if verdict != "continue":
                    break
            start += len(wave)
        mean = fmean(differences) if differences else 0.0
        return Duel("exhausted" if verdict == "continue" else verdict, len(differences), mean, test.p_value)

    async def _scores(self, context: SearchContext, candidate: Candidate, tasks: Sequence[int]) -> list[float]:
        known = self.scores.setdefault(candidate.digest, {})
        missing = [Trial(task, split="validation") for task in tasks if task not in known]
        for outcome in await context.evaluate(candidate, missing):
            known[outcome.task] = score_of(outcome)
        return [known[task] for task in tasks]

    def state_dict(self) -> dict[str, Any]:
        return {
            "finalists": [dict(each.texts) for each in self.finalists],
            "why": self.why,
            "for_budget": self.for_budget,
            "span": self.span,
            "scores": {
                digest: {str(task): value for task, value in known.items()} for digest, known in self.scores.items()
            },
            "duels": [[each.verdict, each.pairs, each.difference, each.p_value] for each in self.duels],
            "winner": None if self.winner is None else dict(self.winner.texts),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Finals:
        winner = state["winner"]
        return cls(
            [Candidate(texts) for texts in state["finalists"]],
            state["why"],
            state["for_budget"],
            state["span"],
            {digest: {int(task): value for task, value in known.items()} for digest, known in state["scores"].items()},
            [Duel(*each) for each in state["duels"]],
            None if winner is None else Candidate(winner),
        )
