"""Which tasks have which value of a field, so that an evaluation can be read slice by slice. Pure."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

from agentlightning.errors import ConfigError

NO_VALUE = "(none)"
"""Of tasks without the field."""


def slice_members(tasks: Sequence[Any], fields: Sequence[str]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Field -> value -> positions of the tasks that have it. Raises ConfigError for a field that no task has."""
    return {field: _members(tasks, field) for field in fields}


def _members(tasks: Sequence[Any], field: str) -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = defaultdict(list)
    names: set[str] = set()
    for position, task in enumerate(tasks):
        record = cast("dict[str, Any]", task) if isinstance(task, dict) else {}
        names |= record.keys()
        found[_text(record[field]) if field in record else NO_VALUE].append(position)
    if field not in names:
        known = f"their fields are {', '.join(sorted(names))}" if names else "they are no objects with fields"
        raise ConfigError(f"no task has a field {field!r} to slice by; {known}")
    return {value: tuple(positions) for value, positions in sorted(found.items())}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
