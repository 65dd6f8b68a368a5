"""Mapping between rows and the dataclasses of rollouts, attempts and resources. For spans, see spans/codec.py."""

from __future__ import annotations

import logging
import struct
from collections.abc import Container, Hashable, Sequence
from functools import lru_cache
from typing import Any, Final, cast

from pydantic import ValidationError

from agentlightning.errors import ConfigError, StoreError
from agentlightning.resources import NamedResources, ResourcesUpdate, named_resources
from agentlightning.rollouts import (
    ATTEMPT_TRANSITIONS,
    ROLLOUT_TRANSITIONS,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    Rollout,
    RolloutConfig,
)
from agentlightning.store import validation
from agentlightning.store.ids import new_id
from agentlightning.store.types import Worker
from agentlightning.util.json_values import loads

logger = logging.getLogger(__name__)

Row = tuple[Any, ...]

# -- JSON ------------------------------------------------------------------------------------------------------------


def load(text: str) -> Any:
    return loads(text)


def load_dict(text: str) -> dict[str, Any]:
    return {} if text == "{}" else loads(text)


UNREADABLE: Final = (ValueError, TypeError, LookupError, struct.error)
"""What decoding a damaged row raises."""


def damaged(what: str, rollout_id: str, error: Exception) -> StoreError:
    """The error to raise instead of one of UNREADABLE."""
    return StoreError(
        f"{what} is damaged in the database and cannot be read ({_first_line(error)}); "
        f"store.delete_rollouts([{rollout_id!r}]) removes the rollout with all that belongs to it"
    )


@lru_cache(maxsize=1024)
def report(message: str) -> None:
    """Log what a list leaves out or replaces, once."""
    logger.error(message)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# -- rollouts and attempts -------------------------------------------------------------------------------------------

DEFAULT_CONFIG = RolloutConfig()


def config_text(config: RolloutConfig) -> str | None:
    """The configuration as JSON; None for the default."""
    return None if config is DEFAULT_CONFIG else _config_text(cast("Hashable", config))


@lru_cache(maxsize=256)
def _config_text(config: Hashable) -> str | None:
    checked = cast("RolloutConfig", config)
    return None if checked == DEFAULT_CONFIG else checked.model_dump_json()


@lru_cache(maxsize=256)
def load_config(text: str | None) -> RolloutConfig:
    return DEFAULT_CONFIG if text is None else RolloutConfig.model_validate_json(text)


def new_rollout(request: EnqueueRolloutRequest, time: float) -> tuple[Rollout, Row]:
    """A queued rollout, and its columns after `key`. Raises ConfigError for what cannot be stored."""
    if request.rollout_id is not None:
        validation.check_new_id(request.rollout_id, "rollout_id")
    if request.resources_id is not None:
        validation.check_text(request.resources_id, "resources_id")
    queue = request.queue
    if queue is None:
        queue = request.mode or "default"
    if request.queue is not None or request.mode not in (None, "train", "val", "test"):
        validation.check_new_id(queue, "queue")
    if type(request.priority) is not int or not -(2**31) <= request.priority < 2**31:
        raise ConfigError(f"priority={request.priority!r} is not a 32-bit integer")
    metadata = validation.dict_to_json(request.metadata, "metadata") if request.metadata else "{}"
    config = DEFAULT_CONFIG if request.config is None else request.config
    rollout = Rollout(
        new_id("ro") if request.rollout_id is None else request.rollout_id,
        request.input,
        time,
        mode=request.mode,
        resources_id=request.resources_id,
        config=config,
        metadata={} if request.metadata is None else request.metadata,
        queue=queue,
        priority=request.priority,
    )
    return rollout, (
        rollout.rollout_id,
        validation.to_json(request.input, "input"),
        request.mode,
        request.resources_id,
        "queuing",
        time,
        None,
        config_text(config),
        metadata,
        0,
        queue,
        request.priority,
    )


def _optional(*kinds: type) -> tuple[type, ...]:
    return (*kinds, type(None))


_NUMBER: Final = (float, int)
_ROLLOUT: Final = (
    *(int, str, str, _optional(str), _optional(str), str, _NUMBER, _optional(float, int), _optional(str)),
    *(str, int, str, int),
)
"""The types of the columns, which SQLite does not enforce."""
_ATTEMPT: Final = (str, int, str, _NUMBER, _optional(float, int), _optional(str), _optional(float, int), str)


def check_name(value: Any) -> None:
    if not isinstance(value, str | None):
        raise TypeError("it is no text")


