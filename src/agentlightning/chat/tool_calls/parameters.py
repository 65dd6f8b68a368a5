"""The parameters of a tool's JSON schema, for formats that write each argument separately instead of one object."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

ANNOTATIONS: Final = frozenset({"title", "description", "default", "examples", "deprecated", "format", "$comment"})
"""Keywords of a schema that constrain no value."""
DEFINITIONS: Final = ("$defs", "definitions")
_PARAMETERS: Final = ("type", "properties", "required", "additionalProperties", "$schema", "strict")
_KNOWN: Final = ANNOTATIONS.union(DEFINITIONS, _PARAMETERS)
_REFERENCE: Final = re.compile(r'"\$(?:ref|dynamicRef|recursiveRef)": "(?!#/(?:\$defs|definitions)/)')


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    schema: dict[str, Any]
    required: bool


def read_parameters(schema: Mapping[str, Any]) -> list[Parameter] | None:
    """The parameters of an object's schema, in order; None if it constrains more than individual properties."""
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not schema.keys() <= _KNOWN or schema.get("type") not in (None, "object"):
        return None
    if not isinstance(properties, dict) or _REFERENCE.search(json.dumps(schema)):
        return None
    parameters: list[Parameter] = []
    definitions = {key: schema[key] for key in DEFINITIONS if key in schema}
    for name, property_schema in cast("dict[str, Any]", properties).items():
        if property_schema is not True and not isinstance(property_schema, dict):
            return None
        own: dict[str, Any] = {} if property_schema is True else property_schema
        parameters.append(Parameter(name, {**definitions, **own}, name in required))
    return parameters if set(required) <= set(properties) else None
