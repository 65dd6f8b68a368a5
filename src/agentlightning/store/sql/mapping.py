"""Mapping between rows and the dataclasses of rollouts, attempts, resources and workers. For spans, see pack.py."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Container, Hashable, Sequence
from functools import lru_cache
from typing import Any, Final, cast

from msgspec import Struct, structs
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
from agentlightning.store.sql import schema
from agentlightning.store.types import Worker
from agentlightning.util.json_values import loads

logger = logging.getLogger(__name__)

# -- JSON and damage -------------------------------------------------------------------------------------------------


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

DEFAULT_CONFIG: Final = RolloutConfig()


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


def config_of(row: schema.RolloutRow) -> RolloutConfig:
    """Raises StoreError if the configuration of the rollout is damaged."""
    try:
        return load_config(row.config)
    except UNREADABLE as error:
        raise damaged(f"rollout {row.rollout_id!r}", row.rollout_id, error) from error


def metadata_of(row: schema.AttemptRow) -> dict[str, Any]:
    """Raises StoreError if the metadata of the attempt is damaged."""
    try:
        return load_dict(row.metadata)
    except UNREADABLE as error:
        raise _damaged_attempt(row.attempt_id, row.rollout.rollout_id, error) from error


def _damaged_attempt(attempt_id: str, rollout_id: str, error: Exception) -> StoreError:
    return damaged(f"attempt {attempt_id!r} of rollout {rollout_id!r}", rollout_id, error)


def new_rollout(request: EnqueueRolloutRequest | Rollout, time: float) -> tuple[Rollout, schema.RolloutRow]:
    """A queued rollout, and its row, whose key is 0. Raises ConfigError for what cannot be stored."""
    if request.rollout_id is not None:
        validation.check_new_id(request.rollout_id, "rollout_id")
    for name, text in (("resources_id", request.resources_id), ("mode", request.mode)):
        if text is not None:
            validation.check_text(text, name)
    queue = request.queue
    if queue is None:
        queue = request.mode or "default"
    if request.queue is not None or request.mode not in (None, "train", "val", "test"):
        validation.check_new_id(queue, "queue")
    if type(request.priority) is not int or not -(2**31) <= request.priority < 2**31:
        raise ConfigError(f"priority={request.priority!r} is not a 32-bit integer")
    metadata = validation.dict_to_json(request.metadata, "metadata") if request.metadata else "{}"
    rollout = Rollout(
        new_id("ro") if request.rollout_id is None else request.rollout_id,
        request.input,
        time,
        mode=request.mode,
        resources_id=request.resources_id,
        config=DEFAULT_CONFIG if request.config is None else request.config,
        metadata={} if request.metadata is None else request.metadata,
        queue=queue,
        priority=request.priority,
    )
    row = schema.RolloutRow(
        0, rollout.rollout_id, validation.to_json(request.input, "input"), request.mode, request.resources_id,
        "queuing", time, None, config_text(rollout.config), metadata, 0, queue, request.priority, stored=False,
    )  # fmt: skip
    return rollout, row


def _kinds(columns: type[Struct]) -> tuple[Any, ...]:
    """The types of the columns, which SQLite does not enforce."""
    return tuple([(*types, int) if float in types else types for types in schema.types_of(columns).values()])


_ROLLOUT: Final = _kinds(schema.RolloutColumns)
_ATTEMPT: Final = _kinds(schema.AttemptColumns)


def _check(columns: Sequence[Any], kinds: Sequence[Any], status: Any, known: Container[Any]) -> None:
    if status not in known or not all(map(isinstance, columns, kinds)):
        raise TypeError("a column has a value of another type")


def to_attempted(attempt: schema.AttemptRow) -> AttemptedRollout:
    return with_attempt(to_rollout(attempt.rollout), attempt)


def with_attempt(rollout: Rollout, attempt: schema.AttemptRow) -> AttemptedRollout:
    """rollout: as it is, or was before the attempt was claimed."""
    row, fields = attempt.rollout, structs.asdict(rollout)
    fields |= {"status": row.status, "end_time": row.end_time}
    return AttemptedRollout(**fields, attempt=to_attempt(attempt, row.rollout_id))


def to_rollout(row: schema.RolloutColumns) -> Rollout:
    try:
        _check(schema.rollout_columns(row), _ROLLOUT, row.status, ROLLOUT_TRANSITIONS)
        config = DEFAULT_CONFIG if row.config is None else load_config(row.config)
        return Rollout(
            *(row.rollout_id, loads(row.input), row.start_time, cast("Any", row.status), cast("Any", row.mode)),
            *(row.resources_id, row.end_time, config, load_dict(row.metadata), row.queue, row.priority),
        )
    except UNREADABLE as error:
        raise damaged(f"rollout {row.rollout_id!r}", row.rollout_id, error) from error


def _check_name(value: Any) -> None:
    if not isinstance(value, str | None):
        raise TypeError("it is no text")


_REPAIRS: Final[dict[str, tuple[Callable[[Any], Any], Any]]] = {
    "input": (loads, "null"),
    "config": (load_config, None),
    "metadata": (load_dict, "{}"),
    "mode": (_check_name, None),
    "resources_id": (_check_name, None),
}
"""By column: how it is read, and what replaces it if it cannot be."""


def repairs(row: schema.RolloutRow) -> tuple[dict[str, Any], dict[str, str]]:
    """(what to write in place of columns that cannot be read, their values as text)."""
    changes: dict[str, Any] = {"attempt_count": len(row.attempts)}
    replaced: dict[str, str] = {}
    for name, (read, default) in _REPAIRS.items():
        value: Any = getattr(row, name)
        try:
            read(value)
        except UNREADABLE:
            replaced[name] = value if isinstance(value, str) else repr(value)
            changes[name] = default
    return changes, replaced


def to_attempt(row: schema.AttemptColumns, rollout_id: str) -> Attempt:
    try:
        _check(schema.attempt_columns(row), _ATTEMPT, row.status, ATTEMPT_TRANSITIONS)
        metadata = load_dict(row.metadata)
    except UNREADABLE as error:
        raise _damaged_attempt(row.attempt_id, rollout_id, error) from error
    return Attempt(
        rollout_id, row.attempt_id, row.sequence_id, row.start_time, cast("AttemptStatus", row.status), row.end_time,
        row.worker_id, row.last_heartbeat_time, metadata,
    )  # fmt: skip


# -- resources and workers -------------------------------------------------------------------------------------------


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


def to_resources(row: Sequence[Any]) -> ResourcesUpdate:
    """From the columns `schema.RESOURCES`."""
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


def to_worker(row: schema.WorkerColumns, current: tuple[str, str] | None, open_attempts: int) -> Worker:
    """current: the rollout id and the id of its newest open attempt."""
    rollout_id, attempt_id = current or (None, None)
    try:
        stats, error = load_dict(row.stats), None if row.last_error is None else loads(row.last_error)
    except UNREADABLE as fault:  # its work goes on
        stats, error = {}, {"type": "Damaged", "message": f"its row cannot be read: {_first_line(fault)}"}
    status = "lost" if row.lost else "busy" if current else "idle"
    return Worker(
        row.worker_id, row.last_heartbeat_time, rollout_id, attempt_id, stats, status, row.lease_seconds, error,
        open_attempts,
    )  # fmt: skip
