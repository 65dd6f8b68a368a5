"""What a local policy trains: all weights of its model, or adapters over them. Each has its own optimiser.

A policy trains one kind for its whole life. The weights of a name are those of `TrainingSample.adapter`, and `own` is
the name of the policy itself: an adapter, or None for the model's own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentlightning.errors import ConfigError, PolicyError
from agentlightning.models import checkpoint
from agentlightning.models.lora import AdapterFiles, Adapters, has_adapters, read_weights, set_weights
from agentlightning.models.lora.files import FOLDER, folder_name
from agentlightning.models.resolve import shared_name
from agentlightning.policy.config import (
    LR_FACTOR,
    SHARED,
    AgentSetting,
    LocalPolicyConfig,
    Lora,
    OptimizerConfig,
    default_lr,
)
from agentlightning.policy.update.forward import Forward
from agentlightning.policy.update.updater import COUNTS, KEPT_COUNT, Updater
from agentlightning.policy.update.value_head import open_value_head, reading


class TrainedWeights:
    """The weights that a configuration trains."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: LocalPolicyConfig,
        make_updater: Callable[..., Updater] | None = Updater,
        make_forward: Callable[..., Forward] = Forward,
    ) -> None:
        """`make_updater`, `make_forward`: called as these classes are; None: other processes train the weights. Raises
        ConfigError for adapters that the model cannot have, for a critic of several, and where nothing is trained."""
        shapes = config.adapters
        self.value_head = config.value_head and open_value_head(model, config.value_head, config.model, config.seed)
        """The critic of the policy itself."""
        if shapes and self.value_head is not None and list(shapes) != [SHARED]:
            raise ConfigError(
                f"policy.value_head is the critic of one policy, and the adapters {', '.join(sorted(shapes))} are"
                " trained here: leave it out, or let all agents share one policy"
            )
        self._model, self._config, size = model, config, model.num_parameters()
        self.adapters = Adapters(model) if shapes else None
        """None where all weights are trained."""
        self.own: str | None = SHARED if SHARED in shapes else None
        trained: dict[str | None, tuple[OptimizerConfig, nn.Module | None]] = {}
        if self.adapters is None:
            trained[None] = config.optimizer.completed(weights=size, objective=config.objective), None
        else:
            for name, lora in shapes.items():
                adapter = self.adapters.add(
                    name, r=lora.r, alpha=lora.scale_numerator, targets=lora.targets, seed=config.seed
                )
                trained[name] = _optimizer(lora, config, size), adapter
        self.updaters: Mapping[str | None, Updater] = {}
        """By name. A name that is not here does not learn."""
        if make_updater is not None:
            forward = make_forward(model, gradient_checkpointing=config.gradient_checkpointing)
            self.updaters = {
                name: make_updater(model, optimizer, adapter, self.value_head, forward=forward)
                for name, (optimizer, adapter) in trained.items()
            }

    def use(self, name: str | None) -> AbstractContextManager[None]:
        """Forward passes within use these weights."""
        return nullcontext() if self.adapters is None else self.adapters.use(name)

    def changed(self) -> None:
        """The weights have changed."""
        if self.adapters is not None:
            self.adapters.drop_stacks()

    def save(
        self,
        directory: Path,
        tokenizer: PreTrainedTokenizerBase,
        state: Mapping[str, Any] | None,
        *beside: checkpoint.Savable,
    ) -> None:
        """See `models.checkpoint.save`."""
        saved: checkpoint.Savable = self._model
        if self.adapters is not None:
            by_name = dict(self.adapters.by_name)
            agents = {agent: _as_json(setting) for agent, setting in self._config.agents.items()}
            saved = AdapterFiles(shared_name(self._config.model), by_name.pop(SHARED, None), by_name, agents)
        checkpoint.save(directory, saved, tokenizer, state, self.value_head, *beside)

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
        adapters = {} if self.adapters is None else self.adapters.by_name
        weights = checkpoint.read_weights(directory, self._model) if self.adapters is None else {}
        adapted = {
            name: read_weights(directory if name == SHARED else directory / FOLDER / folder_name(name), adapter)
            for name, adapter in adapters.items()
        }

        def load() -> None:
            if self.adapters is None:
                self._model.load_state_dict(weights)
            for name, adapter in adapters.items():
                set_weights(adapter, adapted[name])
            load_values()
            self.changed()

        return load


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
