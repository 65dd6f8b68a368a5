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
from typing import Any

from agentlightning.algorithms.apo.record import Trial
from agentlightning.algorithms.apo.search.base import Search, SearchContext, score_of
from agentlightning.algorithms.apo.text.candidate import Candidate
from agentlightning.algorithms.apo.text.playbook import Playbook


class BeamSearch(Search):
    """See the module."""

    def __init__(self, context: SearchContext) -> None:
        super().__init__(context)
        self.settings = context.config.beam
        self.playbook = Playbook(context.config.playbooks)
        self.beam = [context.seed]
        self.best = context.seed
        self.best_score: float | None = None
        self.round = 0
        self.runs = 0
        """Evaluations so far, which tells repetitions of a task apart."""

    @property
    def favourite(self) -> Candidate:
        return self.best

    @property
    def reserved(self) -> int:
        return 0

    @property
    def smallest_budget(self) -> int:
        batch = min(self.settings.val_batch_size, self.context.validation_tasks)
        return self.settings.gradient_batch_size + 2 * batch

    async def step(self) -> None:
        if self.context.validation_tasks == 0:
            return self.end("there are no validation tasks to score prompts on; give some")
        needed = self.context.validation_tasks
        if self.round == 0 and self.settings.run_initial_validation and self.context.spending.left() >= needed:
            self.best_score = await self._score(self.best, range(self.context.validation_tasks))
        spent = self.context.spending.exhausted()
        if spent is None and self.round < self.settings.beam_rounds:
            await self._round()
            self.round += 1
            spent = self.context.spending.exhausted()
        if spent is not None or self.round >= self.settings.beam_rounds:
            self.end(spent or f"all {self.round} rounds are done", budget=spent is not None)
        return None

    async def _round(self) -> None:
        children = list(self.beam)
        for parent in self.beam:
            for _ in range(self.settings.branch_factor):
                child = await self._child(parent)
                if child is not None and child not in children:
                    children.append(child)
        count = min(self.settings.val_batch_size, self.context.validation_tasks)
        tasks = sorted(self.random.sample(range(self.context.validation_tasks), count))
        scores: dict[Candidate, float] = {}
        for each in children:
            if self.context.spending.left() < len(tasks):
                break
            scores[each] = await self._score(each, tasks)
        if not scores:
            return
        self.beam = sorted(scores, key=lambda each: -scores[each])[: self.settings.beam_width]
        await self._compare(self.beam[0])

    async def _compare(self, first: Candidate) -> None:
        """Score the first of the beam on all validation tasks, and keep it if it is the best so far."""
        if first == self.best or self.context.spending.left() < self.context.validation_tasks:
            return
        score = await self._score(first, range(self.context.validation_tasks))
        if self.best_score is None or score > self.best_score:
            self.best, self.best_score = first, score
            self.context.counts["accepted"] += 1
            self.context.on_favourite(first)

    async def _child(self, parent: Candidate) -> Candidate | None:
        context = self.context
        count = min(self.settings.gradient_batch_size, context.train_tasks, context.spending.left())
        if count == 0:
            return None
        tasks = self.random.sample(range(context.train_tasks), count)
        outcomes = await context.evaluate(parent, self._trials(tasks, "train"))
        critique = await context.writer.critique(parent.texts, outcomes, self.playbook.names)
        if critique is None:
            return None
        self.playbook.count(parent, critique.helpful, critique.harmful)
        proposed = await context.propose(parent, critique.text, (), self.playbook)
        context.counts["proposed"] += proposed is not None
        return None if proposed is None else proposed[0]

    async def _score(self, candidate: Candidate, tasks: Sequence[int]) -> float:
        outcomes = await self.context.evaluate(candidate, self._trials(tasks, "validation"))
        return fmean(map(score_of, outcomes))

    def _trials(self, tasks: Sequence[int], split: Any) -> list[Trial]:
        self.runs += 1
        return [Trial(task, self.runs, split) for task in tasks]

    def state_dict(self) -> dict[str, Any]:
        version, internal, gauss = self.random.getstate()
        return {
            "beam": [dict(each.texts) for each in self.beam],
            "best": dict(self.best.texts),
            "best_score": self.best_score,
            "round": self.round,
            "runs": self.runs,
            "playbook": self.playbook.state_dict(),
            "random": [version, list(internal), gauss],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.beam = [Candidate(texts) for texts in state["beam"]]
        self.best, self.best_score = Candidate(state["best"]), state["best_score"]
        self.round, self.runs = state["round"], state["runs"]
        self.playbook.load_state_dict(state["playbook"])
        version, internal, gauss = state["random"]
        self.random.setstate((version, tuple(internal), gauss))
