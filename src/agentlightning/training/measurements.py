"""The evaluations of a run: validation, which chooses the best checkpoint, and held-out reward before and after."""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.algorithms.training import Collected
from agentlightning.config import EvaluationConfig
from agentlightning.evaluation.evaluation import Evaluation, comparable_scores
from agentlightning.training.evaluate_tasks import TEMPERATURES, evaluate_tasks
from agentlightning.training.persistence.run_dir import RunState
from agentlightning.training.persistence.tasks import Tasks
from agentlightning.training.publisher import ResourcePublisher
from agentlightning.training.sources.collector import RolloutCollector


@dataclass(slots=True)
class Measurements:
    """Evaluates the present weights and resources, and records the results in the run's state."""

    collector: RolloutCollector
    publisher: ResourcePublisher
    state: RunState
    tasks: Tasks
    config: EvaluationConfig
    reward_weights: Mapping[str, float] | None
    on_collected: Callable[[Collected], Awaitable[None]]
    on_progress: Callable[[int], None]
    write_state: Callable[[], None]
    validates: bool = True
    """False: the algorithm chooses its result on the validation tasks itself."""

    @property
    def validation(self) -> Sequence[Any]:
        return self.tasks.validation[: self.config.tasks]

    @property
    def held_out(self) -> Sequence[Any]:
        return self.tasks.held_out[: self.config.held_out_tasks]

    @property
    def rollouts(self) -> int:
        """The number of rollouts of one held-out measurement."""
        return len(self.held_out) * len(self.config.modes)

    # -- validation ----------------------------------------------------------------------------------------------------

    def validation_is_due(self, total_steps: int) -> bool:
        every, step = self.config.every, self.state.step
        return (
            self.validates and every > 0 and (step % every == 0 or step == total_steps) and bool(self.tasks.validation)
        )

    async def validate(self) -> dict[str, Evaluation]:
        """The reward of the validation tasks, by mode."""
        label = f"validation-{self.state.step:06d}"
        return {mode: await self.evaluate(label, mode, self.validation) for mode in self.config.modes}

    def validation_name(self, mode: str) -> str:
        """The beginning of the ids of the rollouts of the step's validation."""
        return f"{self.state.run_id}-validation-{self.state.step:06d}-{mode}{self.state.suffix}"

    def is_best(self, results: Mapping[str, Evaluation]) -> bool:
        """Whether these are as good as the best validation so far, and if so record them. Tasks without a reward count
        as the lowest reward of both."""
        best = [self.state.evaluations.get(f"best-{mode}", []) for mode in results]
        scores = comparable_scores([*results.values(), *(Evaluation(tuple(rewards)) for rewards in best)])
        score = statistics.fmean(scores[: len(results)])
        best_score = statistics.fmean(scores[len(results) :]) if all(best) else self.state.best_score
        better = not math.isinf(score) and (best_score is None or score >= best_score)
        if better:
            self.state.best_score = score
            self.state.evaluations |= {f"best-{mode}": list(result.rewards) for mode, result in results.items()}
        return better

    # -- held-out tasks ------------------------------------------------------------------------------------------------

    async def measure_start(self) -> dict[str, Evaluation]:
        """Held-out reward of the starting policy. Raises TrainingStopped where more rollouts fail than the run allows,
        and RewardError where there is no reward at all."""
        return await self._measure("before", "before", strict=True)

    async def measure_stage(self, place: int) -> dict[str, Evaluation]:
        """Held-out reward of what a stage has left."""
        return await self._measure(f"stage-{place}", f"stage-{place:02d}", strict=False)

    async def measure_trained(self) -> dict[str, Evaluation]:
        """Held-out reward of the present weights, the best or the last ones; again where a run that was finished has
        continued to others."""
        step = self.state.step if self.state.best_step is None else self.state.best_step
        if self.state.measured_step != step:
            self.state.measured_step = step
            for mode in self.config.modes:
                self.state.evaluations.pop(f"after-{mode}", None)
                self.state.reasons.pop(f"after-{mode}", None)
        return await self._measure("after", f"after-{step:06d}", strict=False)

    async def _measure(self, label: str, purpose: str, *, strict: bool) -> dict[str, Evaluation]:
        """Held-out reward by mode, measured once for each label in the life of a run. `purpose` names its rollouts."""
        results: dict[str, Evaluation] = {}
        for index, mode in enumerate(self.config.modes):
            name, done = f"{label}-{mode}", index * len(self.held_out)
            if name not in self.state.evaluations:
                result = await self.evaluate(
                    purpose, mode, self.held_out, lambda count, done=done: self.on_progress(done + count), strict
                )
                self.state.evaluations[name] = list(result.rewards)
                self.state.reasons[name] = dict(result.reasons)
                self.write_state()
            rewards, reasons = self.state.evaluations[name], self.state.reasons.get(name, {})
            results[mode] = Evaluation(tuple(rewards), reasons=reasons)
        return results

    async def evaluate(
        self,
        label: str,
        mode: str,
        tasks: Sequence[Any],
        on_progress: Callable[[int], None] | None = None,
        strict: bool = False,
    ) -> Evaluation:
        """The reward of tasks under the present weights and resources. Failures are part of the result."""
        name = f"{self.state.run_id}-{label}-{mode}{self.state.suffix}"
        return await evaluate_tasks(
            self.collector,
            tasks,
            name=name,
            resources_id=await self.publisher.write(name, {"temperature": TEMPERATURES[mode]}),
            reward_weights=self.reward_weights,
            max_failed_share=None if strict else 1.0,
            require_reward=strict,
            on_progress=on_progress,
            on_collected=self.on_collected,
        )
