"""The base class of algorithms: it requests rollouts, turns them into an update, and publishes the result.

`run` is given a `Training`, whose methods do these steps. An algorithm decides what to request, how credit is
assigned and which loss is used. It never calls a model, runs an agent or opens a file, so the same code runs on a
laptop and on a cluster. A crashed run resumes without its help: it starts at `training.step`.

Adding an algorithm means a file with a class and a line in `agentlightning.algorithms`. One that is made from settings
is registered under the `type` of its configuration.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel

from agentlightning.algorithms.training import Training
from agentlightning.errors import ConfigError
from agentlightning.policy.lora_config import AgentSetting

if TYPE_CHECKING:
    from agentlightning.policy.optimizer_config import Objective, OptimizerConfig

C = TypeVar("C", bound=BaseModel)
A = TypeVar("A", bound="Algorithm[Any]")


class Algorithm(ABC, Generic[C]):
    """The base class of all algorithms. A trainer runs the object it is given.

    A subclass defines `total_steps` and `run`. Its own settings are in `config`; the trainer reads `optimizer` and
    `reward_weights` from there, unless the subclass overrides those properties.

        >>> class Measure(agl.Algorithm):
        ...     total_steps = 1
        ...     async def run(self, training):
        ...         collected = await training.collect(tasks=4, group_size=1, temperature=1.0)
        ...         await training.finish_step(collected, {})
        >>> Measure().total_steps
        1
    """

    config: C
    """Its settings, where it has any; frozen, unknown keys are refused."""
    name: ClassVar[str] = "algorithm"
    learns_weights: bool = True
    """Whether it trains a model. If not (prompt optimisation), the run opens no policy and needs no torch."""
    selects_result: bool = False
    """Whether it chooses its result on the validation tasks itself. The run then validates at no step and measures the
    held-out tasks in one mode, no task may be in two splits, and `total_steps` is a bound that it may stay below."""
    objective: ClassVar[Objective] = "reinforcement"
    """What the default learning rate is chosen for."""

    @property
    @abstractmethod
    def total_steps(self) -> int:
        """The number of steps of a whole run."""

    @abstractmethod
    async def run(self, training: Training) -> object:
        """Do the steps from `training.step` to `total_steps`. The return value is ignored."""

    def check_staleness(self, max_staleness: int) -> None:
        """Raises ConfigError for settings that cannot act in a run with this `run.max_staleness`."""

    def state_dict(self) -> Mapping[str, Any]:
        """What it has learned beside the weights, for checkpoints: anything that JSON holds. Empty: nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned when the checkpoint was written. Called before `run` when a run
        resumes, and when it returns to an earlier checkpoint."""

    @property
    def optimizer(self) -> OptimizerConfig | None:
        """How the policy's weights are updated. None: as the trainer's own settings say."""
        return getattr(self._settings, "optimizer", None)

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps of a whole run: the length of a learning-rate schedule."""
        return self.total_steps * int(getattr(self._settings, "minibatches", 1))

    @property
    def agents(self) -> Mapping[str, AgentSetting]:
        """What the calls of each agent train. Empty: all train the policy itself."""
        return getattr(self._settings, "agents", {})

    @property
    def reward_weights(self) -> Mapping[str, float] | None:
        """Weights of the named dimensions of a reward, also used by evaluations."""
        return getattr(self._settings, "reward_weights", None)

    @property
    def restorable(self) -> bool:
        """Whether its settings bring it back when a run is resumed."""
        return True

    @property
    def model(self) -> object:
        """The model to train, named as in `PolicyConfig.model`. None: the trainer's."""
        return None

    @property
    def _settings(self) -> object:
        return getattr(self, "config", None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self, 'config', '')!s})"


_ALGORITHMS: dict[str, type[Algorithm[Any]]] = {}


def register(algorithm: type[A]) -> type[A]:
    """Make an algorithm known by its `name`, which is the `type` in its settings; a class decorator."""
    _ALGORITHMS[algorithm.name] = algorithm
    return algorithm


def make_algorithm(config: BaseModel) -> Algorithm[Any]:
    """The algorithm with these settings. Raises ConfigError for an unknown type."""
    name = getattr(config, "type", None)
    if name not in _ALGORITHMS:
        raise ConfigError(f"unknown algorithm {name!r}; known: {', '.join(sorted(_ALGORITHMS))}")
    make: Any = _ALGORITHMS[name]
    return make(config)


def is_registered(algorithm: Algorithm[Any]) -> bool:
    """Whether `make_algorithm` brings it back from its settings."""
    return _ALGORITHMS.get(algorithm.name) is type(algorithm)


def class_name(algorithm: Algorithm[Any]) -> str:
    """`module:Class` of an algorithm."""
    return class_path(type(algorithm))


def class_path(kind: type[Algorithm[Any]]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"
