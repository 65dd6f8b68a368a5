"""Callbacks: what a run does beside collecting, learning and measuring, at the points of each step.

A run calls its callbacks in one order at every point: curve, tracking, reward guard, token ratios, audit log, health,
promotion gate, and then those of others as they were named. Each has a state of its own, which `state.json` holds under
its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import msgspec
from msgspec import Struct

from agentlightning.algorithms.training import Collected, Training
from agentlightning.errors import ResumeError
from agentlightning.policy.base import Metrics, UpdateOptions
from agentlightning.trajectory import TrainingSample
from agentlightning.util.plugins import described

if TYPE_CHECKING:
    from agentlightning.evaluation.evaluation import Evaluation
    from agentlightning.training.report.result import TrainingResult

S = TypeVar("S")


class NoState(Struct):
    """The state of a callback that remembers nothing."""


class FinishedStep(Struct):
    """A step whose algorithm is done with it.

    >>> from agentlightning.algorithms.training import Collected
    >>> from agentlightning.training.callbacks import FinishedStep
    >>> FinishedStep(Collected(()), {"step": 3, "reward": 0.5}).line["reward"]
    0.5
    """

    collected: Collected
    """The batch that it learned from."""
    line: dict[str, Any]
    """Its metrics so far, as `metrics.jsonl` gets them."""
    is_last: bool = False
    """Whether it is the last one of the run, or of its stage."""
    saves: bool = False
    """Set it to have a checkpoint written after the step, whether one is due or not."""
    notes: list[str] = []
    """What is shown once the step is written."""
    stop: str | None = None
    """Set it to end the run, which can be resumed, once the step is written: the message of its TrainingStopped."""

    @property
    def returned(self) -> bool:
        """Whether the run has returned to earlier weights in this step."""
        return bool(self.line.get("rolled_back") or self.line.get("stopped"))


class Callback(Generic[S]):
    """Code of one's own at the points of a training run, in the trainer's process. Override what is needed.

    `run` is the training run, as an algorithm sees it. What is to survive a resume is in `state`, an object of
    `state_class` (a dataclass whose fields have defaults, of what JSON holds): it is saved with each checkpoint, so
    that a step which a crash has undone is undone here, too. What a method raises ends the run, which can be resumed;
    `agl.errors.TrainingStopped` does so without blame.

        >>> from dataclasses import make_dataclass
        >>> Best = make_dataclass("Best", [("reward", float, 0.0)])
        >>> class Record(agl.Callback[Best]):
        ...     state_class = Best
        ...     async def on_step(self, step):
        ...         self.state.reward = max(self.state.reward, step.line["reward"])
        ...         return {"best_reward": self.state.reward}
        >>> Record.name
        'Record'
    """

    name: ClassVar[str] = ""
    """Names its state; by default that of the class."""
    state_class: ClassVar[type[Any]] = NoState
    state: S
    run: Training

    def __init_subclass__(cls) -> None:
        cls.name = cls.__dict__.get("name", cls.__name__)

    async def on_start(self) -> None:
        """A process is about to begin, or continue, the steps."""

    async def on_batch(self, collected: Collected) -> None:
        """A batch was collected; nothing has learned from it."""

    def before_update(self, options: UpdateOptions) -> UpdateOptions:
        """The options of an update, changed or not."""
        return options

    async def on_update(self, samples: Sequence[TrainingSample]) -> Metrics | None:
        """The weights were updated. Returns further metrics of the update."""

    async def on_validation(self, results: Mapping[str, Evaluation]) -> None:
        """The validation tasks were measured in a step, by sampling mode."""

    async def on_step(self, step: FinishedStep) -> Metrics | None:
        """A step is finished, and not written. Returns what its line gains."""

    async def on_step_end(self, step: FinishedStep) -> None:
        """Its line is written, and a checkpoint where one was due."""

    async def on_checkpoint(self) -> None:
        """A checkpoint was written, which `state.json` is about to name."""

    async def on_stage(self) -> None:
        """A stage of a run of several algorithms has begun."""

    async def on_revision(self) -> None:
        """Rewards mean something else from here on."""

    async def on_trained(self) -> None:
        """Training, or a stage of it, is over. Its result is measured next."""

    async def on_end(self, result: TrainingResult) -> TrainingResult:
        """The run is finished. Returns the result, changed or not."""
        return result

    async def close(self) -> None:
        """The process leaves the run, finished or not."""


def restore(callback: Callback[Any], table: Mapping[str, Any]) -> None:
    """Give a callback its saved state. Raises ResumeError where it does not fit."""
    try:
        callback.state = msgspec.convert(table, callback.state_class)
    except msgspec.ValidationError as error:
        raise ResumeError(
            f"the state of callback {described(type(callback))} cannot be read: {error}; mend it, or leave the callback"
            " out (run.callbacks)"
        ) from error


def saved(callback: Callback[Any]) -> dict[str, Any]:
    """Its state as JSON values. Raises TypeError and ValueError for what JSON has not."""
    state: Any = callback.state
    # msgspec leaves out fields of a dataclass that have the default of their class.
    table = msgspec.to_builtins(asdict(state) if hasattr(state, "__dataclass_fields__") else state)
    json.dumps(table, allow_nan=False)
    return table
