"""Values of span attributes: nested mappings flattened with dots, other values as JSON text. Pure."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, cast

from pydantic import BaseModel

Attribute = str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]
"""An attribute value of OpenTelemetry."""

_short = reprlib.Repr()
_short.maxother = _short.maxstring = 1000


def json_text(value: Any) -> str:
    """The value as JSON text; values without a JSON form become their shortened `repr`. Never fails."""
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False, default=_json_or_repr)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(_short.repr(value))


def _json_or_repr(value: Any) -> Any:
    try:
        return to_jsonable(value)
    except (TypeError, ValueError):
        return _short.repr(value)


def to_jsonable(value: Any) -> Any:
    """`default` of a JSON encoder: pydantic models and dataclasses. Raises TypeError for other values."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__qualname__} has no JSON form")


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Attribute]]:
    """Pairs of dotted names and attribute values."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(cast(Mapping[str, Any], value), f"{prefix}{key}.")
        elif isinstance(value, str | bool | int | float):
            yield f"{prefix}{key}", value
        else:
            yield f"{prefix}{key}", json_text(value)
