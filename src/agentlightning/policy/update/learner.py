"""Trains and scores with the weights of one model: each sample trains the weights that it is for."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentlightning.errors import PolicyError
from agentlightning.models import checkpoint
from agentlightning.models.resolve import resolve_model
from agentlightning.policy.base import Columns, ScoreColumn, UpdateOptions
from agentlightning.policy.model_loading import LARGE
from agentlightning.policy.trained_weights import TrainedWeights, joint_metrics
from agentlightning.policy.update.forward import Forward
from agentlightning.trajectory import TokenTree, TrainingSample

MAX_REFERENCES = 2
"""Models kept to score tokens with: a reference and a teacher."""


class Learner:
    """Not thread safe: nothing may use the weights during a step."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        weights: TrainedWeights,
        *,
        loads_weights: bool = True,
    ) -> None:
        """`loads_weights`: of the models that score tokens beside the policy, or whether `make_forward` gets them from
        another process."""
        self._model, self._tokenizer, self._weights = model, tokenizer, weights
        self._loads_weights = loads_weights
        self._references: dict[Path, Forward] = {}

    def by_trained_weights(self, samples: Sequence[TrainingSample]) -> dict[str | None, list[TrainingSample]]:
        """The samples by the weights that they train. Raises PolicyError for weights that do not learn."""
        own, updaters = self._weights.own, self._weights.updaters
        by_name: dict[str | None, list[TrainingSample]] = {}
        for sample in samples:
            by_name.setdefault(own if sample.adapter is None else sample.adapter, []).append(sample)
        for name in by_name:
            self._check_trained(name)
        return by_name or {own if own in updaters else next(iter(updaters)): []}

    def _check_trained(self, name: str | None) -> None:
        updaters = self._weights.updaters
        if name not in updaters:
            raise PolicyError(
                f"samples are for the adapter {name!r}, which this policy does not train; it trains "
                f"{', '.join(repr(each) for each in updaters if each is not None) or 'all weights'}"
            )

    def update(
        self,
        samples: Sequence[TrainingSample],
        options: UpdateOptions,
        changed: Callable[[str | None], None],
        before: Callable[[Collection[str | None]], None] = lambda names: None,
    ) -> dict[str, float]:
        """The metrics of an update. Calls `before` with the names of the weights that it trains, and `changed` with
        each of them once they have changed, also where a later minibatch fails. Raises PolicyError, before anything
        changes, for weights that do not learn."""
        by_name = self.by_trained_weights(samples)
        before(by_name)
        return joint_metrics({name: self._step(name, own, options, changed) for name, own in by_name.items()})

    def _step(
        self,
        name: str | None,
        samples: Sequence[TrainingSample],
        options: UpdateOptions,
        changed: Callable[[str | None], None],
    ) -> dict[str, float]:
        """`Updater.step` of the weights of a name."""
        updater = self._weights.updaters[name]
        steps = updater.optimizer.steps
        try:
            with self._weights.use(name):
                metrics = updater.step(samples, options)
        except BaseException:
            updater.zero_grad()  # The next step must not start from these gradients.
            if updater.optimizer.steps > steps:
                changed(name)
            raise
        finally:
            if self._model.num_parameters() >= LARGE:
                _return_memory()
        changed(name)
        return metrics

    def score(
        self, trees: Sequence[TokenTree], what: AbstractSet[ScoreColumn], reference: Path | None, adapter: str | None
    ) -> Columns:
        """See `Policy.score`."""
        found: dict[str, Any] = {}
        name, updaters = self._weights.own if adapter is None else adapter, self._weights.updaters
        if adapter is not None:
            self._check_trained(adapter)
        own = updaters[name] if name in updaters else next(iter(updaters.values()))  # The model below is one.
        if present := what & {"logprobs", "entropy", "values"}:
            with self._weights.use(name):
                found |= own.forward.score(trees, present, value_head=self._weights.value_head)
        if "average_logprobs" in what:
            with self._weights.use(name), own.average_in_use() if name in updaters else nullcontext():
                found["average_logprobs"] = own.forward.score(trees, {"logprobs"})["logprobs"]
        if "ref_logprobs" in what:
            reference_forward = own.forward if reference is None else self._reference_at(reference)
            found["ref_logprobs"] = reference_forward.score(trees, {"logprobs"})["logprobs"]
        return found

    def _reference_at(self, reference: Path) -> Forward:
        directory = Path(resolve_model(reference)).absolute()
        if directory not in self._references:
            while len(self._references) >= MAX_REFERENCES:  # Frees the memory of the oldest before the next is loaded.
                del self._references[next(iter(self._references))]
            model = checkpoint.read_scorer(
                directory, self._model, self._tokenizer, self.dtype, weights=self._loads_weights
            )
            self._references[directory] = self.make_forward(model)
        return self._references[directory]

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return next(iter(self._weights.updaters.values())).forward.dtype

    def make_forward(self, model: PreTrainedModel) -> Forward:
        """Passes through a model that scores tokens, on the device of the policy."""
        return Forward(cast(PreTrainedModel, cast("torch.nn.Module", model).to(self._model.device)))


def _return_memory() -> None:
    """Give the system back what an update has freed: glibc keeps it, gigabytes that the next one fragments further."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # Of another C library.
            ctypes.CDLL(None).malloc_trim(0)
