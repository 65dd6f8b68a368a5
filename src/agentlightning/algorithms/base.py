"""The base class of algorithms: it requests rollouts, turns them into an update, and publishes the result.

`run` is given a `Training`, whose methods do these steps. An algorithm decides what to request, how credit is
assigned and which loss is used. It never calls a model, runs an agent or opens a file, so the same code runs on a
laptop and on a cluster. A crashed run resumes without its help: it starts at `training.step`.

An algorithm is a class in any module (docs/guides/extend.md).
"""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

from pydantic import AfterValidator, BaseModel, PositiveFloat

from agentlightning.algorithms.training import Collected, Training
from agentlightning.assemble import OTHER_MODELS, OVERRIDDEN_CALLS, UNTRAINABLE_CALLS
from agentlightning.credit import is_target, names_of, unrewarded
from agentlightning.credit.rejection import NO_POLICY_CALLS, NO_TARGET_CALLS, UNKNOWN_TOKENS, Rejection
from agentlightning.errors import ConfigError
from agentlightning.policy.config import AgentSetting, Objective, OptimizerConfig
from agentlightning.policy.learner import Learner
from agentlightning.trajectory import FloatArray, RewardWeights, TokenTree, Trajectory
from agentlightning.util.plugins import Registry, reference_to
from agentlightning.util.settings import PRESET_NAMES, AtLeastOne, Part, SettingsSignature, settings_from

C = TypeVar("C", bound=BaseModel)


class AlgorithmConfig(Part):
    """The base of the settings of an algorithm of one's own, which `Algorithm.config_class` names.

    >>> class MeasureConfig(agl.config.AlgorithmConfig):
    ...     steps: int = 1
    >>> MeasureConfig(steps=2).steps
    2
    """


def _checked_pattern(target: str | None) -> str | None:
    try:
        re.compile(target or "")
    except re.error as error:
        raise ValueError(f"{target!r} is no regular expression: {error}") from error
    return target


AgentPattern = Annotated[str | None, AfterValidator(_checked_pattern)]
"""A regular expression for names of agents, or None for all."""


