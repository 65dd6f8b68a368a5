"""JSON encoding and decoding of what travels between the store's server and its clients.

Bodies are decoded with msgspec, which checks the types while it parses: a body of the wrong shape is rejected whole.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, cast

import msgspec
import orjson
from msgspec import Raw, structs
from pydantic import BaseModel, TypeAdapter, ValidationError

from agentlightning.errors import ConfigError
from agentlightning.resources import named_resources
from agentlightning.rollouts import RolloutConfig
from agentlightning.span import LOGPROBS, Span
from agentlightning.store import validation
from agentlightning.store.http.errors import decode_error
from agentlightning.store.http.shapes import Resources
from agentlightning.store.sql import mapping

BASE_PATH: Final = "/v1/agl"
PROTOCOL_VERSION: Final = 1
"""Version of `POST /v1/agl/calls`; server and client must have the same."""
MAX_BODY_BYTES: Final = 64 * 1024 * 1024


def version() -> str:
    """The version of the installed package."""
    return importlib.metadata.version("agentlightning")


# -- decoding and encoding -------------------------------------------------------------------------------------------


def _encode_unknown(value: Any) -> Any:
    if isinstance(value, RolloutConfig):
        return _encode_config(cast("Hashable", value))
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise NotImplementedError(f"{type(value).__name__} has no JSON form")


@lru_cache(maxsize=256)
def _encode_config(config: Hashable) -> Raw:
    return Raw(cast("RolloutConfig", config).model_dump_json().encode())


def decode_unknown(kind: type, value: Any) -> Any:
    """msgspec's hook for types that it cannot decode itself."""
    if kind is RolloutConfig:
        return _decode_config(orjson.dumps(value))
    if kind is Resources:
        try:
            return Resources(named_resources.validate_python(value, strict=True))
        except ValidationError as error:
            raise ConfigError(f"resources must be a dict of LLM and PromptTemplate by name: {error}") from None
    raise NotImplementedError(f"{kind} cannot be read")


@lru_cache(maxsize=256)
def _decode_config(text: bytes) -> RolloutConfig:
    try:
        return RolloutConfig.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise ConfigError(f"this is not the configuration of a rollout: {error}") from None


_encoder = msgspec.json.Encoder(enc_hook=_encode_unknown)
encode: Final = _encoder.encode


def decoder(kind: Any) -> Callable[[bytes | Raw], Any]:
    """A function that decodes JSON of this type. It raises RequestError, which says what is wrong and where."""
    read = msgspec.json.Decoder(kind, dec_hook=decode_unknown).decode

    def decode(data: bytes | Raw) -> Any:
        try:
            return read(data)
        except (msgspec.MsgspecError, UnicodeError, RecursionError, ConfigError) as error:
            raise decode_error(error, bytes(data)) from None

    return decode


def result_decoder(kind: Any) -> Callable[[bytes | Raw], Any]:
    """A function that decodes a result of the contract."""
    if "ResourcesUpdate" in repr(kind):  # msgspec cannot decode a union of pydantic models
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
        return lambda data: adapter.validate_json(bytes(data))
    return msgspec.json.Decoder(kind, dec_hook=decode_unknown).decode


# -- arguments of a client -------------------------------------------------------------------------------------------

_ANY_JSON: Final = frozenset({"input", "metadata", "stats", "attributes", "resource", "last_error"})
"""Fields and arguments that hold arbitrary JSON."""


def to_wire(value: Any, name: str) -> Any:
    """Convert an argument to a value that `encode` takes. Raises ConfigError, naming it, if JSON cannot hold it."""
    if name in _ANY_JSON:
        return None if value is None else Raw(validation.to_json(value, name).encode())
    if isinstance(value, Span):
        return span_fields(value, value.span_id)
    if isinstance(value, str | int | BaseModel) or value is None:
        return value
    if isinstance(value, float):
        return _finite(value, name)
    if isinstance(value, Mapping):
        return Raw(mapping.dump_resources(cast("Any", value)).encode())
    if isinstance(value, Sequence):
        return [to_wire(item, name) for item in cast("Sequence[Any]", value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    raise ConfigError(f"{name} is of type {type(value).__name__}, which the store does not accept")


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: to_wire(getattr(value, field.name), field.name) for field in dataclasses.fields(value)}


def _finite(value: float, name: str) -> float:
    if not math.isfinite(value):
        raise ConfigError(f"{name} is {value}, which JSON cannot hold; use a finite number")
    return value


def span_fields(span: Span, span_id: str) -> dict[str, Any]:
    """The fields of a span with this id, without those that have their default: they are half of a small span."""
    fields: dict[str, Any] = {
        "rollout_id": span.rollout_id,
        "attempt_id": span.attempt_id,
        "name": span.name,
        "start_time": _finite(span.start_time, "start_time"),
        "span_id": span_id,
        "status_code": span.status_code,
    }
    if span.end_time is not None:
        fields["end_time"] = _finite(span.end_time, "end_time")
    if span.sequence_id:
        fields["sequence_id"] = span.sequence_id
    if span.trace_id:
        fields["trace_id"] = span.trace_id
    if span.parent_id is not None:
        fields["parent_id"] = span.parent_id
    if span.status_message is not None:
        fields["status_message"] = span.status_message
    if span.attributes:
        _check_logprobs(span.attributes.get(LOGPROBS))
        fields["attributes"] = Raw(validation.to_json(span.attributes, "span attributes").encode())
    if span.events:
        fields["events"] = [_fields(event) for event in span.events]
    if span.resource:
        fields["resource"] = Raw(validation.to_json(span.resource, "span resource").encode())
    return fields


def stored_span(sent: Span, span_id: str, result: int | Span) -> Span:
    """The span as stored. The server returns only its sequence_id if it stored the span as sent."""
    if isinstance(result, Span):
        return result
    return structs.replace(sent, sequence_id=result, span_id=span_id)


def _check_logprobs(logprobs: Any) -> None:
    if isinstance(logprobs, list | tuple):
        for index, number in enumerate(cast("Sequence[Any]", logprobs)):
            if isinstance(number, float) and not math.isfinite(number):
                raise ConfigError(f"{LOGPROBS}[{index}] is {number}; a log-probability is a finite number")
