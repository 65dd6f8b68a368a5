"""A span that no store would take, made into one that every store takes.

Called by whoever writes what agents emit, once the store has refused a span: a text cut in the middle of an emoji or a
score that is NaN must cost neither the span nor what was emitted beside it. Pure. What JSON cannot hold becomes text,
as in OTLP; half a surrogate pair, and a NUL in a name, becomes U+FFFD.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from agentlightning.span import Span

_INT64: Final = 2**63
_DEEPEST: Final = 64
"""Levels of lists and objects inside one another; what is deeper becomes text."""


def storable(span: Span) -> Span:
    """The same span where nothing is wrong with it."""
    return replace(
        span,
        name=_name(span.name),
        status_message=None if span.status_message is None else readable(span.status_message),
        attributes=_object(span.attributes, 0),
        resource=_object(span.resource, 0),
        events=tuple(
            replace(event, name=readable(event.name), attributes=_object(event.attributes, 0)) for event in span.events
        ),
    )


def readable(text: str) -> str:
    """A text that UTF-8 can carry."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def number(value: float) -> float | str:
    """A number that JSON can hold, or its name."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _name(text: str) -> str:
    return readable(text).replace("\0", "\N{REPLACEMENT CHARACTER}")


def _object(values: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    return {readable(str(name)): _value(value, depth + 1) for name, value in values.items()}


def _value(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, int):
        return value if -_INT64 <= value < _INT64 else str(value)
    if isinstance(value, float):
        return number(value)
    if depth < _DEEPEST and isinstance(value, Mapping):
        return _object(cast("Mapping[Any, Any]", value), depth)
    if depth < _DEEPEST and isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_value(item, depth + 1) for item in cast("Sequence[Any]", value)]
    return readable(str(value))
