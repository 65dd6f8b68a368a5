"""Sequential: several algorithms in one run, so that prompts and weights are tuned together.

The stages share the run: its tasks, store, policy, promotion gate, checkpoints and result. Each begins with the prompts
and weights that the one before has left, and counts its own steps; those of the run go on. Between two stages the run
has the gate decide, returns to the best checkpoint of the stage that ended, and measures the held-out tasks, so that
the gain of each stage is known by itself (`TrainingResult.stages`).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field, field_validator

from agentlightning.algorithms.base import ALGORITHMS, Algorithm, AlgorithmConfig, make_algorithm, register
from agentlightning.algorithms.training import Stage, Training
from agentlightning.errors import ConfigError
from agentlightning.policy.lora_config import AgentSetting
from agentlightning.policy.optimizer_config import OptimizerConfig
from agentlightning.util.settings import Chosen

# -- config ----------------------------------------------------------------------------------------------------------

# The settings of a sequence of algorithms.


class SequentialConfig(AlgorithmConfig):
    """The settings of Sequential.

    >>> agl.SequentialConfig(stages=[agl.APOConfig(), agl.LightningRLConfig(steps=50)]).rounds
    1
    """

    type: str = "sequential"
    """Which algorithm this is."""
    stages: tuple[Annotated[AlgorithmConfig, Chosen(ALGORITHMS)], ...]
    """The settings of the algorithms, in the order in which they run: a list of tables, each with its `type`, "apo",
    "lightning_rl" or one of your own."""
    rounds: int = Field(default=1, ge=1)
    """How often the whole list runs. In each round a stage begins anew, from the prompts and weights so far."""

    @field_validator("stages")
    @classmethod
    def _check_stages(cls, stages: tuple[AlgorithmConfig, ...]) -> tuple[AlgorithmConfig, ...]:
        if not stages:
            raise ValueError(
                "there is no stage; list at least one, for example one of type apo and one of lightning_rl"
            )
        return stages


# -- stages ----------------------------------------------------------------------------------------------------------

# Which algorithms can share a run.


def name_of(stage: Algorithm[Any]) -> str:
    """The name of an algorithm; of one without a name of its own, that of its class."""
    return type(stage).__name__ if stage.name == Algorithm.name else stage.name


def described(place: int, stage: Algorithm[Any]) -> str:
    """A stage in words: its number from 1, and its name."""
    return f"stage {place + 1} ({name_of(stage)})"


def check_stages(stages: object) -> tuple[Algorithm[Any], ...]:
    """The stages. Raises ConfigError where there is none, or one that cannot share a run with others."""
    if not isinstance(stages, list | tuple):
        raise ConfigError(
            f"Sequential({stages!r}): the stages are a list of algorithms: Sequential([APO(...), LightningRL(...)])"
        )
    found: list[Algorithm[Any]] = []
    for place, stage in enumerate(stages):
        found.append(_checked(place, stage))
        first = next(other for other, each in enumerate(found) if each is stage)
        if first != place:
            raise ConfigError(
                f"{described(place, stage)} is the same object as stage {first + 1}; give each stage an object of its"
                " own, or use rounds=2 to run the list twice"
            )
    if not found:
        raise ConfigError("Sequential([]) has no stage; give at least one: Sequential([APO(...), LightningRL(...)])")
    return tuple(found)


def _checked(place: int, stage: object) -> Algorithm[Any]:
    if not isinstance(stage, Algorithm):
        shown = stage.__name__ if isinstance(stage, type) else repr(stage)
        raise ConfigError(f"stage {place + 1} of Sequential, {shown}, is no algorithm; give objects: {shown}(...)")
    if stage.name == "sequential":
        raise ConfigError(f"stage {place + 1} of Sequential is a Sequential itself; list its stages in its place")
    if stage.objective != "reinforcement":
        raise ConfigError(
            f"{described(place, stage)} of Sequential learns from recorded data, with a learning rate of its own, and a"
            " run has one; do it before, and start from its checkpoint (policy.model), or set warm_start.dataset"
        )
    return stage


def agreed(setting: str, stages: Sequence[Algorithm[Any]], among: Sequence[Algorithm[Any]]) -> Any:
    """The value of a setting that these stages must have in common; None without a stage. Raises ConfigError where two
    differ, with their place `among` all."""
    for stage in stages[1:]:
        first, other = getattr(stages[0], setting), getattr(stage, setting)
        if first != other:
            names = [described(_place(each, among), each) for each in (stages[0], stage)]
            raise ConfigError(
                f"{names[0]} has {setting}={first!r} and {names[1]} {setting}={other!r}; the stages of a run share its"
                f" policy and its measurements: give both the same {setting}"
            )
    return getattr(stages[0], setting) if stages else None


def _place(stage: Algorithm[Any], among: Sequence[Algorithm[Any]]) -> int:
    return next(place for place, each in enumerate(among) if each is stage)


@register
class Sequential(Algorithm[SequentialConfig]):
    """Runs algorithms one after the other in one run; with `rounds`, the whole list several times.

    In a later round a stage begins anew, from the prompts and weights so far. Stages that learn weights share the run's
    policy, so they need the same `optimizer` and `agents`; all stages need the same `reward_weights`. Raises
    ConfigError for stages that cannot share a run.

        >>> both = agl.Sequential([agl.APO(rounds=30), agl.LightningRL(steps=50)])
        >>> both.total_steps, both.learns_weights
        (80, True)
    """

    name: ClassVar[str] = "sequential"
    config_class = SequentialConfig

    def __init__(self, stages: Sequence[Algorithm[Any]] | SequentialConfig, *, rounds: int = 1) -> None:
        if isinstance(stages, SequentialConfig):
            rounds, stages = stages.rounds, [make_algorithm(each) for each in stages.stages]
        self.stages: tuple[Algorithm[Any], ...] = check_stages(stages)
        if rounds < 1:
            raise ConfigError(f"rounds={rounds} runs no stage; use at least 1")
        self.rounds = rounds
        self._plan = [*self.stages, *(_anew(each) for _ in range(rounds - 1) for each in self.stages)]
        """The stages of all rounds."""
        self._learning = [each for each in self.stages if each.learns_weights]
        self.learns_weights = bool(self._learning)
        self.selects_result = any(each.selects_result for each in self.stages)
        self._agents = agreed("agents", self._learning, self.stages)
        self._optimizer = agreed("optimizer", [each for each in self._learning if each.optimizer], self.stages)
        self._reward_weights = agreed("reward_weights", self.stages, self.stages)
        self._model = agreed("model", [each for each in self.stages if each.model is not None], self.stages)
        if all(each.restorable for each in self.stages):
            self.config = SequentialConfig(stages=tuple(each.config for each in self.stages), rounds=rounds)
        self._running: int | None = None
        """The place of the stage that runs, or ran last."""
        self._restored: Mapping[str, Any] = {}
        """What a checkpoint held of the stage that ran when it was written."""

    def __repr__(self) -> str:
        rounds = f", rounds={self.rounds}" if self.rounds > 1 else ""
        return f"Sequential([{', '.join(map(repr, self.stages))}]{rounds})"

    @property
    def total_steps(self) -> int:
        return sum(each.total_steps for each in self._plan)

    @property
    def optimizer_steps(self) -> int:
        return sum(each.optimizer_steps for each in self._plan if each.learns_weights)

    @property
    def optimizer(self) -> OptimizerConfig | None:
        return self._optimizer

    @property
    def agents(self) -> Mapping[str, AgentSetting]:
        return self._agents or {}

    @property
    def reward_weights(self) -> Mapping[str, float] | None:
        return self._reward_weights

    @property
    def model(self) -> object:
        return self._model

    @property
    def restorable(self) -> bool:
        return hasattr(self, "config")

    def check_staleness(self, max_staleness: int) -> None:
        for place, stage in enumerate(self.stages):
            if stage.learns_weights and max_staleness > stage.total_steps:
                raise ConfigError(
                    f"run.max_staleness={max_staleness} is more than the {stage.total_steps} steps of"
                    f" {described(place, stage)}; use at most {stage.total_steps}, or more steps"
                )
            stage.check_staleness(max_staleness)

    # -- what is learned -----------------------------------------------------------------------------------------------

    def state_dict(self) -> Mapping[str, Any]:
        if self._running is None:
            return self._restored
        return {"stage": self._running, "state": dict(self._plan[self._running].state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._restored = state
        if self._running is not None:
            self._restore(self._running)

    def _restore(self, place: int) -> None:
        """Give a stage what the checkpoint holds of it. After a return to a checkpoint of an earlier stage, that is
        nothing: the stages that are over stay over."""
        if self._restored.get("stage") == place and self._restored["state"]:
            self._plan[place].load_state_dict(self._restored["state"])

    # -- the run -------------------------------------------------------------------------------------------------------

    async def run(self, training: Training) -> None:
        for place, stage in enumerate(self._plan):
            if await training.begin_stage(self._stage(place, stage)):
                self._restore(place)
                self._running = place
                await stage.run(training)

    def _stage(self, place: int, stage: Algorithm[Any]) -> Stage:
        return Stage(
            place,
            len(self._plan),
            name_of(stage),
            stage.total_steps,
            learns_weights=stage.learns_weights,
            selects_result=stage.selects_result,
            settings=_digest(getattr(stage, "config", None)),
        )


def _anew(stage: Algorithm[Any]) -> Algorithm[Any]:
    """The same algorithm, for a later round. What it was given that lives outside of it stays the same object."""
    outside = (getattr(stage, name, None) for name in ("store", "client", "on_favourite"))
    return copy.deepcopy(stage, {id(each): each for each in outside if each is not None})


def _digest(config: object) -> str:
    """Tells settings apart; empty for an algorithm that has none."""
    if not isinstance(config, BaseModel):
        return ""
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:16]
