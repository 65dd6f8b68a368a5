"""What a local policy trains: all weights of its model, or adapters over them. Each has its own optimiser.

A policy trains one kind for its whole life. `TrainedWeights` is what it asks of either; the weights of a name are those
of `TrainingSample.adapter`, and `own` is the name of the policy itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentlightning.errors import ConfigError, PolicyError
from agentlightning.models import checkpoint
from agentlightning.models.lora import AdapterFiles, Adapters, has_adapters, read_weights, set_weights
from agentlightning.models.lora.files import FOLDER, folder_name
from agentlightning.models.resolve import shared_name
from agentlightning.policy.local_config import LocalPolicyConfig
from agentlightning.policy.lora_config import LR_FACTOR, SHARED, AgentSetting, Lora, adapters_of
from agentlightning.policy.optimizer_config import OptimizerConfig, default_lr
from agentlightning.policy.update.updater import COUNTS, KEPT_COUNT, Updater
from agentlightning.policy.update.value_head import ValueHead, open_value_head, reading


class MakeUpdater(Protocol):
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
        ...


class TrainedWeights(Protocol):
    adapters: Adapters | None
    """None where all weights are trained."""
    own: str | None
    """The name of the policy itself: an adapter, or None for the model's own weights."""
    updaters: Mapping[str | None, Updater]
    """By name. A name that is not here does not learn."""
    value_head: ValueHead | None
    """The critic of the policy itself."""

    def use(self, name: str | None) -> AbstractContextManager[None]:
        """Forward passes within use these weights."""
        ...

    def changed(self) -> None:
        """The weights have changed."""
        ...

    def save(
        self,
        directory: Path,
        tokenizer: PreTrainedTokenizerBase,
        state: Mapping[str, Any] | None,
        *beside: checkpoint.Savable,
    ) -> None:
        """See `models.checkpoint.save`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs beside the weights."""
        ...

    def read(self, directory: Path, state: Mapping[str, Any]) -> Callable[[], None]:
        """What puts the weights in `directory`, and `state`, in place. Raises PolicyError or ConfigError where they do
        not fit, before anything changes."""
        ...

    def read_weights(self, directory: Path) -> Callable[[], None]:
        """`read` without the state of the optimisers."""
        ...


class UnadaptedWeights:
    """The weights of a model without adapters."""

    adapters: Adapters | None = None
    own: str | None = None

    def __init__(self, model: PreTrainedModel, value_head: ValueHead | None) -> None:
        self.updaters: Mapping[str | None, Updater] = {}
        self.value_head = value_head
        self._model = model

    def use(self, name: str | None) -> AbstractContextManager[None]:
        return nullcontext()

    def changed(self) -> None: ...

    def save(
        self,
        directory: Path,
        tokenizer: PreTrainedTokenizerBase,
        state: Mapping[str, Any] | None,
        *beside: checkpoint.Savable,
    ) -> None:
        checkpoint.save(directory, self._model, tokenizer, state, self.value_head, *beside)


class AllWeights(UnadaptedWeights):
    """All weights of the model."""

    def __init__(self, model: PreTrainedModel, updater: Updater) -> None:
        super().__init__(model, updater.value_head)
        self._updater = updater
        self.updaters: Mapping[str | None, Updater] = {None: updater}

    def state_dict(self) -> dict[str, Any]:
        return {"updater": self._updater.state_dict()}

    def read(self, directory: Path, state: Mapping[str, Any]) -> Callable[[], None]:
        if has_adapters(directory):
            raise PolicyError(
                f"{directory} holds adapters, and all weights are trained here; set policy.lora as it was"
            )
        load_weights, updater = self.read_weights(directory), state["updater"]
        self._updater.check_state_dict(updater)

        def load() -> None:
            load_weights()
            self._updater.load_state_dict(updater)

        return load

    def read_weights(self, directory: Path) -> Callable[[], None]:
        load_values = reading(self.value_head, directory)
        weights = checkpoint.read_weights(directory, self._model)

        def load() -> None:
            self._model.load_state_dict(weights)
            load_values()

        return load


