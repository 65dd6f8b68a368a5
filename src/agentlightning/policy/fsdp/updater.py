"""One update on several processes: each computes the gradient of some trees, and all take the same step.

The weights of tokens are shares of the whole batch, so that gradients and metrics of the ranks add up to those of one
process, whatever the division. Weights that the ranks divide are summed as they are computed; adapters and value head
are small, so that every rank has them whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from agentlightning.policy.fsdp.collectives import Ranks
from agentlightning.policy.fsdp.sharding import ShardedForward, divide, prices_of
from agentlightning.policy.losses import TokenLoss
from agentlightning.policy.mismatch import Correction
from agentlightning.policy.optimizer_config import OptimizerConfig
from agentlightning.policy.update.micro_batch import MicroBatch
from agentlightning.policy.update.packing import Sharing
from agentlightning.policy.update.updater import Updater
from agentlightning.policy.update.value_head import ValueHead
from agentlightning.trajectory import TrainingSample


class ShardedUpdater(Updater):
    """Trains a model that the ranks divide. Every rank calls the same method with the same samples."""

    def __init__(
        self,
        forward: ShardedForward,
        optimizer: OptimizerConfig | None = None,
        adapter: nn.Module | None = None,
        value_head: ValueHead | None = None,
    ) -> None:
        self.ranks = forward.ranks
        whole = [each.to(self.ranks.device) for each in (adapter, value_head) if each is not None]
        super().__init__(forward.model, optimizer, adapter, value_head, forward=forward)
        self._whole = [parameter for each in whole for parameter in each.parameters()]
        self._loads: list[list[float]] = []
        """Of each batch divided since the step began: the predicted cost of each rank."""

    def step(self, samples: Sequence[TrainingSample], **options: Any) -> dict[str, float]:
        """See `Updater.step`. The metrics also have `idle_ranks`, the most ranks without a tree in an optimiser step,
        and `rank_imbalance`, the predicted cost of the busiest rank as a multiple of the mean."""
        self._loads = []
        metrics = super().step(samples, **options)
        busy = [loads for loads in self._loads if sum(loads)]
        idle = max((loads.count(0.0) for loads in busy), default=self.ranks.count)
        imbalance = sum(max(loads) for loads in busy) * self.ranks.count / max(sum(map(sum, busy)), 1e-9)
        return {**metrics, "idle_ranks": float(idle), "rank_imbalance": imbalance}

    def _gradient(
        self,
        part: Sequence[TrainingSample],
        losses: Sequence[TokenLoss],
        within: Sequence[Correction],
        *,
        token_budget: int,
        sharing: Sharing,
    ) -> dict[str, float]:
        own = [part[i] for i in self._own(part, token_budget, sharing)]
        batches = self.forward.plan(own, token_budget=token_budget, sharing=sharing) if own else []
        sums = self.ranks.sum(self.accumulate(batches, losses, within))
        self.ranks.sum_gradients(self._whole)
        return sums

    def _own(self, part: Sequence[TrainingSample], token_budget: int, sharing: Sharing) -> list[int]:
        """The trees of this rank, as rank 0 has divided them."""
        found: tuple[list[list[int]], list[float]] | None = None
        if self.ranks.rank == 0:
            prices = prices_of(self.forward, part, token_budget=token_budget, sharing=sharing)
            parts = divide(prices, self.ranks.count)
            found = parts, [sum(prices[i] for i in own) for own in parts]
        parts, loads = self.ranks.from_first(found)
        self._loads.append(loads)
        return parts[self.ranks.rank]

    def _divides_rollouts(self, batches: Sequence[MicroBatch]) -> bool:
        return self.ranks.any(super()._divides_rollouts(batches))


class UpdaterFactory:
    """Makes the updaters of one model, which is divided with the first of them (`trained_weights.MakeUpdater`)."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._forward: ShardedForward | None = None

    def __call__(
        self,
        model: PreTrainedModel,
        optimizer: OptimizerConfig | None = None,
        adapter: nn.Module | None = None,
        value_head: ValueHead | None = None,
        *,
        gradient_checkpointing: bool = False,
    ) -> Updater:
        """See `Updater`."""
        if self._forward is None:
            self._forward = ShardedForward(model, self._ranks, gradient_checkpointing=gradient_checkpointing)
        return ShardedUpdater(self._forward, optimizer, adapter, value_head)
