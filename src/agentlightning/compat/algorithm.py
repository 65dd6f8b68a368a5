"""Algorithms of 0.x: `algo` makes one of a function, `Baseline` runs the agent on the tasks and trains nothing."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from agentlightning.algorithms.base import Algorithm
from agentlightning.algorithms.training import Collected, Training
from agentlightning.compat.adapters import TracerTraceToTriplet, TraceToMessages
from agentlightning.errors import ConfigError
from agentlightning.store.base import LightningStoreBase

ARGUMENTS: Final = ("store", "train_dataset", "val_dataset", "initial_resources", "adapter")


@dataclass(eq=False)
class _RunStore:
    """The store of a run for its algorithm: what it enqueues waits where the run's own runner claims."""

    _store: LightningStoreBase
    _queue: str | None

    async def enqueue_rollout(self, input: Any, *args: Any, **options: Any) -> Any:
        return await self._store.enqueue_rollout(input, *args, **{"queue": self._queue, **options})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class FunctionalAlgorithm(Algorithm[Any]):
    """An algorithm made of a function; see `algo`. It has one step, in which the function is called.

    >>> agl.FunctionalAlgorithm(lambda store: None).total_steps
    1
    """

    learns_weights = False

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.adapter: Any = TracerTraceToTriplet()
        parameters = inspect.signature(function).parameters.values()
        self.wanted = [each.name for each in parameters if each.name in ARGUMENTS]
        unknown = [each.name for each in parameters if each.name not in ARGUMENTS and each.default is each.empty]
        if unknown:
            raise ConfigError(
                f"there is no value for the parameter {unknown[0]!r} of {getattr(function, '__name__', function)};"
                f" an algorithm may have {', '.join(ARGUMENTS)}. Models are resources here: publish an agl.LLM in the"
                " store"
            )

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.function(*args, **options)

    @property
    def total_steps(self) -> int:
        return 1

    async def run(self, training: Training) -> None:
        if training.step:
            return
        run: Any = training  # A function of 0.x is given parts of the run that algorithms do not see.
        collector, tasks = run.collector, run.tasks
        values: dict[str, Any] = {
            "store": _RunStore(collector.store, collector.queue),
            "train_dataset": tasks.train,
            "val_dataset": tasks.validation,
            "initial_resources": dict(training.resources),
            "adapter": self.adapter,
        }
        arguments = {name: values[name] for name in self.wanted}
        if inspect.iscoroutinefunction(self.function):
            await self.function(**arguments)
        else:
            await asyncio.to_thread(self.function, **arguments)
        latest = await collector.store.get_latest_resources()
        if latest is not None and not latest.resources_id.startswith(run.state.run_id):
            await training.publish(latest.resources)
        await training.finish_step(Collected(()), {})


def algo(function: Callable[..., Any]) -> FunctionalAlgorithm:
    """Make an algorithm of a function, sync or async, for `Trainer(algorithm=...)`. By the names of its parameters it
    gets `store`, `train_dataset`, `val_dataset`, `initial_resources` and `adapter`: the trainer's, else a
    `TracerTraceToTriplet`. The resources that it publishes last are the result. A subclass of `agl.Algorithm` also
    resumes, validates and learns.

    Raises ConfigError for a parameter without a value.

        >>> @agl.algo
        ... async def measure(*, store, train_dataset):
        ...     for task in train_dataset:
        ...         await store.enqueue_rollout(task, mode="train")
        >>> measure.total_steps
        1
    """
    return FunctionalAlgorithm(function)


def with_adapter(algorithm: Algorithm[Any] | None, adapter: Any) -> Algorithm[Any] | None:
    """The algorithm with the `adapter=` of a trainer. Raises ConfigError where it would not be used."""
    reads_messages = algorithm is not None and algorithm.name == "apo"
    if adapter is None or (reads_messages and isinstance(adapter, TraceToMessages)):
        return algorithm
    if not isinstance(algorithm, FunctionalAlgorithm) or "adapter" not in algorithm.wanted:
        raise ConfigError(
            f"adapter={type(adapter).__name__} has no place in this trainer: it is given to a function that @agl.algo"
            " decorates, and other algorithms are given token trees. Leave it out, or call it in an algorithm of your"
            " own: adapter.adapt(await store.query_spans(rollout_id)); to learn from one agent's calls, set"
            " algorithm.target_agent"
        )
    if not callable(getattr(adapter, "adapt", None)):
        raise ConfigError(f"adapter={adapter!r} has no method adapt(spans); give agl.TracerTraceToTriplet()")
    found = copy.copy(algorithm)
    found.adapter = adapter
    return found


@dataclass(eq=False)
class Baseline(Algorithm[Any]):
    """Runs the agent once on each task, and trains nothing."""

    tasks: int
    learns_weights = False

    @property
    def total_steps(self) -> int:
        return 1

    async def run(self, training: Training) -> None:
        if training.step:
            return
        collected = await training.collect(tasks=self.tasks, group_size=1, temperature=1.0)
        rewards = [reward for each in collected.trajectories if (reward := each.score) is not None]
        await training.finish_step(collected, {"reward": sum(rewards) / len(rewards)} if rewards else {})
