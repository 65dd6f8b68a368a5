"""What a policy trains, and scores tokens with: all weights of its model, or adapters over them.

Each has its own optimiser, and a policy trains one kind for its whole life. The weights of a name are those of
`TrainingSample.adapter`; each sample trains the weights that it is for.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentlightning.errors import ConfigError, PolicyError
from agentlightning.models import SHARED, checkpoint
from agentlightning.models.lora import (
    Adapter,
    AdapterFiles,
    Adapters,
    adapter_directory,
    has_adapters,
    read_weights,
    set_weights,
)
from agentlightning.models.resolve import resolve_model, shared_name
from agentlightning.policy.base import Columns, ScoreColumn, UpdateOptions
from agentlightning.policy.config import LR_FACTOR, LocalPolicyConfig, Lora, OptimizerConfig, default_lr
from agentlightning.policy.model_loading import LARGE
from agentlightning.policy.update.forward import Forward
from agentlightning.policy.update.updater import COUNTS, KEPT_COUNT, Updater
from agentlightning.policy.update.value_head import open_value_head, reading
from agentlightning.trajectory import TokenTree, TrainingSample

MAX_REFERENCES = 2
"""Models kept to score tokens with: a reference and a teacher."""


class Learner:
    """Not thread safe: nothing may use the weights during a step."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: LocalPolicyConfig,
        make_updater: Callable[..., Updater] | None = Updater,
    ) -> None:
        """`make_updater`: called as the class is; None: other processes train the weights. Raises ConfigError for
        adapters that the model cannot have, for a critic of several, and where nothing is trained."""
        shapes = config.adapters
        self.model, self.tokenizer, self._config = model, tokenizer, config
        self.value_head = config.value_head and open_value_head(model, config.value_head, config.model, config.seed)
        """The critic of the policy itself."""
        if shapes and self.value_head is not None and list(shapes) != [SHARED]:
            raise ConfigError(
                f"policy.value_head is the critic of one policy, and the adapters {', '.join(sorted(shapes))} are"
                " trained here: leave it out, or let all agents share one policy"
            )
        size = model.num_parameters()
        self.adapters = Adapters(model) if shapes else None
        """None where all weights are trained."""
        for name, lora in shapes.items():
            assert self.adapters is not None
            self.adapters.add(name, r=lora.r, alpha=lora.scale_numerator, targets=lora.targets, seed=config.seed)
        self.own: str | None = SHARED if SHARED in shapes else None
        """The name of the policy itself: an adapter, or None for the model's own weights."""
        self.updaters: dict[str | None, Updater] = {}
        """By name. A name that is not here does not learn."""
        if make_updater is not None:
            forward = self.make_forward(model, config.gradient_checkpointing)
            for name in shapes or (None,):
                optimizer = _optimizer(None if name is None else shapes[name], config, size)
                adapter = None if name is None else self.by_name[name]
                self.updaters[name] = make_updater(model, optimizer, adapter, self.value_head, forward=forward)
        self._references: dict[Path, Forward] = {}

    @property
    def by_name(self) -> Mapping[str, Adapter]:
        """The adapters; empty where all weights are trained."""
        return {} if self.adapters is None else self.adapters.by_name

    def use(self, name: str | None) -> AbstractContextManager[None]:
        """Forward passes within use these weights."""
        return nullcontext() if self.adapters is None else self.adapters.use(name)

    def changed(self) -> None:
        """The weights have changed."""
        if self.adapters is not None:
            self.adapters.drop_stacks()

    # -- training --------------------------------------------------------------------------------------------------

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
        by_name: dict[str | None, list[TrainingSample]] = {}
        for sample in samples:
            by_name.setdefault(self.own if sample.adapter is None else sample.adapter, []).append(sample)
        for name in by_name:
            self._check_trained(name)
        by_name = by_name or {self.own if self.own in self.updaters else next(iter(self.updaters)): []}
        before(by_name)
        return joint_metrics({name: self._step(name, own, options, changed) for name, own in by_name.items()})

    def _check_trained(self, name: str | None) -> None:
        if name not in self.updaters:
            raise PolicyError(
                f"samples are for the adapter {name!r}, which this policy does not train; it trains "
                f"{', '.join(repr(each) for each in self.updaters if each is not None) or 'all weights'}"
            )

    def _step(
        self,
        name: str | None,
        samples: Sequence[TrainingSample],
        options: UpdateOptions,
        changed: Callable[[str | None], None],
    ) -> dict[str, float]:
        """`Updater.step` of the weights of a name."""
        updater = self.updaters[name]
        steps = updater.optimizer.steps
        try:
            with self.use(name):
                metrics = updater.step(samples, options)
        except BaseException:
            updater.zero_grad()  # The next step must not start from these gradients.
            if updater.optimizer.steps > steps:
                changed(name)
            raise
        finally:
            if self.model.num_parameters() >= LARGE:
                _return_memory()
        changed(name)
        return metrics

    # -- scoring ---------------------------------------------------------------------------------------------------

    def score(
        self, trees: Sequence[TokenTree], what: AbstractSet[ScoreColumn], reference: Path | None, adapter: str | None
    ) -> Columns:
        """See `Policy.score`."""
        found: dict[str, Any] = {}
        name, updaters = self.own if adapter is None else adapter, self.updaters
        if adapter is not None:
            self._check_trained(adapter)
        own = updaters[name] if name in updaters else next(iter(updaters.values()))  # The model below is one.
        if present := what & {"logprobs", "entropy", "values"}:
            with self.use(name):
                found |= own.forward.score(trees, present, value_head=self.value_head)
        if "average_logprobs" in what:
            with self.use(name), own.average_in_use() if name in updaters else nullcontext():
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
            self._references[directory] = self.make_forward(self.read_scorer(directory))
        return self._references[directory]

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return next(iter(self.updaters.values())).forward.dtype

    def read_scorer(self, directory: Path) -> PreTrainedModel:
        """A model that scores tokens, on the device of the policy. Raises as `checkpoint.read_scorer`."""
        scorer = checkpoint.read_scorer(directory, self.model, self.tokenizer, self.dtype)
        return cast(PreTrainedModel, cast(nn.Module, scorer).to(self.model.device))

    def make_forward(self, model: PreTrainedModel, gradient_checkpointing: bool = False) -> Forward:
        """Passes through a model."""
        return Forward(model, gradient_checkpointing=gradient_checkpointing)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, directory: Path, state: Mapping[str, Any] | None, *beside: checkpoint.Savable) -> None:
        """See `models.checkpoint.save`."""
        saved: checkpoint.Savable = self.model
        if self.adapters is not None:
            agents = {
                agent: setting.model_dump(exclude_none=True) if isinstance(setting, Lora) else setting
                for agent, setting in self._config.agents.items()
            }
            saved = AdapterFiles(shared_name(self._config.model), self.by_name, agents)
        checkpoint.save(directory, saved, self.tokenizer, state, self.value_head, *beside)

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs beside the weights."""
        states = {name: updater.state_dict() for name, updater in self.updaters.items()}
        return {"updater": states[None]} if self.adapters is None else {"adapters": states}

    def read(self, directory: Path, state: Mapping[str, Any]) -> Callable[[], None]:
        """What puts the weights in `directory`, and `state`, in place. Raises PolicyError or ConfigError where they do
        not fit, before anything changes."""
        if self.adapters is None and has_adapters(directory):
            raise PolicyError(
                f"{directory} holds adapters, and all weights are trained here; set policy.lora as it was"
            )
        states: Mapping[str | None, Any] = (
            {None: state["updater"]} if self.adapters is None else state.get("adapters", {})
        )
        if states.keys() != self.updaters.keys():
            raise PolicyError(
                f"{directory} holds the adapters {sorted(map(str, states)) or 'none'}, and"
                f" {sorted(map(str, self.updaters))} are trained here; continue with the policy.lora and agents that it"
                " was saved with"
            )
        load_weights = self.read_weights(directory)
        for name, updater in self.updaters.items():
            updater.check_state_dict(states[name])

        def load() -> None:
            load_weights()
            for name, updater in self.updaters.items():
                updater.load_state_dict(states[name])

        return load

    def read_weights(self, directory: Path) -> Callable[[], None]:
        """`read` without the state of the optimisers."""
        load_values = reading(self.value_head, directory)
        weights = checkpoint.read_model(directory, self.model).state_dict() if self.adapters is None else {}
        adapted = {
            name: read_weights(adapter_directory(directory, name), adapter) for name, adapter in self.by_name.items()
        }

        def load() -> None:
            if self.adapters is None:
                self.model.load_state_dict(weights)
            for name, adapter in self.by_name.items():
                set_weights(adapter, adapted[name])
            load_values()
            self.changed()

        return load


def _optimizer(lora: Lora | None, config: LocalPolicyConfig, weights: int) -> OptimizerConfig:
    given = (lora and lora.optimizer) or config.optimizer
    completed = given.completed(weights=weights, objective=config.objective, total_steps=config.optimizer.total_steps)
    if lora is None or given.lr is not None:
        return completed
    return completed.model_copy(update={"lr": LR_FACTOR * default_lr(weights, config.objective)})


def joint_metrics(by_name: Mapping[str | None, Mapping[str, float]]) -> dict[str, float]:
    """The metrics of an update of several adapters: each under `NAME/metric`, and over all of them under its own name,
    counts as sums, others as means weighted by trained tokens."""
    if by_name.keys() <= {None, SHARED}:
        return dict(next(iter(by_name.values())))
    joint = {f"{name}/{metric}": value for name, own in by_name.items() for metric, value in own.items()}
    for metric in sorted({metric for own in by_name.values() for metric in own}):
        values = [(own[metric], max(own["tokens_trained"], 1.0)) for own in by_name.values() if metric in own]
        if metric in (*COUNTS, KEPT_COUNT):
            joint[metric] = sum(value for value, _ in values)
        else:
            joint[metric] = sum(value * tokens for value, tokens in values) / sum(tokens for _, tokens in values)
    return joint


def _return_memory() -> None:
    """Give the system back what an update has freed: glibc keeps it, gigabytes that the next one fragments further."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # Of another C library.
            ctypes.CDLL(None).malloc_trim(0)