class RolloutsConfig(AlgorithmConfig):
    """The settings that algorithms have in common which learn from groups of rollouts, new or recorded."""

    steps: AtLeastOne = 100
    """Updates of the whole run, one for each batch of rollouts."""
    tasks_per_step: AtLeastOne = 16
    """Tasks of each step."""
    group_size: AtLeastOne = 8
    """Rollouts of each task; of recorded sessions, at most."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature of new rollouts."""
    target_agent: AgentPattern = None
    """Only calls of agents whose whole name matches this regular expression are learned from. None: those that the
    agent itself declares (`LitAgent.trained_agents`), else all."""
    reward_weights: dict[str, float] | None = None
    """Weights of the named dimensions of a reward."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """How weights are updated."""


class Algorithm(ABC, Generic[C]):
    """The base class of all algorithms. A trainer runs the object it is given.

    A subclass defines `total_steps` and `run`. Its own settings, a `config_class`, are in `config`; the trainer reads
    `optimizer` and `reward_weights` from there, unless the subclass overrides those properties. Raises ConfigError for
    settings that cannot work.

        >>> class Measure(agl.Algorithm):
        ...     total_steps = 1
        ...     async def run(self, training):
        ...         collected = await training.collect(tasks=4, group_size=1, temperature=1.0)
        ...         await training.finish_step(collected, {})
        >>> Measure().total_steps
        1
    """

    config: C
    """Its settings; frozen, unknown keys are refused."""
    config_class: ClassVar[type[BaseModel]] = AlgorithmConfig
    """Their class."""
    name: ClassVar[str] = "algorithm"
    learns_weights: bool = True
    """Whether it trains a model. If not (prompt optimisation), the run opens no policy and needs no torch."""
    selects_result: bool = False
    """Whether it chooses its result on the validation tasks itself. The run then validates at no step and measures the
    held-out tasks in one mode, no task may be in two splits, and `total_steps` is a bound that it may stay below."""
    objective: Objective = "reinforcement"
    """What the default learning rate is chosen for."""

    __signature__ = SettingsSignature()

    def __init__(self, config: C | None = None, **settings: Any) -> None:
        source = f"from the arguments of {type(self).__name__}"
        made: Any = settings_from(self.config_class, settings, base=config, source=source)
        self.config = made if made.type else made.model_copy(update={"type": class_name(self)})

    def with_settings(self, values: Mapping[str, Any], source: str) -> Self:
        """A copy with other settings, which shares nothing that it learns with this one. Raises ConfigError; `source`
        says where the values come from."""
        found, config = copy.copy(self), getattr(self, "config", AlgorithmConfig())
        found.config = settings_from(type(config), values, base=config, source=source)  # pyright: ignore[reportAttributeAccessIssue]
        return found

    @property
    @abstractmethod
    def total_steps(self) -> int:
        """The number of steps of a whole run."""

    async def prepare(self, training: Training) -> Mapping[str, str]:
        """What was found in order before a run, or its continuation, begins, as a dry run lists it: name -> sentence.
        Raises ConfigError where the run could not do its work, before a rollout is paid for."""
        return {}

    @abstractmethod
    async def run(self, training: Training) -> object:
        """Do the steps from `training.step` to `total_steps`. The return value is ignored."""

    @property
    def reads_sessions(self) -> bool:
        """Whether it learns from sessions of a store in a run without an agent, and not from data of its own."""
        return True

    def check_staleness(self, max_staleness: int) -> None:
        """Raises ConfigError where rollouts would have to run for more steps than there are, and for settings that
        cannot act in a run with this `run.max_staleness`."""
        if max_staleness > self.total_steps:
            raise ConfigError(
                f"run.max_staleness={max_staleness} is more than the {self.total_steps} steps of {self.name}; use at"
                f" most {self.total_steps}, or more steps (algorithm.steps)"
            )

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
    def reward_weights(self) -> RewardWeights:
        """Weights of the named dimensions of a reward, also used by evaluations."""
        return getattr(self._settings, "reward_weights", None)

    @property
    def restorable(self) -> bool:
        """Whether its settings bring it back when a run is resumed."""
        try:
            found = ALGORITHMS.find(getattr(self._settings, "type", None))
        except ConfigError:
            return False
        return found is type(self) and found.__module__ != "__main__"  # A script is not imported to resume a run.

    @property
    def model(self) -> object:
        """The model to train, named as in `PolicyConfig.model`. None: the trainer's."""
        return None

    @property
    def _settings(self) -> object:
        return getattr(self, "config", None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self, 'config', '')!s})"


def without_calls(trajectories: Sequence[Trajectory]) -> list[Rejection]:
    """Rejects rollouts that hold no call of the policy: another model answered, or no model was called."""
    metadata = [trajectory.metadata for trajectory in trajectories]
    unknown, others = (sum(counts.get(name, 0) for counts in metadata) for name in (UNTRAINABLE_CALLS, OTHER_MODELS))
    if unknown + others:
        reason = UNKNOWN_TOKENS
        message = (
            f"none of the {unknown + others} model calls of these rollouts can be learned from: {others} were answered"
            f" by other models than the policy, and of {unknown} the tokens are not known. What is learned from are the"
            " tokens of the policy: have the agent ask for the policy's name, or change the route that leads its model"
            " elsewhere ([gateway] routes); text alone is enough for SFT"
        )
    else:
        reason = NO_POLICY_CALLS
        message = (
            f"none of these {len(trajectories)} rollouts called the policy: no model call reached the gateway. The"
            " agent must send its model calls to the address in OPENAI_BASE_URL, OPENAI_API_BASE or ANTHROPIC_BASE_URL"
            " (or the injected base_url), which are in the environment of each attempt. Look for an address in its code"
            " or configuration (base_url=, api_base=, a .env file that overrides the environment), for a client that"
            " reads none of these variables (Codex takes its address on the command line), for a cache of answers, and"
            " for errors that the agent catches; docs/guides/frameworks.md says what each framework needs"
        )
    return [Rejection(trajectory.rollout_id, reason, message) for trajectory in trajectories]


def without_any_call(trajectories: Sequence[Trajectory], target: str | None) -> list[Rejection]:
    """Rejects all of them if they hold no call of the policy, or none of the agents to train."""
    agents = {call.agent for trajectory in trajectories for call in trajectory.transitions}
    if not agents:
        return without_calls(trajectories)
    if any(is_target(agent, target) for agent in agents):
        return []
    message = (
        f"no call of these {len(trajectories)} rollouts is of an agent called {target!r}; there are {names_of(agents)}."
        " Change target_agent (or trained_agents), or name the agent with agl.track_agent"
    )
    return [Rejection(trajectory.rollout_id, NO_TARGET_CALLS, message) for trajectory in trajectories]


