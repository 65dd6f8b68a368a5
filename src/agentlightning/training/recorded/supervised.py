"""The weights of a run on recorded data, as supervised learning updates them: each batch is a step of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentlightning.chat.base import ChatFormat
from agentlightning.policy.base import Policy
from agentlightning.training.recorded.position import BEST
from agentlightning.training.recorded.run import RecordedTraining
from agentlightning.trajectory import TokenTree, TrainingSample


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

    async def update(self, sample: TrainingSample, **options: Any) -> Mapping[str, float]:
        return await self.policy.train([sample], **options)

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
