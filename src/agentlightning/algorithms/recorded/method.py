"""How an algorithm for rollouts of the present policy learns from sessions that were recorded earlier.

    importance   the policy gradient, each token weighed by a clipped importance ratio without gradient (CISPO,
                 arXiv:2506.13585, equations 4 and 5): needs the log-probability each token was sampled with
    awr          advantage-weighted regression (arXiv:1910.00177, equation 3): needs rewards that differ
    rejection    rejection sampling fine-tuning (arXiv:2308.01825): imitates the successful sessions, and needs some

The clip of PPO is for data of the present policy: beyond its bounds a token has no gradient, so that sessions of
another policy would soon teach nothing.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Protocol, Self, TypeAlias

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.credit.base import SMALLEST_SPREAD, spread
from agentlightning.errors import ConfigError, DatasetError
from agentlightning.policy.losses import SAMPLED_LOGPROBS, AWRLoss, CISPOLoss, TokenLoss
from agentlightning.trajectory import TokenTree

Method: TypeAlias = Literal["importance", "awr", "rejection"]
MethodSetting: TypeAlias = Literal["auto", "importance", "awr", "rejection"]
METHODS: Final = ("auto", "importance", "awr", "rejection")
NAMES: Final = {
    "importance": "importance-weighted policy gradient",
    "awr": "advantage-weighted regression",
    "rejection": "rejection sampling fine-tuning",
}


@dataclass(frozen=True, slots=True)
class DataCounts:
    """What sessions have to learn from."""

    sessions: int
    """Those with a reward, in tokens of the model."""
    logprobs: int
    """Those whose calls have the log-probabilities they were sampled with."""
    groups: int
    groups_with_spread: int
    """Tasks whose sessions differ in reward."""
    successful: int
    """Sessions with at least the reward that counts as success."""

    @classmethod
    def of(cls, groups: Sequence[Sequence[float]], logprobs: int, threshold: float) -> DataCounts:
        """`groups`: the rewards of each task's sessions."""
        rewards = [reward for group in groups for reward in group]
        varied = sum(spread(group) > SMALLEST_SPREAD for group in groups if group)
        return cls(len(rewards), logprobs, len(groups), varied, sum(reward >= threshold for reward in rewards))


def choose(setting: MethodSetting, counts: DataCounts, threshold: float) -> Method:
    """The method that the data has what it needs for. Raises DatasetError, saying what is missing."""
    if setting not in METHODS:
        raise ConfigError(f"method={setting!r} is none; choose one of {', '.join(METHODS)}")
    if counts.sessions == 0:
        raise DatasetError(
            "no session has a reward, so nothing says which to learn from; emit rewards with agl.emit_reward, or score"
            " recorded sessions with `agl rescore`"
        )
    if setting == "importance" and not counts.logprobs:
        raise DatasetError(
            f'method="importance" needs log-probabilities of the sampler, and none of {counts.sessions} sessions has'
            ' them in tokens of this model: record through the gateway with this model, or use method="awr"'
        )
    if setting in ("importance", "awr") and not counts.groups_with_spread:
        raise DatasetError(
            f'method="{setting}" learns from differences in reward, and the sessions of each of {counts.groups} tasks'
            ' have the same one; record more of the same task, or use method="rejection"'
        )
    if setting != "auto" and (setting != "rejection" or counts.successful):
        return setting
    if setting == "auto" and counts.groups_with_spread:
        return "importance" if counts.logprobs * 2 >= counts.sessions else "awr"
    if counts.successful:
        return "rejection"
    raise DatasetError(
        f"the sessions of each of {counts.groups} tasks have the same reward, and none of {counts.sessions} has"
        f" {threshold:g} or more: there is nothing to prefer. Record sessions that differ, or lower success_threshold"
    )


def for_recorded(algorithm: LightningRL, method: Method, target_agent: str | None, steps: int | None) -> LightningRL:
    """The algorithm with the loss of a method, unless a loss that fits was set; it shares nothing with the original."""
    changes: dict[str, Any] = {}
    fits = _fits(algorithm.config.losses, method)
    if not (fits and "loss" in algorithm.config.model_fields_set):
        changes["loss"] = CISPOLoss() if method == "importance" else AWRLoss()
    if method != "importance":
        changes["mismatch"] = None
    if target_agent is not None:
        changes["target_agent"] = target_agent
    if steps is not None:
        changes["steps"] = steps
    found = copy.copy(algorithm)
    LightningRL.__init__(found, algorithm.config, **changes)
    return found


def _fits(losses: Sequence[TokenLoss], method: Method) -> bool:
    needs_sampler = any(SAMPLED_LOGPROBS in loss.needs for loss in losses)
    return needs_sampler if method == "importance" else not needs_sampler


# -- validation ------------------------------------------------------------------------------------------------------

# The loss on conversations that are not learned from, and the weights at which it was lowest.


class Validated(Protocol):
    """What learns."""

    keeps_best: bool
    """Whether it can return to earlier weights."""
    best_directory: Path | None
    """Where the best weights are kept, beyond the end of the process. None: in a temporary directory."""
    validation_losses: dict[int, float]
    """By step, what was measured; of a run that is resumed, from the beginning."""

    async def logprobs(self, trees: Sequence[TokenTree]) -> Sequence[tuple[Any, ...]]:
        """The log-probability of each sampled token under the present weights."""
        ...

    async def keep(self, directory: Path) -> None: ...

    async def restore(self, directory: Path) -> None: ...


class Validation:
    """Measures the loss on trees; a context, within which it keeps the best weights."""

    def __init__(self, trees: Sequence[TokenTree], learner: Validated) -> None:
        self.trees = [tree for tree in trees if tree.num_sampled]
        self.losses = learner.validation_losses
        self._learner = learner
        self._folder: Path | None = None

    async def __aenter__(self) -> Self:
        if self.trees and self._learner.keeps_best:
            self._folder = self._learner.best_directory or Path(tempfile.mkdtemp(prefix="agl-best-"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._folder is not None and self._learner.best_directory is None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def best_step(self) -> int | None:
        """The step with the lowest loss, the first of equal ones. None where nothing is measured, or no weights are
        kept."""
        if self._folder is None or not self.losses:
            return None
        return min(self.losses, key=lambda step: (self.losses[step], step))

    async def measure(self, step: int) -> Mapping[str, float]:
        """The mean loss of a token after `step`, for the step's metrics; empty without validation conversations."""
        if not self.trees:
            return {}
        if step not in self.losses:
            scores = await self._learner.logprobs(self.trees)
            total = sum(float(each.sum()) for tree in scores for each in tree)
            self.losses[step] = -total / sum(tree.num_sampled for tree in self.trees)
            if self.best_step == step:
                await self._learner.keep(self._place(step))
                if self._learner.best_directory is None:  # Else a resumed run could still need the one before.
                    forget_all_but(self._place(step))
        return {"validation_loss": self.losses[step]}

    async def restore_best(self) -> None:
        """Return to the weights with the lowest loss, if these are not the present ones."""
        if self.best_step is not None and self.best_step != max(self.losses):
            await self._learner.restore(self._place(self.best_step))

    def _place(self, step: int) -> Path:
        assert self._folder is not None
        return self._folder / f"step-{step:06d}"


def forget_all_but(best: Path) -> None:
    """Remove the weights that were the best before."""
    for entry in best.parent.glob("step-*"):
        if entry.name != best.name:
            shutil.rmtree(entry)