def _check(row: Sequence[Any], kinds: Sequence[Any], status: Any, known: Container[Any]) -> None:
    if status not in known or not all(map(isinstance, row, kinds)):
        raise TypeError("a column has a value of another type")


def to_rollout(row: Row) -> Rollout:
    """From the columns of `statements.ROLLOUT`."""
    return Rollout(*_rollout_fields(row))


def to_attempted(row: Row, attempt: Attempt) -> AttemptedRollout:
    """From the columns of `statements.ROLLOUT`."""
    return AttemptedRollout(*_rollout_fields(row), attempt=attempt)


def _rollout_fields(row: Row) -> Row:
    _, rollout_id, input, mode, resources_id, status, start_time, end_time, config, metadata, _, queue, priority = row
    try:
        _check(row, _ROLLOUT, status, ROLLOUT_TRANSITIONS)
        return (
            rollout_id,
            loads(input),
            start_time,
            status,
            mode,
            resources_id,
            end_time,
            DEFAULT_CONFIG if config is None else load_config(config),
            load_dict(metadata),
            queue,
            priority,
        )
    except UNREADABLE as error:
        raise damaged(f"rollout {rollout_id!r}", rollout_id, error) from error


def make_attempt(
    rollout_id: str,
    attempt_id: str,
    sequence_id: int,
    status: str,
    start_time: float,
    end_time: float | None,
    worker_id: str | None,
    heartbeat: float | None,
    metadata: str,
) -> Attempt:
    """`metadata` is JSON."""
    try:
        columns = attempt_id, sequence_id, status, start_time, end_time, worker_id, heartbeat, metadata
        _check(columns, _ATTEMPT, status, ATTEMPT_TRANSITIONS)
        values = load_dict(metadata)
    except UNREADABLE as error:
        raise damaged(f"attempt {attempt_id!r} of rollout {rollout_id!r}", rollout_id, error) from error
    return Attempt(
        rollout_id,
        attempt_id,
        sequence_id,
        start_time,
        cast("AttemptStatus", status),
        end_time,
        worker_id,
        heartbeat,
        values,
    )


def to_attempt(rollout_id: str, row: Row) -> Attempt:
    """From a row that begins with the columns of `statements.ATTEMPT`."""
    _, _, sequence_id, attempt_id, status, start_time, end_time, worker_id, heartbeat, metadata = row[:10]
    return make_attempt(
        rollout_id, attempt_id, sequence_id, status, start_time, end_time, worker_id, heartbeat, metadata
    )


# -- resources -------------------------------------------------------------------------------------------------------


def dump_resources(resources: NamedResources) -> str:
    """The resources as JSON, validated, and decoded once to be sure that a store can read them back."""
    try:
        checked = named_resources.validate_python(resources)
    except ValidationError as error:
        raise ConfigError(f"these resources are no dict of LLM and PromptTemplate by name: {error}") from error
    try:
        text = validation.to_json(named_resources.dump_python(checked, mode="json"), "resources")
        named_resources.validate_json(text)
    except ValueError as error:  # nested too deeply to be read again, say
        raise ConfigError(f"these resources could not be read back from a store: {error}") from error
    return text


def to_resources(row: Row) -> ResourcesUpdate:
    """From the columns of `statements.RESOURCES`."""
    resources_id, version, create_time, body, update_time = row
    try:
        resources = named_resources.validate_json(body)
    except ValidationError as error:
        raise StoreError(
            f"resources {resources_id!r} (version {version}) cannot be read: {error.errors()[0]['msg']}; "
            "update_resources replaces them, delete_resources removes them"
        ) from error
    return ResourcesUpdate(
        resources_id=resources_id,
        version=version,
        create_time=create_time,
        resources=resources,
        update_time=update_time,
    )


# -- workers ---------------------------------------------------------------------------------------------------------


def to_worker(row: Row, current: tuple[str, str] | None, open_attempts: int) -> Worker:
    """From the columns of `statements.WORKER`. current: the rollout id and id of its newest open attempt."""
    worker_id, heartbeat_time, stats, lease_seconds, _, lost, last_error = row
    rollout_id, attempt_id = current or (None, None)
    try:
        values, error = load_dict(stats), None if last_error is None else load(last_error)
    except UNREADABLE as fault:  # its work goes on
        values, error = {}, {"type": "Damaged", "message": f"its row cannot be read: {_first_line(fault)}"}
    status = "lost" if lost else "busy" if current else "idle"
    return Worker(
        worker_id, heartbeat_time, rollout_id, attempt_id, values, status, lease_seconds, error, open_attempts
    )
