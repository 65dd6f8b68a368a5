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
from types import SimpleNamespace
from typing import Annotated, Any, cast

from pydantic import field_validator

from agentlightning.algorithms.base import ALGORITHMS, Algorithm, AlgorithmConfig, make_algorithm
from agentlightning.algorithms.training import Stage, Training
from agentlightning.errors import ConfigError
from agentlightning.policy.config import SUPERVISED_FACTOR
from agentlightning.util.settings import AtLeastOne, Chosen


class SequentialConfig(AlgorithmConfig):
    """The settings of Sequential.

    >>> agl.config.SequentialConfig(stages=[agl.config.APOConfig(), agl.config.LightningRLConfig(steps=50)]).rounds
    1
    """

    type: str = "sequential"
    """Which algorithm this is."""
    stages: tuple[Annotated[AlgorithmConfig, Chosen(ALGORITHMS)], ...]
    """The settings of the algorithms, in the order in which they run: a list of tables, each with its `type`."""
    rounds: AtLeastOne = 1
    """How often the whole list runs. In each round a stage begins anew, from the prompts and weights so far."""

    @field_validator("stages")
    @classmethod
    def _check_stages(cls, stages: tuple[AlgorithmConfig, ...]) -> tuple[AlgorithmConfig, ...]:
        if not stages:
            raise ValueError(
                "there is no stage; list at least one, for example one of type apo and one of lightning_rl"
            )
        return stages


class Sequential(Algorithm[SequentialConfig]):
    """Runs algorithms one after the other in one run; with `rounds`, the whole list several times.

    In a later round a stage begins anew, from the prompts and weights so far. Stages that learn weights share the run's
    policy, so they need the same `optimizer` and `agents`; all stages need the same `reward_weights`. Where no learning
    rate is set, that of a stage of supervised learning is ten times that of the others, as in a run of its own. Raises
    ConfigError for stages that cannot share a run.

        >>> both = agl.Sequential([agl.APO(rounds=30), agl.LightningRL(steps=50)])
        >>> both.total_steps, both.learns_weights
        (80, True)
    """

    name = "sequential"
    config_class = SequentialConfig

    def __init__(self, stages: Sequence[Algorithm[Any]] | SequentialConfig, *, rounds: int = 1) -> None:
        if isinstance(stages, SequentialConfig):
            rounds, stages = stages.rounds, [make_algorithm(each) for each in stages.stages]
        check_stages(stages)
        if not isinstance(rounds, int) or rounds < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"rounds={rounds} runs no stage; use a whole number, at least 1")
        self.stages, self.rounds = tuple(stages), rounds
        self._plan = [*stages, *(_anew(each) for _ in range(rounds - 1) for each in stages)]
        """The stages of all rounds."""
        learning = [each for each in stages if each.learns_weights]
        self.learns_weights = bool(learning)
        self.selects_result = any(each.selects_result for each in stages)
        self.objective = "supervised" if {each.objective for each in learning} == {"supervised"} else "reinforcement"
        self._common = SimpleNamespace(
            agents=self._agreed("agents", learning) or {},
            optimizer=self._agreed("optimizer", [each for each in learning if each.optimizer]),
            reward_weights=self._agreed("reward_weights", stages),
        )
        self._model = self._agreed("model", [each for each in stages if each.model is not None])
        if all(each.restorable for each in stages):
            self.config = SequentialConfig(stages=tuple(each.config for each in stages), rounds=rounds)
        self._running: int | None = None
        """The place of the stage that runs, or ran last."""
        self._restored: Mapping[str, Any] = {}
        """What a checkpoint held of the stage that ran when it was written."""

    def _agreed(self, setting: str, among: Sequence[Algorithm[Any]]) -> Any:
        """The value of a setting that these stages must have in common; None without a stage. Raises ConfigError where
        two differ."""
        places = [place for place, each in enumerate(self.stages) if each in among]
        found = [(described(place, self.stages[place]), getattr(self.stages[place], setting)) for place in places]
        for name, value in found[1:]:
            if value != found[0][1]:
                raise ConfigError(
                    f"{found[0][0]} has {setting}={found[0][1]!r} and {name} {setting}={value!r}; the stages of a run"
                    f" share its policy and its measurements: give both the same {setting}"
                )
        return found[0][1] if found else None

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
    def model(self) -> object:
        return self._model

    @property
    def restorable(self) -> bool:
        return hasattr(self, "config")

    @property
    def _settings(self) -> object:
        return self._common

    def check_staleness(self, max_staleness: int) -> None:
        super().check_staleness(max_staleness)
        for place, stage in enumerate(self.stages):
            if not stage.learns_weights:
                continue
            if max_staleness > stage.total_steps:
                raise ConfigError(
                    f"run.max_staleness={max_staleness} is more than the {stage.total_steps} steps of"
                    f" {described(place, stage)}; use at most {stage.total_steps}, or more steps"
                )
            stage.check_staleness(max_staleness)

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

    async def prepare(self, training: Training) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for stage in self.stages:
            found |= await stage.prepare(training)
        return found

    async def run(self, training: Training) -> None:
        unset = self.optimizer is None or self.optimizer.lr is None
        for place, stage in enumerate(self._plan):
            config = getattr(stage, "config", None)
            digest = hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:16] if config is not None else ""
            begun = Stage(
                place,
                len(self._plan),
                name_of(stage),
                stage.total_steps,
                learns_weights=stage.learns_weights,
                selects_result=stage.selects_result,
                settings=digest,
                lr_factor=SUPERVISED_FACTOR if unset and stage.objective != self.objective else 1.0,
            )
            if await training.begin_stage(begun):
                self._restore(place)
                self._running = place
                await stage.run(training)


def name_of(stage: Algorithm[Any]) -> str:
    """The name of an algorithm; of one without a name of its own, that of its class."""
    return type(stage).__name__ if stage.name == Algorithm.name else stage.name


def described(place: int, stage: Algorithm[Any]) -> str:
    """A stage in words: its number from 1, and its name."""
    return f"stage {place + 1} ({name_of(stage)})"


def check_stages(stages: object) -> None:
    """Raises ConfigError for what is no list of algorithms, or one of algorithms that cannot share a run."""
    way_out = "the stages are a list of algorithms: Sequential([APO(...), LightningRL(...)])"
    if not isinstance(stages, list | tuple):
        raise ConfigError(f"Sequential({stages!r}): {way_out}")
    found = cast("Sequence[object]", stages)
    if not found:
        raise ConfigError(f"Sequential([]) has no stage: {way_out}")
    for place, stage in enumerate(found):
        if not isinstance(stage, Algorithm):
            shown = stage.__name__ if isinstance(stage, type) else repr(stage)
            raise ConfigError(f"stage {place + 1} of Sequential, {shown}, is no algorithm; give objects: {shown}(...)")
        if isinstance(stage, Sequential):
            raise ConfigError(f"stage {place + 1} of Sequential is a Sequential itself; list its stages in its place")
        first = next(other for other, each in enumerate(found) if each is stage)
        if first != place:
            raise ConfigError(
                f"{described(place, cast('Algorithm[Any]', stage))} is the same object as stage {first + 1}; give each"
                " stage an object of its own, or use rounds=2 to run the list twice"
            )


def _anew(stage: Algorithm[Any]) -> Algorithm[Any]:
    """The same algorithm, for a later round. What it was given that lives outside of it stays the same object."""
    names = ("store", "client", "on_favourite", "on_step", "model", "dataset", "validation")
    outside = (getattr(stage, name, None) for name in names)
    return copy.deepcopy(stage, {id(each): each for each in outside if each is not None})
