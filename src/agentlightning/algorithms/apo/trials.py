"""Has a run try candidates: rollouts of its agent, as outcomes of a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.algorithms.apo.config import SearchBudget
from agentlightning.algorithms.apo.record import Outcome, Trial
from agentlightning.algorithms.apo.text.candidate import Candidate
from agentlightning.algorithms.apo.transcript import transcript, usage
from agentlightning.algorithms.training import RolloutReport, Training
from agentlightning.resources import PromptTemplate


@dataclass(frozen=True, slots=True)
class RunEvaluator:
    """Implements `record.Evaluator` with the rollouts of a training run."""

    training: Training
    start: Mapping[str, PromptTemplate]
    budget: SearchBudget
    """With the prices of the agent's calls."""

    async def evaluate(self, candidate: Candidate, trials: Sequence[Trial]) -> list[Outcome]:
        tasks = {f"{candidate.digest}-{each.split}{each.task:05d}-{each.repeat}": self._task(each) for each in trials}
        reports = await self.training.try_resources(dict(templates(self.start, candidate)), tasks)
        found = dict(zip(tasks, reports, strict=True))
        rows = zip(trials, tasks.items(), strict=True)
        return [self._outcome(each, task, found[name]) for each, (name, task) in rows]

    def _outcome(self, trial: Trial, task: Any, report: RolloutReport) -> Outcome:
        return Outcome(trial.task, report.score, transcript(task, report), *usage(report.spans, self.budget))

    def _task(self, trial: Trial) -> Any:
        tasks = self.training.train_tasks if trial.split == "train" else self.training.validation_tasks
        return tasks[trial.task]


def templates(start: Mapping[str, PromptTemplate], candidate: Candidate) -> dict[str, PromptTemplate]:
    """The templates with the texts of a candidate."""
    return {name: start[name].model_copy(update={"template": text}) for name, text in candidate.texts.items()}