class AdapterWeights:
    """Adapters over the model's own weights, which stay as they are."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: LocalPolicyConfig,
        shapes: Mapping[str, Lora],
        value_head: ValueHead | None,
        make_updater: MakeUpdater = Updater,
    ) -> None:
        """Raises ConfigError for adapters that the model cannot have, and for a critic of several."""
        if value_head is not None and list(shapes) != [SHARED]:
            raise ConfigError(
                f"policy.value_head is the critic of one policy, and the adapters {', '.join(sorted(shapes))} are"
                " trained here: leave it out, or let all agents share one policy"
            )
        self.value_head = value_head
        self.adapters: Adapters | None = Adapters(model)
        self._adapters = self.adapters
        self._base, self._agents = config.model, config.agents
        self.own: str | None = SHARED if SHARED in shapes else None
        self._updaters: dict[str, Updater] = {}
        weights = model.num_parameters()
        for name, lora in shapes.items():
            adapter = self._adapters.add(
                name, r=lora.r, alpha=lora.scale_numerator, targets=lora.targets, seed=config.seed
            )
            optimizer = _optimizer(lora, config, weights)
            checkpointing = config.gradient_checkpointing
            self._updaters[name] = make_updater(
                model, optimizer, adapter, value_head, gradient_checkpointing=checkpointing
            )
        self.updaters: Mapping[str | None, Updater] = {**self._updaters}

    def use(self, name: str | None) -> AbstractContextManager[None]:
        return self._adapters.use(name)

    def changed(self) -> None:
        self._adapters.drop_stacks()

    def save(
        self,
        directory: Path,
        tokenizer: PreTrainedTokenizerBase,
        state: Mapping[str, Any] | None,
        *beside: checkpoint.Savable,
    ) -> None:
        by_name = self._adapters.by_name
        files = AdapterFiles(
            shared_name(self._base),
            by_name.get(SHARED),
            {name: adapter for name, adapter in by_name.items() if name != SHARED},
            {agent: _as_json(setting) for agent, setting in self._agents.items()},
        )
        checkpoint.save(directory, files, tokenizer, state, self.value_head, *beside)

    def state_dict(self) -> dict[str, Any]:
        return {"adapters": {name: updater.state_dict() for name, updater in self._updaters.items()}}

    def read(self, directory: Path, state: Mapping[str, Any]) -> Callable[[], None]:
        states: Mapping[str, Any] = state.get("adapters", {})
        if states.keys() != self._updaters.keys():
            raise PolicyError(
                f"{directory} holds the adapters {sorted(states) or 'none'}, and {sorted(self._updaters)} are trained "
                "here; continue with the policy.lora and agents that it was saved with"
            )
        load_weights = self.read_weights(directory)
        for name, updater in self._updaters.items():
            updater.check_state_dict(states[name])

        def load() -> None:
            load_weights()
            for name, updater in self._updaters.items():
                updater.load_state_dict(states[name])

        return load

    def read_weights(self, directory: Path) -> Callable[[], None]:
        load_values = reading(self.value_head, directory)
        weights = {
            name: read_weights(directory if name == SHARED else directory / FOLDER / folder_name(name), adapter)
            for name, adapter in self._adapters.by_name.items()
        }

        def load() -> None:
            for name, adapter in self._adapters.by_name.items():
                set_weights(adapter, weights[name])
            load_values()
            self.changed()

        return load


def trained_weights(
    model: PreTrainedModel, config: LocalPolicyConfig, make_updater: MakeUpdater = Updater
) -> AllWeights | AdapterWeights:
    """What a configuration trains. Raises ConfigError where that is nothing, or impossible."""
    head = None
    if config.value_head is not None:
        head = open_value_head(model, config.value_head, config.model, config.seed)
    if shapes := adapters_of(config.lora, config.agents):
        return AdapterWeights(model, config, shapes, head, make_updater)
    optimizer = config.optimizer.completed(weights=model.num_parameters(), objective=config.objective)
    checkpointing = config.gradient_checkpointing
    return AllWeights(model, make_updater(model, optimizer, None, head, gradient_checkpointing=checkpointing))


def _optimizer(lora: Lora, config: LocalPolicyConfig, weights: int) -> OptimizerConfig:
    given = lora.optimizer or config.optimizer
    completed = given.completed(weights=weights, objective=config.objective, total_steps=config.optimizer.total_steps)
    if given.lr is not None:
        return completed
    return completed.model_copy(update={"lr": LR_FACTOR * default_lr(weights, config.objective)})


def _as_json(setting: AgentSetting) -> Any:
    return setting.model_dump(exclude_none=True) if isinstance(setting, Lora) else setting


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
