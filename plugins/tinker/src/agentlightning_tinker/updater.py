"""Updates of weights on a server of the Tinker API: the steps of `Updater`, with its passes made there.

One loss that the API has is computed on the server. Any other that needs log-probabilities alone, and several together,
are computed here from the server's log-probabilities, and the gradient goes back as weights of a cross entropy, which
has the same one: sum_t w_t log p_t with w_t = -dL/dlog p_t. That costs a second forward pass.

The server computes at temperature 1 and over the whole vocabulary. Entropies are not known there: what is logged as
`entropy` is the mean of -log p of the sampled tokens.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor

from agentlightning.errors import ConfigError, PolicyError, UnfaithfulSampleError
from agentlightning.policy.base import UPDATE, UpdateOptions
from agentlightning.policy.config import OptimizerConfig
from agentlightning.policy.losses import ADVANTAGES, SAMPLED_LOGPROBS, LossSetting, TokenBatch, TokenLoss, token_losses
from agentlightning.policy.update.packing import MicroBatch, TokenTable, plan, token_table
from agentlightning.policy.update.updater import (
    Sums,
    Updater,
    not_finite_in_data,
    over,
    sum_of_losses,
    tokens_of,
    weights_name,
    without,
)
from agentlightning.trajectory import FloatArray, TokenTree, TrainingSample
from agentlightning_tinker.losses import native
from agentlightning_tinker.session import TinkerSession

ROW_BUDGET: Final = 1 << 40
"""All rows are sent at once; the server divides them."""


class RemoteOptimizer:
    """Stands for `Optimizer`: the learning rate of each step is computed here, the step is made on the server."""

    def __init__(self, session: TinkerSession, config: OptimizerConfig) -> None:
        """Raises ConfigError for settings that the API lacks."""
        if config.type != "adamw":
            raise ConfigError(f'optimizer type "{config.type}" is not in the Tinker API; use "adamw"')
        if config.lr is None:
            raise ConfigError(
                "set algorithm.optimizer.lr (or that of policy.lora): the default follows from the number of weights,"
                ' which is not known for policy.kind = "tinker"; 1e-4 is usual for adapters'
            )
        if config.schedule != "constant" and config.total_steps is None:
            raise ConfigError(f'schedule="{config.schedule}" needs total_steps')
        self.config, self.steps, self.lr_factor = config, 0, 1.0
        self._session, self._lr = session, config.lr

    def step(self, loss: float) -> dict[str, float]:
        """Raises PolicyError for a loss that is not finite."""
        if not math.isfinite(loss):
            raise PolicyError(
                f"the loss of this step is {loss}, and the server cannot drop its gradient; resume the run"
            )
        lr = self._lr * self.config.factor(self.steps) * self.lr_factor
        metrics = asyncio.run(self._session.optim_step(lr, self.config))
        self.steps += 1
        found = next((value for name, value in metrics.items() if name.startswith("grad_norm")), math.nan)
        return {"lr": lr, "grad_norm": float(found), "optimizer_steps": 1.0, "skipped_steps": 0.0}

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = int(state["steps"])


class RemoteUpdater(Updater):
    """`Updater` of a training run on a server."""

    def __init__(self, session: TinkerSession, optimizer: OptimizerConfig) -> None:
        """Raises ConfigError for an optimiser that the API lacks."""
        self.session = session
        self.optimizer = cast(Any, RemoteOptimizer(session, optimizer))
        self.forward = cast(Any, SimpleNamespace(tensor=torch.from_numpy))
        self.value_head = self.value_optimizer = self.average = None
        self.entropy = 0.0, 0

    def step(self, samples: Sequence[TrainingSample], options: UpdateOptions = UPDATE) -> dict[str, float]:
        """See `Updater.step`. Raises PolicyError for losses and options that the API cannot express, before anything is
        sent, and UnfaithfulSampleError for tokens that were not sampled at temperature 1 from the whole vocabulary."""
        if options.average is not None:
            raise ConfigError('a moving average of the weights cannot be kept with policy.kind = "tinker"')
        losses = token_losses(options.loss)
        check_losses(losses)
        at_temperature = any(SAMPLED_LOGPROBS in loss.needs for loss in losses)
        for sample in samples:
            check_adapter(sample.adapter)
            if at_temperature:
                check_sampling(sample.tree)
        return super().step(samples, options)

    def logprobs(self, trees: Sequence[TokenTree], *, of_base: bool = False) -> list[tuple[FloatArray, ...]]:
        """log p of every sampled token of each tree under the present weights, or those below the adapter, as
        `Policy.score` has it."""
        table = token_table(map(TrainingSample, trees))
        found = np.zeros(len(table.call), np.float32)
        for batch in self._plan(table, UPDATE):
            own = asyncio.run(self.session.base_logprobs(batch.rows)) if of_base else self._logprobs(batch).numpy()
            found[batch.places] = own
        return table.by_node(found)

    def _step(self, part: TokenTable, options: UpdateOptions) -> Sums:
        """Rollouts whose data is not finite are left out before anything is sent."""
        needs = {SAMPLED_LOGPROBS}.union(*(loss.needs for loss in token_losses(options.loss)))
        broken = not_finite_in_data(part, needs)
        sums = self._gradient(without(part, np.isin(part.rollout, broken)), options)
        if not sums:
            return {}
        return self._with_step(sums, self.optimizer.step(float(sums["loss"][0])), len(broken))

    def _plan(self, part: TokenTable, options: UpdateOptions) -> list[MicroBatch]:
        """All rows as one micro-batch; calls of a rollout are merged where one continues another. `token_budget` is for
        the server to decide. Raises ConfigError for a way of sharing that needs the model."""
        if options.sharing == "shared":
            raise ConfigError(
                'sharing="shared" is for a model on this machine; leave it out with policy.kind = "tinker"'
            )
        sharing = "rows" if options.sharing == "rows" else "merged"
        batches = plan(part, token_budget=ROW_BUDGET, sharing=sharing, join=False)
        lines = tuple(line for batch in batches for line in batch.lines)
        return [MicroBatch(lines, part)] if lines else []

    def accumulate(self, batches: Sequence[MicroBatch], loss: LossSetting = "ppo") -> Sums:
        """See `Updater.accumulate`; `batches` are the one of `_plan`."""
        losses, [batch] = token_losses(loss), batches
        within = batch.table.corrections
        no_entropy = cast(Any, None)
        own = native(losses[0]) if len(losses) == 1 and not within else None
        if own is not None:
            unknown = self._tokens(batch, torch.zeros(len(batch.places)), no_entropy, None)
            logprobs_N = self._native(batch, unknown, losses[0], *own)
        else:
            logprobs_N = self._logprobs(batch).requires_grad_()
        tokens = self._tokens(batch, logprobs_N, no_entropy, None)
        value, sums = sum_of_losses(losses, tokens, within)
        if own is None:
            if not bool(torch.isfinite(value)):
                raise PolicyError("the loss of this step is not finite; nothing was sent to be learned from")
            value.backward()
            assert logprobs_N.grad is not None
            self._send(batch, "cross_entropy", {}, {"weights": -logprobs_N.grad})
        found = {
            "loss": value.detach(),
            "entropy": -logprobs_N.detach().sum(),
            "tokens_trained": len(logprobs_N),
            "tokens_computed": sum(row.length for row in batch.rows) * (1 if own else 2),
            "micro_batches": 1,
        }
        return {**sums, **over(len(logprobs_N), found)}

    def _native(
        self, batch: MicroBatch, tokens: TokenBatch, loss: TokenLoss, name: str, settings: Mapping[str, float]
    ) -> Tensor:
        weights_N = torch.zeros(len(batch.places))
        weights_N[tokens.columns[weights_name(loss, tokens.columns)] != 0] = tokens_of(tokens, loss).weights
        weights_N *= loss.coefficient_at(tokens.step)
        if name == "cross_entropy":
            return self._send(batch, name, settings, {"weights": weights_N})
        advantages_N = weights_N * tokens.columns[ADVANTAGES]
        return self._send(batch, name, settings, {"advantages": advantages_N, "logprobs": tokens.old_logprobs})

    def _logprobs(self, batch: MicroBatch) -> Tensor:
        """logprobs_N of the trained tokens under the present weights."""
        return self._send(batch, "cross_entropy", {}, {"weights": torch.zeros(len(batch.places))}, backward=False)

    def _send(
        self,
        batch: MicroBatch,
        loss: str,
        settings: Mapping[str, float],
        columns: Mapping[str, Tensor],
        *,
        backward: bool = True,
    ) -> Tensor:
        """Compute a loss with these columns of the trained tokens [N] on the server; returns their logprobs_N."""
        arrays = {name: values.numpy() for name, values in columns.items()}
        found = self.session.forward_backward(batch.rows, arrays, loss, settings, backward=backward)
        return torch.from_numpy(asyncio.run(found))


def check_losses(losses: Sequence[TokenLoss]) -> None:
    """Raises ConfigError for a loss that needs more of the model than log-probabilities."""
    for loss in losses:
        lacks = "the entropy of distributions" if loss.needs_entropy else "a critic" if loss.needs_values else None
        if lacks is not None:
            raise ConfigError(
                f'loss "{loss.type}" needs {lacks}, and the Tinker API gives log-probabilities alone: leave it out, or'
                ' train with policy.kind = "local"'
            )


def check_adapter(name: str | None) -> None:
    """Raises PolicyError for any but the one adapter that there is."""
    if name is not None:
        raise PolicyError(
            f"samples are for the adapter {name!r}, and a policy of the Tinker API has one; leave algorithm.agents out"
        )


def check_sampling(tree: TokenTree) -> None:
    """Raises UnfaithfulSampleError for tokens whose probability the API cannot compute."""
    for node in tree.nodes:
        if node.sampled and (node.temperature != 1.0 or node.kept_sets is not None):
            how = f"temperature={node.temperature:g}" if node.kept_sets is None else "top_p or top_k"
            raise UnfaithfulSampleError(
                f"call {node.call} of rollout {node.rollout_id} was sampled with {how}, and the Tinker API computes"
                " probabilities at temperature 1 over all tokens: set algorithm.temperature = 1, top_p = 1, top_k = 0"
            )
