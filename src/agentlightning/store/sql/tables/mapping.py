"""Rows to dataclasses and back.

JSON is written and read with orjson, and refused at the edge when it cannot be read back as it was: orjson would turn
NaN into null without a word. Spans are the business of packs.py.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, cast

import orjson
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
from agentlightning.store.ids import new_id

Row = tuple[Any, ...]

# -- JSON ------------------------------------------------------------------------------------------------------------


def dump(value: Any, what: str) -> str:
    """`value` as JSON. `what` names it in the ConfigError raised where it is not JSON, or holds NaN or infinity."""
    try:
        text = orjson.dumps(value).decode()
    except TypeError as error:
        raise ConfigError(
            f"{what} cannot be stored as JSON: {error}; use str, int, float, bool, None, list, dict"
        ) from error
    if "null" in text:
        _refuse_not_finite(value, what)
    return text


def _refuse_not_finite(value: Any, what: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{what} is {value}, which JSON cannot hold; leave it out or send it as text")
    if isinstance(value, Mapping):
        for key, item in cast("Mapping[str, Any]", value).items():
            _refuse_not_finite(item, f"{what}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(cast("Sequence[Any]", value)):
            _refuse_not_finite(item, f"{what}[{index}]")


def load(text: str) -> Any:
    return orjson.loads(text)


def load_dict(text: str) -> dict[str, Any]:
    return {} if text == "{}" else orjson.loads(text)


UNREADABLE: Final = (ValueError, TypeError, LookupError, struct.error)
"""What reading a damaged row raises."""


def damaged(what: str, rollout_id: str, error: Exception) -> StoreError:
    """The error to raise instead of one of UNREADABLE."""
    return StoreError(
        f"{what} is damaged in the database and cannot be read ({_first_line(error)}); "
        f"store.delete_rollouts([{rollout_id!r}]) removes the rollout with all that belongs to it"
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# -- checks ----------------------------------------------------------------------------------------------------------

MAX_TEXT: Final = 512
NO_LIMIT: Final = 2**62
_id = re.compile(r"[A-Za-z0-9_:-]{1,128}")


def check_text(value: Any, what: str) -> None:
    """Raises ConfigError where `value` is not text that every database keeps."""
    if type(value) is str and value.isascii() and len(value) <= MAX_TEXT and "\0" not in value:
        return
    if not isinstance(value, str):
        raise ConfigError(f"{what}={value!r} is no text")
    if len(value) > MAX_TEXT:
        raise ConfigError(f"{what}={value[:40]!r}... has {len(value)} characters; the store takes {MAX_TEXT}")
    if "\0" in value:
        raise ConfigError(f"{what}={value!r} holds a NUL character; leave it out")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what}={value!r} is not Unicode text: {error.reason}") from error


def check_texts(values: Sequence[Any] | None, what: str) -> None:
    if values is None:
        return
    if isinstance(values, str):
        raise ConfigError(f"{what}={values!r} is one text; give a list")
    for value in values:
        check_text(value, what)


def check_new_id(value: Any, what: str) -> None:
    """For an id or a name that becomes part of URLs."""
    if not isinstance(value, str) or not _id.fullmatch(value):
        raise ConfigError(f"{what}={value!r} cannot be part of a URL; use up to 128 letters, digits, - _ and :")


def check_time(value: Any, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{what}={value!r} is no time in seconds")


def check_page(limit: Any, offset: Any = 0) -> tuple[int, int]:
    """(limit, offset) as a database takes them."""
    for name, value, least in (("limit", limit, -1), ("offset", offset, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            advice = "-1 for no limit, or a number from 0" if name == "limit" else "a number from 0"
            raise ConfigError(f"{name}={value!r} is out of range; use {advice}")
    return (NO_LIMIT if limit == -1 else min(limit, NO_LIMIT)), min(offset, NO_LIMIT)


def check_rollout_status(value: Any) -> str:
    if value not in ROLLOUT_TRANSITIONS:
        raise ConfigError(f"status={value!r} is none that a rollout has; use one of {', '.join(ROLLOUT_TRANSITIONS)}")
    return value


def check_attempt_status(value: Any) -> str:
    if value not in ATTEMPT_TRANSITIONS:
        raise ConfigError(f"status={value!r} is none that an attempt has; use one of {', '.join(ATTEMPT_TRANSITIONS)}")
    return value


def check_cursor(after: Any, limit: Any, offset: Any) -> tuple[int, int]:
    """(limit, offset) as a database takes them, of a page that begins after the id `after`."""
    if after is not None:
        check_text(after, "after")
    return check_page(limit, offset)


# -- rollouts and attempts -------------------------------------------------------------------------------------------

DEFAULT_CONFIG = RolloutConfig()


def config_text(config: RolloutConfig) -> str | None:
    """The configuration as JSON; None for the default one."""
    return None if config is DEFAULT_CONFIG else _config_text(cast("Hashable", config))


@lru_cache(maxsize=256)
def _config_text(config: Hashable) -> str | None:
    checked = cast("RolloutConfig", config)
    return None if checked == DEFAULT_CONFIG else checked.model_dump_json()


@lru_cache(maxsize=256)
def load_config(text: str | None) -> RolloutConfig:
    return DEFAULT_CONFIG if text is None else RolloutConfig.model_validate_json(text)


def new_rollout(request: EnqueueRolloutRequest, time: float) -> tuple[Rollout, Row]:
    """A rollout that waits, and its columns after `key`. Raises ConfigError for what cannot be kept."""
    if request.rollout_id is not None:
        check_new_id(request.rollout_id, "rollout_id")
    if request.resources_id is not None:
        check_text(request.resources_id, "resources_id")
    queue = request.queue
    if queue is None:
        queue = request.mode or "default"
    if request.queue is not None or request.mode not in (None, "train", "val", "test"):
        check_new_id(queue, "queue")
    if type(request.priority) is not int or not -(2**31) <= request.priority < 2**31:
        raise ConfigError(f"priority={request.priority!r} is no integer of 32 bits")
    metadata = dump_dict(request.metadata, "metadata") if request.metadata else "{}"
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
        dump(request.input, "input"),
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


def dump_dict(value: Any, what: str) -> str:
    if not isinstance(value, dict):
        raise ConfigError(f"{what}={value!r} is no dict")
    return dump(value, what)


def to_rollout(row: Row) -> Rollout:
    """From the columns of `statements.ROLLOUT`."""
    _, rollout_id, input, mode, resources_id, status, start_time, end_time, config, metadata, _, queue, priority = row
    try:
        return Rollout(
            rollout_id,
            orjson.loads(input),
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


def to_attempted(row: Row, attempt: Attempt) -> AttemptedRollout:
    """From the columns of `statements.ROLLOUT`."""
    _, rollout_id, input, mode, resources_id, status, start_time, end_time, config, metadata, _, queue, priority = row
    try:
        return AttemptedRollout(
            rollout_id,
            orjson.loads(input),
            start_time,
            status,
            mode,
            resources_id,
            end_time,
            DEFAULT_CONFIG if config is None else load_config(config),
            load_dict(metadata),
            queue,
            priority,
            attempt=attempt,
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
        notes = load_dict(metadata)
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
        notes,
    )


def to_attempt(rollout_id: str, row: Row) -> Attempt:
    """From a row that begins with the columns of `statements.ATTEMPT`."""
    _, _, sequence_id, attempt_id, status, start_time, end_time, worker_id, heartbeat, metadata = row[:10]
    return make_attempt(
        rollout_id, attempt_id, sequence_id, status, start_time, end_time, worker_id, heartbeat, metadata
    )


# -- resources -------------------------------------------------------------------------------------------------------


def dump_resources(resources: NamedResources) -> str:
    """The resources as JSON, checked against what a store can read back."""
    try:
        checked = named_resources.validate_python(resources)
    except ValidationError as error:
        raise ConfigError(f"these resources are no dict of LLM and PromptTemplate by name: {error}") from error
    try:
        text = dump(named_resources.dump_python(checked, mode="json"), "resources")
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
