"""A training run over recorded sessions: the `Training` that an algorithm is given where no agent runs."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from agentlightning.algorithms.training import Collected, RolloutReport, RolloutRequest, RolloutSource, Stage, Want
from agentlightning.chat.base import ChatFormat
from agentlightning.credit.rejection import Check, Rejection
from agentlightning.errors import ConfigError
from agentlightning.evaluation.evaluation import Evaluation
from agentlightning.policy.base import UPDATE, Policy, UpdateOptions
from agentlightning.resources import NamedResources
from agentlightning.training.learner import PolicyLearner
from agentlightning.training.recorded.position import BEST
from agentlightning.trajectory import TokenTree, TrainingSample, Trajectory
from agentlightning.util.progress import Progress

SUMMED: Final = (
    "groups",
    "groups_trained",
    "groups_without_spread",
    "groups_too_small",
    "groups_without_tokens",
    "rollouts_trained",
    "tokens_trained",
    "pairs",
    "groups_without_pairs",
    "skipped_steps",
    "rollouts_not_finite",
)
"""Counts of a step that are summed over a run."""

Checkpoint = Callable[["RecordedTraining"], Awaitable[None]]
"""Writes the weights and the position of a run."""


@asynccontextmanager
async def nobody_samples() -> AsyncGenerator[bool]:
    """In place of a gate: no call is in flight while recorded data is learned from."""
    yield False


def learner_of(policy: Policy, token_budget: int) -> PolicyLearner:
    return PolicyLearner(policy, nobody_samples, token_budget)


@dataclass(slots=True)
class RecordedTraining:
    """Implements `algorithms.training.Training` without an agent and tasks."""

    rollouts: RolloutSource
    learner: PolicyLearner
    run_dir: Path
    total_steps: int
    start: Path | None
    """The directory of the weights that it starts from; None: not in a directory, they are written when asked for."""
    progress: Progress
    target_agent: str | None = None
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Of the last step."""
    counts: Counter[str] = field(default_factory=Counter[str])
    rejected: dict[str, str] = field(default_factory=dict[str, str])
    """Rollouts that could not be used, with the reason."""
    sessions: int = 0
    """What was learned from, where the algorithm read the sessions itself."""
    left_out: dict[str, int] = field(default_factory=dict[str, int])
    """And what that left out, by reason."""
    notes: list[str] = field(default_factory=list[str])
    validation_losses: dict[int, float] = field(default_factory=dict[int, float])
    checkpoint_every: int = 1
    checkpoint: Checkpoint | None = None
    first_line: int = 0
    """Steps of earlier runs in the same directory, which its metrics count too."""

    def say(self, text: str) -> None:
        """Show something once, and keep it for the result."""
        if text not in self.notes:
            self.notes.append(text)
            self.progress.note(text)

    def reject(self, rejected: Iterable[Rejection]) -> None:
        """Count sessions that are left out, and name the first of each kind."""
        for each in rejected:
            if each.reason not in self.rejected.values():
                self.say(f"session {each.rollout_id} is left out ({each.reason.replace('_', ' ')}): {each.message}")
            self.rejected.setdefault(each.rollout_id, each.reason)

    @property
    def chat(self) -> ChatFormat:
        return self.learner.chat

    @property
    def context_length(self) -> int:
        return self.learner.context_length

    @property
    def resources(self) -> NamedResources:
        return {}

    @property
    def train_tasks(self) -> Sequence[Any]:
        """None: what is learned from are sessions."""
        return ()

    @property
    def validation_tasks(self) -> Sequence[Any]:
        return ()

    @property
    def held_out_tasks(self) -> int:
        return 0

    @property
    def directory(self) -> Path:
        return self.run_dir

    def note(self, text: str) -> None:
        self.progress.note(text)

    def warn(self, name: str, text: str) -> None:
        self.say(f"warning: {text}")

    async def try_resources(self, resources: NamedResources, tasks: Mapping[str, Any]) -> list[RolloutReport]:
        raise ConfigError(
            f"recorded sessions come with no agent to try {sorted(resources)} with; give train(agent=...)"
        )

    async def begin_stage(self, stage: Stage) -> bool:
        raise ConfigError(f"recorded sessions are learned from by one algorithm, not by stages like {stage.name!r}")

    async def publish(self, resources: NamedResources) -> None:
        raise ConfigError(f"recorded sessions use no resources, so {sorted(resources)} cannot be replaced")

    async def starting_weights(self) -> Path | None:
        """See `Training.starting_weights`."""
        if self.learner.starts_at_base:
            return None
        if self.start is None:
            if self.step:
                raise ConfigError("the weights that this run started from were not kept; give reference=DIRECTORY")
            self.start = self.run_dir / "start"
            await self.learner.save(self.start)
        return self.start

    async def collect(
        self,
        wants: Sequence[Want] = (),
        *,
        tasks: int = 0,
        group_size: int = 1,
        temperature: float = 1.0,
        check: Check | None = None,
        timeout_reward: float | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> Collected:
        """See `Training.collect`. Neither sampling parameters nor timeouts apply to what was recorded."""
        collected = await self.rollouts.next(
            RolloutRequest([*wants, *[Want(n=group_size)] * tasks], temperature, check, timeout_reward)
        )
        self.reject(collected.rejected)
        return collected

    async def recall(
        self, groups: Mapping[str, str], *, tasks: Mapping[str, Any], max_age: int, check: Check | None = None
    ) -> tuple[Trajectory, ...]:
        """None: every session comes again by itself."""
        return ()

    async def update(self, samples: Sequence[TrainingSample], options: UpdateOptions = UPDATE) -> Mapping[str, float]:
        return await self.learner.update(samples, options)

    async def evaluate(self, tasks: Sequence[Any] | None = None) -> Evaluation:
        raise ConfigError("recorded sessions come with no agent to evaluate; give eval_agent and held_out_dataset")

    async def finish_step(self, collected: Collected, metrics: Mapping[str, float]) -> None:
        await self.finish(metrics)

    async def finish(self, metrics: Mapping[str, float]) -> None:
        """Count a step, write its metrics and, where it is time, a checkpoint."""
        await asyncio.to_thread(self._count, metrics)
        last = self.step >= self.total_steps
        if self.checkpoint is not None and (last or self.step % self.checkpoint_every == 0):
            await self.checkpoint(self)

    def _count(self, metrics: Mapping[str, float]) -> None:
        self.step += 1
        self.metrics = {name: float(value) for name, value in metrics.items()}
        self.counts.update({name: int(metrics[name]) for name in SUMMED if math.isfinite(metrics.get(name, math.nan))})
        line = {
            "step": self.first_line + self.step,
            **{name: value for name, value in self.metrics.items() if math.isfinite(value)},
        }
        with (self.run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        shown = {name: self.metrics[name] for name in ("loss", "reward", "margin") if name in self.metrics}
        self.progress.update(self.step, **shown)

    async def save(self, directory: Path) -> None:
        await self.learner.save(directory)


# -- supervised ------------------------------------------------------------------------------------------------------

# The weights of a run on recorded data, as supervised learning updates them: each batch is a step of the run.


class RecordedLoop:
    """Implements `algorithms.sft.SupervisedLoop`. The best weights lie in the run directory, where a resumed run finds
    them."""

    keeps_best = True

    def __init__(self, run: RecordedTraining, policy: Policy) -> None:
        self.run, self.policy = run, policy
        self.chat: ChatFormat = policy.chat
        self.context_length, self.first_step = policy.context_length, run.step
        self.validation_losses = run.validation_losses
        self.best_directory: Path | None = run.run_dir / BEST

    async def update(self, sample: TrainingSample, options: UpdateOptions) -> Mapping[str, float]:
        return await self.policy.train([sample], options)

    async def finish(self, step: int, metrics: Mapping[str, float]) -> None:
        await self.run.finish(metrics)

    async def logprobs(self, trees: Sequence[TokenTree]) -> Sequence[tuple[Any, ...]]:
        return (await self.policy.score(trees, {"logprobs"}))["logprobs"]

    async def keep(self, directory: Path) -> None:
        await self.policy.save(directory, training_state=True)

    async def restore(self, directory: Path) -> None:
        await self.policy.load(directory)

    async def save(self, directory: Path) -> None:
        await self.policy.save(directory)
