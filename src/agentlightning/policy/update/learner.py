"""What a policy trains, and scores tokens with: all weights of its model, or adapters over them.

Each has its own optimiser, and a policy trains one kind for its whole life. The weights of a name are those of
`TrainingSample.adapter`; each sample trains the weights that it is for.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentlightning.errors import ConfigError, PolicyError
from agentlightning.models import SHARED, checkpoint
from agentlightning.models.lora import (
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
from agentlightning.policy.update.value_head import ValueHead, reading
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
        self.value_head = config.value_head and ValueHead.of(model, config.value_head, seed=config.seed)
        """The critic of the policy itself: the one beside its model, else a new one."""
        if self.value_head is not None and (weights := self.value_head.read(Path(config.model))) is not None:
            self.value_head.load_state_dict(weights)
        if shapes and self.value_head is not None and list(shapes) != [SHARED]:
            raise ConfigError(
                f"policy.value_head is the critic of one policy, and the adapters {', '.join(sorted(shapes))} are"
                " trained here: leave it out, or let all agents share one policy"
            )
        size = model.num_parameters()
        self.adapters = Adapters(model)
        """None of them where all weights are trained."""
        self.by_name, self.use = self.adapters.by_name, self.adapters.use
        for name, lora in shapes.items():
            self.adapters.add(name, r=lora.r, alpha=lora.scale_numerator, targets=lora.targets, seed=config.seed)
        self.own: str | None = SHARED if SHARED in shapes else None
        """The name of the policy itself: an adapter, or None for the model's own weights."""
        self.updaters: dict[str | None, Updater] = {}
        """By name. A name that is not here does not learn."""
        if make_updater is not None:
            self.forward = self.make_forward(model, config.gradient_checkpointing)
            """Passes with the weights that are in use."""
            for name in shapes or (None,):
                optimizer = _optimizer(None if name is None else shapes[name], config, size)
                adapter = None if name is None else self.by_name[name]
                self.updaters[name] = make_updater(model, optimizer, adapter, self.value_head, forward=self.forward)
        self._references: dict[Path, Forward] = {}

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
        name, found = self.own, dict[str, Any]()
        if adapter is not None:
            self._check_trained(name := adapter)
        with self.use(name):
            if present := what & {"logprobs", "entropy", "values"}:
                found |= self.forward.score(trees, present, value_head=self.value_head)
            if "average_logprobs" in what:
                with self.updaters[name].average_in_use() if name in self.updaters else nullcontext():
                    found["average_logprobs"] = self.forward.score(trees, {"logprobs"})["logprobs"]
        if "ref_logprobs" in what:  # The model below adapters, where no reference is given.
            scorer = self.forward if reference is None else self._reference_at(reference)
            found["ref_logprobs"] = scorer.score(trees, {"logprobs"})["logprobs"]
        return found

    def _reference_at(self, reference: Path) -> Forward:
        directory = Path(resolve_model(reference)).absolute()
        if directory not in self._references:
            while len(self._references) >= MAX_REFERENCES:  # Frees the memory of the oldest before the next is loaded.
                del self._references[next(iter(self._references))]
            self._references[directory] = self.make_forward(self.read_scorer(directory))
        return self._references[directory]

    def read_scorer(self, directory: Path) -> PreTrainedModel:
        """A model that scores tokens, on the device of the policy. Raises as `checkpoint.read_scorer`."""
        scorer = checkpoint.read_scorer(directory, self.model, self.tokenizer, self.forward.dtype)
        return cast(PreTrainedModel, cast(nn.Module, scorer).to(self.model.device))

    def make_forward(self, model: PreTrainedModel, gradient_checkpointing: bool = False) -> Forward:
        """Passes through a model."""
        return Forward(model, gradient_checkpointing=gradient_checkpointing)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, directory: Path, state: Mapping[str, Any] | None, *beside: checkpoint.Savable) -> None:
        """See `models.checkpoint.save`."""
        saved: checkpoint.Savable = self.model
        if self.by_name:
            agents = {
                agent: setting.model_dump(exclude_none=True) if isinstance(setting, Lora) else setting
                for agent, setting in self._config.agents.items()
            }
            saved = AdapterFiles(shared_name(self._config.model), self.by_name, agents)
        checkpoint.save(directory, saved, self.tokenizer, state, self.value_head, *beside)

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs beside the weights."""
        states = {name: updater.state_dict() for name, updater in self.updaters.items()}
        return {"adapters": states} if self.by_name else {"updater": states[None]}

    def read(self, directory: Path, state: Mapping[str, Any]) -> Callable[[], None]:
        """What puts the weights in `directory`, and `state`, in place. Raises PolicyError or ConfigError where they do
        not fit, before anything changes."""
        if not self.by_name and has_adapters(directory):
            raise PolicyError(
                f"{directory} holds adapters, and all weights are trained here; set policy.lora as it was"
            )
        states: Mapping[str | None, Any] = state.get("adapters", {}) if self.by_name else {None: state["updater"]}
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
        weights = checkpoint.read_model(directory, self.model).state_dict() if not self.by_name else {}
        adapted = {
            name: read_weights(adapter_directory(directory, name), adapter) for name, adapter in self.by_name.items()
        }

        def load() -> None:
            if not self.by_name:
                self.model.load_state_dict(weights)
            for name, adapter in self.by_name.items():
                set_weights(adapter, adapted[name])
            load_values()
            self.adapters.drop_stacks()

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