def unusable(trajectories: Sequence[Trajectory], target: str | None) -> list[Rejection]:
    """Rejects rollouts without a reward that is a number, or without a call of the agents to train."""
    found = unrewarded(trajectories, "it has no reward: call agl.emit_reward")
    refused = {each.rollout_id for each in found}
    others = [each for each in trajectories if each.rollout_id not in refused]
    message = "no call is of " + ("the policy" if target is None else f"an agent {target!r}")
    return found + (
        without_any_call(others, target)
        or [
            Rejection(each.rollout_id, NO_TARGET_CALLS, message)
            for each in others
            if not any(is_target(call.agent, target) for call in each.transitions)
        ]
    )


def reward_metrics(collected: Collected) -> Mapping[str, float]:
    """Mean reward of a batch, without missing rewards, and counts of its calls."""
    known = [reward for each in collected.trajectories if (reward := each.score) is not None]
    calls = sum(len(each.transitions) for each in collected.trajectories)
    return {
        "reward": sum(known) / len(known) if known else float("nan"),
        "calls_per_rollout": calls / max(1, len(collected.trajectories)),
        "calls_overridden": sum(each.metadata.get(OVERRIDDEN_CALLS, 0) for each in collected.trajectories),
    }


def learner_of(training: Training) -> Learner:
    """The weights of a run. Raises ConfigError where it trains none."""
    if training.learner is None:
        raise ConfigError("this run trains no model, so there are no log-probabilities to compare with")
    return training.learner


async def scores_of(
    training: Training, trees: Sequence[TokenTree], model: str | None
) -> Sequence[tuple[FloatArray, ...]]:
    """The log-probabilities of each tree under another model, named as in `PolicyConfig.model`. None: under the weights
    that the run started from."""
    directory = await training.starting_weights() if model is None else Path(model)
    return (await learner_of(training).score(trees, {"ref_logprobs"}, reference=directory))["ref_logprobs"]


R = TypeVar("R", bound=RolloutsConfig)


class RolloutsAlgorithm(Algorithm[R]):
    """The base of algorithms that learn from groups of rollouts, a batch at each step."""

    @property
    def total_steps(self) -> int:
        return self.config.steps

    async def run(self, training: Training) -> None:
        while training.step < self.total_steps:
            await self._step(training)

    @abstractmethod
    async def _step(self, training: Training) -> None:
        """One step."""

    def _target(self, training: Training) -> str | None:
        """The agents to train, as the settings say, or else the agent itself."""
        return self.config.target_agent if self.config.target_agent is not None else training.target_agent

    async def _rollouts(self, training: Training) -> Collected:
        """Those with a reward, and a call of the agents to train."""
        config, target = self.config, self._target(training)
        return await training.collect(
            tasks=config.tasks_per_step,
            group_size=config.group_size,
            temperature=config.temperature,
            check=lambda found: unusable(found, target),
        )


ALGORITHMS = Registry(
    "algorithms",
    "algorithm",
    Algorithm,
    {
        "apo": "agentlightning.algorithms.apo.algorithm:APO",
        "dpo": "agentlightning.algorithms.preference:DPO",
        "lightning_rl": "agentlightning.algorithms.lightning_rl:LightningRL",
        "rejection": "agentlightning.algorithms.sft:RejectionSampling",
        "sequential": "agentlightning.algorithms.sequential:Sequential",
        "sft": "agentlightning.algorithms.sft:SFTAlgorithm",
    },
)
"""By `name`, which is the `type` in their settings."""
ALGORITHMS.elsewhere = {name: f"algorithm.preset={name}" for name in PRESET_NAMES} | {"ppo": "algorithm.loss=ppo"}


def make_algorithm(config: object) -> Algorithm[Any]:
    """The algorithm with these settings. Raises ConfigError for an unknown type."""
    return ALGORITHMS.find(getattr(config, "type", None))(config)


def class_name(algorithm: Algorithm[Any]) -> str:
    """`module:Class` of an algorithm."""
    return reference_to(type(algorithm))
