"""A training run under way: the `Training` an algorithm is handed, with its evaluations, checkpoints and figures.

It knows the policy, the store and the run directory, and none of how they were brought up (that is `trainer.py`).
After every step the run directory holds all that is needed to go on from there.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentlightning.chat.base import ChatFormat
from agentlightning.config import TrainConfig
from agentlightning.credit.rejection import Check, count_reasons
from agentlightning.evaluation.evaluation import Evaluation, evaluate_tasks
from agentlightning.evaluation.intervals import lowest_means
from agentlightning.policy.base import Policy
from agentlightning.resources import LLM, NamedResources, ProxyLLM
from agentlightning.store.base import LightningStoreBase
from agentlightning.task import TaskSampler
from agentlightning.training.health import staleness, warnings_of
from agentlightning.training.rollout_source import Collected, RolloutPlan, RolloutSource
from agentlightning.training.run_dir import RunDir, RunState
from agentlightning.trajectory import TrainingSample
from agentlightning.util.progress import Progress

TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}


@dataclass(slots=True)
class Tasks:
    """The tasks of a run, no two parts sharing one."""

    train: list[Any]
    validation: list[Any] = field(default_factory=list[Any])
    held_out: list[Any] = field(default_factory=list[Any])


@dataclass(slots=True)
class TrainingRun:
    """Implements `algorithms.base.Training`."""

    config: TrainConfig
    run_dir: RunDir
    state: RunState
    store: LightningStoreBase
    policy: Policy
    source: RolloutSource
    tasks: Tasks
    server_url: str
    updating: Callable[[], AbstractAsyncContextManager[bool]]
    """Holds model calls back while its body changes the weights; yields whether some are under way, to go on then."""
    progress: Progress
    total_steps: int
    reward_weights: Mapping[str, float] | None = None
    target_agent: str | None = None
    """Which agents are to be trained, as the agent itself says."""
    resources: NamedResources = field(default_factory=dict[str, Any])
    """What agents are given beside the policy."""
    named: set[str] = field(default_factory=set[str])
    """Reasons for leaving rollouts out that were shown."""
    collections: int = 0
    """Requests for rollouts within the step under way."""
    records: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """The figures of each step so far."""
    since: float = field(default_factory=time.monotonic)
    """When this process took the run up, or last noted the time spent."""

    @property
    def step(self) -> int:
        return self.state.step

    @property
    def chat(self) -> ChatFormat:
        return self.policy.chat

    @property
    def context_length(self) -> int:
        return self.policy.context_length

    # -- rollouts ------------------------------------------------------------------------------------------------------

    async def collect(
        self,
        *,
        tasks: int,
        group_size: int,
        temperature: float,
        check: Check | None = None,
        timeout_reward: float | None = None,
    ) -> Collected:
        step = self.state.step
        prefix = step_name(self.state, step) + (f"-part{self.collections}" if self.collections else "")
        self.collections += 1
        name = prefix + self.state.suffix
        drawn = TaskSampler(self.tasks.train, tasks, self.config.run.seed).draw(step)
        plans = [
            RolloutPlan(f"{name}-{index:04d}-{member:03d}", task, f"{name}-{index:04d}")
            for index, task in enumerate(drawn)
            for member in range(group_size)
        ]
        resources_id = await self._publish(prefix, temperature)
        collected = await self.source.collect(
            plans,
            resources_id=resources_id,
            check=check,
            timeout_reward=timeout_reward,
            on_progress=lambda done: self.progress.update(step, rollouts=f"{done}/{len(plans)}"),
        )
        self.state.rollouts += len(plans)
        await self._account(collected)
        return collected

    async def _account(self, collected: Collected) -> None:
        """Count the training rollouts that are of no use, and name the first of each kind."""
        self.state.failed_rollouts += len(collected.failed)
        for reason, count in count_reasons(collected.rejected).items():
            self.state.rejected[reason] = self.state.rejected.get(reason, 0) + count
        await self._name(collected)

    async def _name(self, collected: Collected) -> None:
        if not collected.left_out.keys() - self.named:
            return
        for reason, first in (await self.source.first_of_each_reason(collected)).items():
            if reason not in self.named:
                self.named.add(reason)
                self.progress.note(
                    f"rollout {first.rollout_id} is left out ({reason.replace('_', ' ')}): {first.message}\n"
                    "  further ones are counted: metrics.jsonl, report.json"
                )

    async def _publish(self, resources_id: str, temperature: float) -> str:
        """The newest weights under a name of their own; again under the same name after a crash, at the new address."""
        llm = ProxyLLM(
            endpoint=self.server_url,
            model=self.policy.model,
            sampling_parameters={"temperature": temperature},
            policy_version=self.policy.policy_version,
        )
        resources: NamedResources = {**self.resources, "llm": llm}
        if await self.store.get_resources_by_id(resources_id) is None:
            await self.store.add_resources(resources, resources_id)
        else:
            await self.store.update_resources(resources_id, resources)
        return resources_id

    async def update(self, samples: Sequence[TrainingSample], **options: Any) -> Mapping[str, float]:
        own, asked = dict(staleness(samples, self.policy.policy_version)), time.monotonic()
        async with self.updating() as in_flight:
            own["drain_seconds"] = time.monotonic() - asked
            options = {"token_budget": self.config.policy.token_budget, **options}
            figures = await self.policy.train(samples, in_flight=in_flight, **options)
        return {**figures, **own}

    async def save(self, directory: Path) -> None:
        await self.policy.save(directory)

    async def load(self, directory: Path) -> None:
        """Go back to the weights of a checkpoint."""
        async with self.updating() as in_flight:
            await self.policy.load(directory, in_flight=in_flight)

    async def finish_step(self, collected: Collected, figures: Mapping[str, float]) -> None:
        state = self.state
        state.step += 1
        self.collections = 0
        state.skipped_groups += int(figures.get("groups", 0) - figures.get("groups_trained", 0))
        reasons = count_reasons(collected.rejected)
        record = {
            "step": state.step,
            **({"revision": state.revision} if state.revision else {}),
            **figures,
            "rollouts": state.rollouts,
            "failed": len(collected.failed),
            "timeouts": collected.timeouts,
            "rejected": len(collected.rejected),
            **{f"rejected_{reason}": count for reason, count in reasons.items()},
            "tokens_per_second": collected.sampled_tokens / max(collected.seconds, 1e-9),
            "collect_seconds": collected.seconds,
        }
        record |= await self._validate() if self._time_to_validate() else {}
        self.run_dir.append_metrics(record)
        self.records.append(record)
        self.warn(warnings_of([each for each in self.records if each.get("revision", 0) == state.revision]))
        if state.step % self.config.run.checkpoint_every == 0 or state.step == self.total_steps:
            await self.checkpoint()
        shown = {name: figures[name] for name in ("reward", "loss") if name in figures}
        if "reward" in shown:
            shown = {"reward": shown["reward"], "tokens_per_second": record["tokens_per_second"]}
        self.progress.update(state.step, **shown)

    def warn(self, found: Mapping[str, str]) -> None:
        """Show each kind of warning once in the life of the run, and keep it for the result."""
        for kind, text in found.items():
            if kind not in self.state.warnings:
                self.state.warnings[kind] = f"step {self.state.step}: {text}" if self.state.step else text
                self.progress.note(f"warning: {self.state.warnings[kind]}")

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    async def checkpoint(self) -> None:
        """Keep the weights and the training state, then say so in state.json; only then does the step count."""
        directory = await self._save_weights()
        self.state.checkpoint = self._relative(directory)
        self.write_state()
        self.run_dir.prune_checkpoints(self.state, self.config.run.keep_checkpoints)

    async def _save_weights(self) -> Path:
        directory = self.run_dir.checkpoint(self.state.step)
        await self.policy.save(directory, training_state=True)
        return directory

    def _relative(self, directory: Path) -> str:
        return str(directory.relative_to(self.run_dir.path))

    def write_state(self) -> None:
        now = time.monotonic()
        self.state.seconds += now - self.since
        self.since = now
        self.run_dir.write_state(self.state)

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def _time_to_validate(self) -> bool:
        every = self.config.evaluation.every
        due = every > 0 and (self.state.step % every == 0 or self.state.step == self.total_steps)
        return due and bool(self.tasks.validation)

    async def _validate(self) -> dict[str, float]:
        tasks = self.tasks.validation[: self.config.evaluation.tasks]
        label = f"validation-{self.state.step:06d}"
        results = {mode: await self._evaluate(label, mode, tasks) for mode in self.config.evaluation.modes}
        if self._is_best(results):
            self.state.evaluations |= {f"best-{mode}": list(result.rewards) for mode, result in results.items()}
            self.state.best_step = self.state.step
            self.state.best_checkpoint = self._relative(await self._save_weights())
        return {
            **{f"validation_{mode}": result.mean if result.known else math.nan for mode, result in results.items()},
            **{f"missing_validation_{mode}": result.missing for mode, result in results.items() if result.missing},
        }

    def _is_best(self, results: Mapping[str, Evaluation]) -> bool:
        """Whether this is as good as the best validation so far, tasks without a reward at the lowest one of both."""
        best = [self.state.evaluations.get(f"best-{mode}", []) for mode in results]
        scores = lowest_means(*(result.rewards for result in results.values()), *best)
        score = statistics.fmean(scores[: len(results)])
        known_best = statistics.fmean(scores[len(results) :]) if all(best) else self.state.best_score
        better = not math.isinf(score) and (known_best is None or score >= known_best)
        if better:
            self.state.best_score = score
        return better

    async def measure_trained(self) -> dict[str, Evaluation]:
        """Held-out reward of the present weights, which are the best or the last ones; anew where a run that was
        finished has gone on to others."""
        step = self.state.step if self.state.best_step is None else self.state.best_step
        if self.state.measured_step != step:
            self.state.measured_step = step
            for mode in self.config.evaluation.modes:
                self.state.evaluations.pop(f"after-{mode}", None)
                self.state.reasons.pop(f"after-{mode}", None)
        return await self.measure("after", purpose=f"after-{step:06d}")

    async def measure(self, label: str, *, purpose: str | None = None, strict: bool = False) -> dict[str, Evaluation]:
        """Held-out reward of the present weights, by mode; measured once for each label in the life of a run.

        `purpose` makes the ids of its rollouts; None: the label. Failures are part of the result. `strict` raises
        TrainingStopped where more rollouts fail than the run allows, and RewardError where there is no reward at all.
        """
        tasks = self.tasks.held_out[: self.config.evaluation.held_out_tasks]
        results: dict[str, Evaluation] = {}
        for index, mode in enumerate(self.config.evaluation.modes):
            name = f"{label}-{mode}"
            if name not in self.state.evaluations:
                offset = index * len(tasks)
                result = await self._evaluate(
                    purpose or label, mode, tasks, lambda done, o=offset: self.progress.update(o + done), strict
                )
                self.state.evaluations[name] = list(result.rewards)
                self.state.reasons[name] = dict(result.reasons)
                self.write_state()
            rewards, reasons = self.state.evaluations[name], self.state.reasons.get(name, {})
            results[mode] = Evaluation(tuple(rewards), reasons=reasons)
        return results

    async def _evaluate(
        self,
        label: str,
        mode: str,
        tasks: Sequence[Any],
        on_progress: Callable[[int], None] | None = None,
        strict: bool = False,
    ) -> Evaluation:
        name = f"{self.state.run_id}-{label}-{mode}{self.state.suffix}"
        resources_id = await self._publish(name, TEMPERATURES[mode])
        return await evaluate_tasks(
            self.source,
            tasks,
            name=name,
            resources_id=resources_id,
            reward_weights=self.reward_weights,
            max_failed_share=None if strict else 1.0,
            require_reward=strict,
            on_progress=on_progress,
            on_collected=self._name,
        )


def step_name(state: RunState, step: int) -> str:
    """What a training step's resources are called, and its rollouts' names begin with."""
    return f"{state.run_id}-train-{step:06d}"


async def newest_version(store: LightningStoreBase, state: RunState) -> int:
    """The newest policy_version that agents were given in steps after the checkpoint, which a crash took back."""
    step, newest = state.step, 0
    while (published := await store.get_resources_by_id(step_name(state, step))) is not None:
        llm = published.resources.get("llm")
        newest = max(newest, (llm.policy_version or 0) if isinstance(llm, LLM) else 0)
        step += 1
    return newest
