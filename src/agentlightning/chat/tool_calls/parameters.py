"""The parameters of a tool one by one, for formats that write each by itself instead of an object of all."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

SAYS_NOTHING: Final = frozenset({"title", "description", "default", "examples", "deprecated", "format", "$comment"})
"""Keywords of a schema that forbid no value."""
DEFINITIONS: Final = ("$defs", "definitions")
_PARAMETERS: Final = ("type", "properties", "required", "additionalProperties", "$schema", "strict")
_KNOWN: Final = SAYS_NOTHING.union(DEFINITIONS, _PARAMETERS)
_REFERENCE: Final = re.compile(r'"\$(?:ref|dynamicRef|recursiveRef)": "(?!#/(?:\$defs|definitions)/)')


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    schema: dict[str, Any]
    needed: bool


def read_parameters(schema: Mapping[str, Any]) -> list[Parameter] | None:
    """Those of an object's schema, in its order; None where it asks for more than properties one by one."""
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not schema.keys() <= _KNOWN or schema.get("type") not in (None, "object"):
        return None
    if not isinstance(properties, dict) or _REFERENCE.search(json.dumps(schema)):
        return None
    found: list[Parameter] = []
    defined = {key: schema[key] for key in DEFINITIONS if key in schema}
    for name, given in cast("dict[str, Any]", properties).items():
        if given is not True and not isinstance(given, dict):
            return None
        own: dict[str, Any] = {} if given is True else given
        found.append(Parameter(name, {**defined, **own}, name in required))
    return found if set(required) <= set(properties) else None
