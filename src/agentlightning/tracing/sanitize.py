"""Replaces values in spans that no store can hold.

Used after a store has rejected a span: a text cut in the middle of an emoji or a NaN score must not lose the span.
Values that JSON cannot represent become text, as in OTLP; unpaired surrogates, and NUL in names, become U+FFFD. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from agentlightning.span import Span

_INT64: Final = 2**63
_DEEPEST: Final = 64
"""Maximum nesting of lists and objects; deeper values become text."""


def sanitize_span(span: Span) -> Span:
    """A span that every store accepts; equal to the given one if that is valid."""
    return replace(
        span,
        name=_name(span.name),
        status_message=None if span.status_message is None else valid_text(span.status_message),
        attributes=_object(span.attributes, 0),
        resource=_object(span.resource, 0),
        events=tuple(
            replace(event, name=valid_text(event.name), attributes=_object(event.attributes, 0))
            for event in span.events
        ),
    )


def sanitize_value(value: Any) -> Any:
    """A JSON value that every store accepts; equal to the given one if that is valid."""
    return _value(value, 0)


def valid_text(text: str) -> str:
    """The text with unpaired surrogates replaced, so that it can be encoded as UTF-8."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def number(value: float) -> float | str:
    """The number if JSON can represent it, else its name: "NaN", "Infinity" or "-Infinity"."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _name(text: str) -> str:
    return valid_text(text).replace("\0", "\N{REPLACEMENT CHARACTER}")


def _object(values: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    return {valid_text(str(name)): _value(value, depth + 1) for name, value in values.items()}


def _value(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, int):
        return value if -_INT64 <= value < _INT64 else str(value)
    if isinstance(value, float):
        return number(value)
    if depth < _DEEPEST and isinstance(value, Mapping):
        return _object(cast("Mapping[Any, Any]", value), depth)
    if depth < _DEEPEST and isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_value(item, depth + 1) for item in cast("Sequence[Any]", value)]
    return valid_text(str(value))
