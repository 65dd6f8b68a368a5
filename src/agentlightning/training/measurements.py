"""The evaluations of a run: validation, which chooses the best checkpoint, held-out reward before and after; trials."""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from agentlightning.algorithms.training import Collected, RolloutReport
from agentlightning.config import EvaluationConfig
from agentlightning.credit.agent_rewards import team_reward, team_score
from agentlightning.credit.assignment import unrewarded
from agentlightning.credit.rejection import describe_reasons
from agentlightning.errors import RewardError
from agentlightning.evaluation.evaluation import WITHOUT_REWARD, Evaluation, comparable_scores
from agentlightning.rollouts import RolloutMode
from agentlightning.training.callbacks import RunAccount
from agentlightning.training.persistence.checkpoints import ResourcePublisher
from agentlightning.training.persistence.run_changes import Tasks
from agentlightning.training.persistence.run_dir import RunState
from agentlightning.training.sources.collector import RolloutCollector, RolloutPlan, describe_failure, read_recordings
from agentlightning.trajectory import RewardWeights

# -- evaluate tasks --------------------------------------------------------------------------------------------------

# Evaluates an agent on tasks: one rollout or several for each, collected through the store.

TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}
"""Sampling temperature of each evaluation mode."""
Scores: TypeAlias = Callable[[Sequence[str]], Awaitable[Mapping[str, float]]]
"""Gives rollouts their rewards, by id."""


async def evaluate_tasks(
    collector: RolloutCollector,
    tasks: Sequence[Any],
    *,
    name: str,
    resources_id: str,
    mode: RolloutMode = "val",
    repeats: int = 1,
    rollout_ids: Sequence[str] | None = None,
    reward_weights: RewardWeights = None,
    max_failed_share: float | None = None,
    require_reward: bool = False,
    scores: Scores | None = None,
    on_progress: Callable[[int], None] | None = None,
    on_collected: Callable[[Collected], Awaitable[None]] | None = None,
) -> Evaluation:
    """The rewards of each task's rollouts, `repeats` of them. Rollout ids begin with `name`, unless they are given,
    task by task: a repeated call continues an interrupted evaluation. `scores`: rewards by rollout id, in place of
    those that the rollouts have.

    Raises TrainingStopped as `RolloutCollector.collect` does where too many rollouts fail, and with `require_reward`
    RewardError where rollouts succeed and none has a usable reward.
    """
    ends = [""] if repeats == 1 else [f"-{repeat}" for repeat in range(repeats)]
    plans = [
        RolloutPlan(f"{name}-{index:05d}{end}", task, f"{name}-{index}{end}")
        for index, task in enumerate(tasks)
        for end in ends
    ]
    if rollout_ids is not None:
        plans = [replace(plan, rollout_id=each) for plan, each in zip(plans, rollout_ids, strict=True)]
    collected = await collector.collect(
        plans,
        resources_id=resources_id,
        mode=mode,
        check=None if scores is not None else lambda trajectories: unrewarded(trajectories, reward_weights, NO_REWARD),
        max_failed_share=max_failed_share,
        max_rejected_share=1.0,
        on_progress=on_progress,
    )
    if require_reward and collected.rejected and not collected.trajectories:
        first = collected.rejected[0]
        raise RewardError(
            f"none of {len(tasks)} tasks has a reward ({describe_reasons(collected.left_out)}). The first rollout,"
            f" {first.rollout_id}: {first.message}"
        )
    if on_collected is not None:
        await on_collected(collected)
    if scores is not None:
        known = await scores([each.rollout_id for each in collected.trajectories])
    else:
        known = {each.rollout_id: team_score(each, reward_weights) for each in collected.trajectories}
    rewards = {each.group: known.get(each.rollout_id) for each in collected.trajectories}
    found = [rewards.get(plan.group) for plan in plans]
    return Evaluation.of_rollouts(
        [found[start : start + repeats] for start in range(0, len(found), repeats)],
        seconds=collected.seconds,
        reasons=collected.left_out,
    )


NO_REWARD: Final = f"it has no reward: {WITHOUT_REWARD}"


