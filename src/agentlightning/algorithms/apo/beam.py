"""Search "beam": textual gradients with a beam of prompts (ProTeGi, Pryzant et al. 2023, arXiv:2305.03495, algorithm
1).

Each round, every prompt of the beam gets `branch_factor` children: the critic reads `gradient_batch_size` rollouts of
the parent (the textual gradient), and the editor applies what it says. All prompts are then scored on `val_batch_size`
validation tasks, and the best `beam_width` stay. The best of each round is scored on all validation tasks; the best of
these is the result. This is what `agl.APO` of Agent Lightning 0.x did, with edits that are bounded and checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, ClassVar

from agentlightning.algorithms.apo.search import Outcome, Search, Split, Trial, score_of
from agentlightning.algorithms.apo.text import Texts


class BeamSearch(Search):
    """See the module."""

    learned: ClassVar[Mapping[str, Any]] = {
        "beam": list[dict[str, str]],
        "best": dict[str, str],
        "best_score": float | None,
        "round": int,
        "runs": int,
    }

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.settings = self.config.beam
        self.beam: list[Texts] = [self.best]
        self.best_score: float | None = None
        self.round = 0
        self.runs = 0
        """Evaluations so far, which tells repetitions of a task apart."""

    @property
    def smallest_budget(self) -> int:
        return self.settings.gradient_batch_size + 2 * min(self.settings.val_batch_size, self.validation_tasks)

    async def step(self) -> None:
        spending, tasks, rounds = self.spending, range(self.validation_tasks), self.settings.beam_rounds
        if not tasks:
            return await self.end("there are no validation tasks to score prompts on; give some")
        if self.round == 0 and self.settings.run_initial_validation and spending.left() >= len(tasks):
            self.best_score = await self._score(self.best, tasks)
        if spending.exhausted() is None and self.round < rounds:
            await self._round()
            self.round += 1
        spent = spending.exhausted()
        if spent is not None or self.round >= rounds:
            await self.end(spent or f"all {self.round} rounds are done", budget=spent is not None)
        return None

    async def _round(self) -> None:
        children = list(self.beam)
        for parent in self.beam:
            for _ in range(self.settings.branch_factor):
                child = await self._child(parent)
                if child is not None and child not in children:
                    children.append(child)
        everything = range(self.validation_tasks)
        tasks = sorted(self.random.sample(everything, min(self.settings.val_batch_size, len(everything))))
        scores: list[tuple[float, Texts]] = []
        for each in children:
            if self.spending.left() < len(tasks):
                break
            scores.append((await self._score(each, tasks), each))
        scores.sort(key=lambda scored: -scored[0])
        self.beam = [each for _, each in scores[: self.settings.beam_width]] or self.beam
        first = self.beam[0]
        if not scores or first == self.best or self.spending.left() < len(everything):
            return
        score = await self._score(first, everything)
        if self.best_score is None or score > self.best_score:
            self.best, self.best_score = first, score
            self.counts["accepted"] += 1
            self.show_favourite()

    async def _child(self, parent: Texts) -> Texts | None:
        count = min(self.settings.gradient_batch_size, self.train_tasks, self.spending.left())
        if count == 0:
            return None
        found = await self.write(parent, await self._run(parent, self.random.sample(range(self.train_tasks), count)))
        self.counts["proposed"] += found is not None
        return None if found is None else found[0]

    async def _score(self, candidate: Texts, tasks: Sequence[int]) -> float:
        return fmean(map(score_of, await self._run(candidate, tasks, "validation")))

    async def _run(self, candidate: Texts, tasks: Sequence[int], split: Split = "train") -> list[Outcome]:
        self.runs += 1
        return await self.run_trials(candidate, [Trial(task, self.runs, split) for task in tasks])
