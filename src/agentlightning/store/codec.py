"""Rows to dataclasses and back.

JSON is written and read with orjson, and refused at the edge when it cannot be read back as it was: orjson would turn
NaN into null without a word. Token ids and log-probabilities of a span become one binary value: three counts, then
int32, int32 and float32, little endian (a log-probability is rounded to float32). A token attribute that is not a
plain list of numbers in range stays in the JSON.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from struct import Struct
from typing import Any, cast

import orjson
from pydantic import ValidationError

from agentlightning.errors import ConfigError
from agentlightning.resources import NamedResources, ResourcesUpdate, named_resources
from agentlightning.rollouts import Attempt, AttemptStatus, Rollout, RolloutConfig
from agentlightning.span import LOGPROBS, SUPERSEDED, TOKEN_ATTRIBUTES, Span, SpanEvent

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


def from_rollout(rollout: Rollout) -> Row:
    """The columns of a new rollout, for `statements.INSERT_ROLLOUT`."""
    return (
        rollout.rollout_id,
        dump(rollout.input, "input"),
        rollout.mode,
        rollout.resources_id,
        rollout.status,
        rollout.start_time,
        None,
        config_text(rollout.config),
        dump(rollout.metadata, "metadata") if rollout.metadata else "{}",
        0,
    )


def to_rollout(row: Row) -> Rollout:
    """From the columns of `statements.ROLLOUT`."""
    _, rollout_id, input, mode, resources_id, status, start_time, end_time, config, metadata, _ = row
    return Rollout(
        rollout_id=rollout_id,
        input=orjson.loads(input),
        start_time=start_time,
        status=status,
        mode=mode,
        resources_id=resources_id,
        end_time=end_time,
        config=load_config(config),
        metadata=load_dict(metadata),
    )


def to_attempt(rollout_id: str, row: Row) -> Attempt:
    """From a row that begins with the columns of `statements.ATTEMPT`."""
    attempt_id, sequence_id, status, start_time, end_time, worker_id, heartbeat, metadata = row[:8]
    return Attempt(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=sequence_id,
        start_time=start_time,
        status=cast("AttemptStatus", status),
        end_time=end_time,
        worker_id=worker_id,
        last_heartbeat_time=heartbeat,
        metadata=load_dict(metadata),
    )


# -- spans -----------------------------------------------------------------------------------------------------------

_counts = Struct("<3i")
_ABSENT = -1


def pack_tokens(attributes: dict[str, Any]) -> tuple[bytes | None, dict[str, Any]]:
    """(the binary form of the token attributes, the other attributes). None where there are none."""
    if not any(name in attributes for name in TOKEN_ATTRIBUTES):
        return None, attributes
    rest = dict(attributes)
    counts = [_ABSENT, _ABSENT, _ABSENT]
    parts: list[bytes] = []
    for index, name in enumerate(TOKEN_ATTRIBUTES):
        numbers = _numbers(name, rest.get(name))
        if numbers is not None:
            counts[index] = len(numbers)
            parts.append(_little_endian(numbers).tobytes())
            del rest[name]
    return _counts.pack(*counts) + b"".join(parts), rest


def _numbers(name: str, value: Any) -> array[Any] | None:
    if not isinstance(value, list | tuple):
        return None
    try:
        numbers = array("f" if name == LOGPROBS else "i", cast("Sequence[Any]", value))
    except (TypeError, OverflowError):
        return None
    if name == LOGPROBS and not math.isfinite(math.fsum(numbers)):
        bad = next(index for index, number in enumerate(numbers) if not math.isfinite(number))
        raise ConfigError(f"{name}[{bad}] is {value[bad]}; a log-probability is a finite number within float32")
    return numbers


def _little_endian(numbers: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def unpack_tokens(data: bytes) -> dict[str, list[Any]]:
    attributes: dict[str, list[Any]] = {}
    start = _counts.size
    for name, count in zip(TOKEN_ATTRIBUTES, _counts.unpack_from(data), strict=True):
        if count == _ABSENT:
            continue
        numbers: array[Any] = array("f" if name == LOGPROBS else "i")
        numbers.frombytes(data[start : start + 4 * count])
        attributes[name] = _little_endian(numbers).tolist()
        start += 4 * count
    return attributes


def from_span(span: Span) -> Row:
    """The columns of a span that do not depend on the store: from `trace_id` to `tokens`."""
    tokens, attributes = pack_tokens(span.attributes)
    return (
        span.trace_id,
        span.parent_id,
        span.name,
        span.start_time,
        span.end_time,
        span.status_code,
        span.status_message,
        dump(attributes, "span attributes") if attributes else "{}",
        _dump_events(span.events) if span.events else None,
        dump(span.resource, "span resource") if span.resource else None,
        tokens,
    )


def _dump_events(events: Sequence[SpanEvent]) -> str:
    return dump([[event.name, event.timestamp, event.attributes] for event in events], "span events")


def _load_events(text: str | None) -> tuple[SpanEvent, ...]:
    if text is None:
        return ()
    return tuple(SpanEvent(name, timestamp, attributes) for name, timestamp, attributes in orjson.loads(text))


def to_span(row: Row) -> Span:
    """From the columns of `statements.SPAN`."""
    (
        rollout_id,
        attempt_id,
        span_id,
        sequence_id,
        trace_id,
        parent_id,
        name,
        start_time,
        end_time,
        status_code,
        status_message,
        text,
        events,
        resource,
        tokens,
        superseded,
    ) = row
    attributes = load_dict(text)
    if tokens is not None:
        attributes.update(unpack_tokens(tokens))
    if superseded:
        attributes[SUPERSEDED] = True
    return Span(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        name=name,
        start_time=start_time,
        end_time=end_time,
        sequence_id=sequence_id,
        trace_id=trace_id,
        span_id=span_id,
        parent_id=parent_id,
        status_code=status_code,
        status_message=status_message,
        attributes=attributes,
        events=_load_events(events),
        resource={} if resource is None else orjson.loads(resource),
    )


# -- resources -------------------------------------------------------------------------------------------------------


def dump_resources(resources: NamedResources) -> str:
    """The resources as JSON, checked against what a store can read back."""
    try:
        checked = named_resources.validate_python(resources)
    except ValidationError as error:
        raise ConfigError(f"these resources are no dict of LLM and PromptTemplate by name: {error}") from error
    return dump(named_resources.dump_python(checked, mode="json"), "resources")


def to_resources(row: Row) -> ResourcesUpdate:
    """From the columns of `statements.RESOURCES`."""
    resources_id, version, create_time, body = row
    return ResourcesUpdate(
        resources_id=resources_id,
        version=version,
        create_time=create_time,
        resources=named_resources.validate_json(body),
    )