@dataclass(slots=True)
class Measurements:
    """Evaluates the present weights and resources, and records the results in the run's state."""

    account: RunAccount
    publisher: ResourcePublisher
    tasks: Tasks
    config: EvaluationConfig
    reward_weights: RewardWeights
    validates: bool = True
    """False: the algorithm chooses its result on the validation tasks itself."""

    @property
    def state(self) -> RunState:
        return self.account.state

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
        modes = self.config.modes
        return {mode: await self.evaluate(self.validation_name(mode), mode, self.validation) for mode in modes}

    def validation_name(self, mode: str) -> str:
        """The beginning of the ids of the rollouts of the step's validation."""
        return self.name(f"validation-{self.state.step:06d}", mode)

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
            name = f"{label}-{mode}"
            if name not in self.state.evaluations:
                done, named = index * len(self.held_out), self.name(purpose, mode)

                def show(count: int, done: int = done) -> None:
                    self.account.progress.update(done + count)

                result = await self.evaluate(named, mode, self.held_out, show, held_out=True, strict=strict)
                self.state.evaluations[name] = list(result.rewards)
                self.state.reasons[name] = dict(result.reasons)
                self.account.write_state()
            rewards, reasons = self.state.evaluations[name], self.state.reasons.get(name, {})
            results[mode] = Evaluation(tuple(rewards), reasons=reasons)
        return results

    def name(self, purpose: str, mode: str) -> str:
        """The beginning of the ids of the rollouts of an evaluation, and its resources."""
        return f"{self.state.run_id}-{purpose}-{mode}{self.state.suffix}"

    async def evaluate(
        self,
        name: str,
        mode: str,
        tasks: Sequence[Any],
        on_progress: Callable[[int], None] | None = None,
        *,
        held_out: bool = False,
        strict: bool = False,
        scores: Scores | None = None,
    ) -> Evaluation:
        """The reward of tasks under the present weights and resources. Failures are part of the result, unless it is
        `strict`."""
        return await evaluate_tasks(
            self.account.collector,
            tasks,
            name=name,
            resources_id=await self.publisher.write(name, {"temperature": TEMPERATURES[mode]}),
            mode="test" if held_out else "val",
            reward_weights=self.reward_weights,
            max_failed_share=None if strict else 1.0,
            require_reward=strict,
            scores=scores,
            on_progress=on_progress,
            on_collected=self.account.name_evaluated,
        )


# -- trials ------------------------------------------------------------------------------------------------------------

# Trials: single rollouts with resources that are being tried, reported with what the agent said and did.


async def run_trials(
    collector: RolloutCollector,
    label: str,
    tasks: Mapping[str, Any],
    resources_id: str,
    reward_weights: RewardWeights,
    metadata: Mapping[str, Any] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> tuple[Collected, list[RolloutReport]]:
    """One rollout of each task; ids begin with `label` and the key of the task. However many fail, the rest counts."""
    plans = [RolloutPlan(f"{label}-{name}", task, name, metadata or {}) for name, task in tasks.items()]
    collected = await collector.collect(
        plans,
        resources_id=resources_id,
        check=lambda trajectories: unrewarded(trajectories, reward_weights, NO_REWARD),
        max_failed_share=1.0,
        on_progress=on_progress,
    )
    outcomes: dict[str, dict[str, Any]] = {each.rollout_id: {"failure": each.message} for each in collected.rejected}
    for each in collected.trajectories:
        outcomes[each.rollout_id] = {"score": team_score(each, reward_weights), "reward": team_reward(each)}
    ids = [*outcomes, *(each.rollout_id for each in collected.failed)]
    reports: dict[str, RolloutReport] = {}
    for rollout_id, found in (await read_recordings(collector.store, ids)).items():
        name = rollout_id.removeprefix(f"{label}-").partition("-again")[0]
        outcome = outcomes.get(rollout_id) or {"failure": describe_failure(found.attempt)}
        reports[name] = RolloutReport(rollout_id, output=found.output, spans=found.spans, **outcome)
    return collected, [reports[name] for name in tasks]
