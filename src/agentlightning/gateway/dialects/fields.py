"""Reading the fields of a request: each reader gives a value of the right kind, or an ApiError 400 naming the field.

The sampling parameters of requests and of LLM resources are here as well: their names, ranges and precedence.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from typing import Any, Final

import orjson

from agentlightning.engine.base import RANGES, Engine, SamplingParams, out_of_range
from agentlightning.gateway.errors import ApiError, bad_request
from agentlightning.gateway.http import parse
from agentlightning.util.json_values import dumps

MAX_TOP_LOGPROBS: Final = 20


def read_json(body: bytes | dict[str, Any]) -> dict[str, Any]:
    """The body as a JSON object, parsed unless it is one already. Raises ApiError 400 if it is none."""
    try:
        data = body if isinstance(body, dict) else parse(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, f"the body is a JSON {type(data).__name__}, not an object", code="invalid_json")
    return data


def reject_unsupported(data: Mapping[str, Any], fields: Mapping[str, tuple[Any, ...]]) -> None:
    """Reject fields that would change the answer and are not supported. `fields` maps each to the values that change
    nothing; null is always one of them."""
    for name, neutral in fields.items():
        if name in data and data[name] is not None and data[name] not in neutral:
            raise bad_request(name, f"{name}={shorten(data[name])} cannot be honoured here; leave it out")


def unknown_fields(data: Mapping[str, Any], *known: Container[str]) -> tuple[str, ...]:
    """Names of the fields that no reader knows."""
    return tuple(name for name in data if not any(name in names for names in known))


def optional(data: Mapping[str, Any], name: str, kind: type) -> Any:
    """The value of a field; None if it is absent or null."""
    return None if data.get(name) is None else require_type(name, data[name], kind)


def require_type(where: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise bad_request(field_of(where), f"{where}={shorten(value)} must be a {kind.__name__}")
    return value


def kind_of(value: Any) -> str | None:
    """The `type` of an object."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else None


def integer(data: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = data.get(name)
    if value is not None and (type(value) is not int or not low <= value <= high):
        raise bad_request(name, f"{name}={shorten(value)} must be a whole number from {low} to {high}")
    return value


def top_logprobs(data: Mapping[str, Any], name: str = "top_logprobs") -> int:
    """How many of the likeliest tokens are reported at each position."""
    return integer(data, name, 0, MAX_TOP_LOGPROBS) or 0


def field_of(where: str) -> str:
    """The top-level field of a path such as `messages[0].content`."""
    return where.partition("[")[0].partition(".")[0]


def shorten(value: Any) -> str:
    """A value as JSON, short enough for an error message."""
    text = dumps(value).decode()
    return text if len(text) <= 80 else text[:77] + "..."


# -- sampling parameters ----------------------------------------------------------------------------------------------

Readers = Mapping[str, tuple[str, Callable[[Any], Any]]]
"""Name in a request -> (field of `SamplingParams`, parser that raises ValueError)."""


def sampling_params(data: Mapping[str, Any], readers: Readers, base: SamplingParams, source: str) -> SamplingParams:
    """`base` with the values that `data` sets. Raises ApiError 400 naming an invalid value; `source` says where it was
    set."""
    values: dict[str, Any] = {}
    for name, (field, read) in readers.items():
        if data.get(name) is None:
            continue
        try:
            values[field] = read(data[name])
        except (TypeError, ValueError) as error:
            raise bad_request(name, f"{source} sets {name}={shorten(data[name])}; {error}") from None
    return replace(base, **values)


def apply_resource_params(params: SamplingParams, resource: str, forced: Mapping[str, Any]) -> SamplingParams:
    """Apply the sampling parameters of the trainer's LLM resource, which take precedence over the request's.

    Raises ApiError 400 for a name that is not supported."""
    unknown = sorted(set(forced) - set(OPENAI_PARAMS))
    if unknown:
        known = ", ".join(sorted(OPENAI_PARAMS))
        message = f"the LLM resource {resource!r} sets {', '.join(unknown)}, which cannot be honoured; known: {known}"
        raise bad_request("sampling_parameters", message)
    return sampling_params(forced, OPENAI_PARAMS, params, f"the LLM resource {resource!r}")


def refuse_unsupported(engine: Engine, params: SamplingParams) -> None:
    """Raises ApiError 400, naming the field, for parameters that the engine would ignore."""
    for name in params.unsupported(engine.supported_params):
        raise bad_request(name, f"{name} cannot be honoured by what serves {engine.model}; leave it out")


def _within(name: str) -> tuple[str, Callable[[Any], float]]:
    def read(value: Any) -> float:
        if remedy := out_of_range(name, value):
            raise ValueError(remedy)
        return value if isinstance(RANGES[name][0], int) else float(value)

    return name, read


def _top_k(value: Any) -> float:
    return 0 if value == -1 else _within("top_k")[1](value)


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("use a string or a list of strings, none of them empty")
    return tuple(stops)


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict) or not all(str(token).isascii() and str(token).isdigit() for token in value):
        raise ValueError("use an object from token ids to numbers")
    read = _within("logit_bias")[1]
    return tuple((int(token), read(bias)) for token, bias in value.items())


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < 2**31 for token in value):
        raise ValueError("use a list of token ids")
    return tuple(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("use true or false")
    return value


SHARED_PARAMS: Final[Readers] = {
    **{name: _within(name) for name in ("temperature", "top_p", "max_tokens")},
    "top_k": ("top_k", _top_k),
}
OPENAI_PARAMS: Final[Readers] = {
    **SHARED_PARAMS,
    **{name: _within(name) for name in RANGES if name not in (*SHARED_PARAMS, "logit_bias")},
    "max_completion_tokens": _within("max_tokens"),
    "stop": ("stop", _stop),
    "logit_bias": ("logit_bias", _bias),
    "stop_token_ids": ("stop_token_ids", _token_ids),
    "ignore_eos": ("ignore_eos", _flag),
}
MESSAGES_PARAMS: Final[Readers] = {**SHARED_PARAMS, "stop_sequences": ("stop", _stop)}
RESPONSES_PARAMS: Final[Readers] = {**OPENAI_PARAMS, "max_output_tokens": _within("max_tokens")}

OPENAI_UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {
    "length_penalty": (1,),
    "typical_p": (1,),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
"""Sampling fields of OpenAI's and compatible servers that are not supported, for `reject_unsupported`."""
