"""Values of agents as short text and as JSON that a browser can read: they may hold anything."""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from agentlightning.util.json_values import as_text, loads

SHORT: Final = 240
"""Characters of a value in a table."""
LONG: Final = 100_000
"""Characters of one value on a page."""
FAILED: Final = re.compile(r"\s*[\[({\"']*\s*(error|exception|traceback|failed)\b", re.IGNORECASE)


def shortened(value: Any) -> str:
    """The value on one line."""
    line = " ".join(as_text(value)[: 4 * SHORT].split())
    return line if len(line) <= SHORT else f"{line[: SHORT - 1]}…"


def limited(text: str, limit: int = LONG) -> str:
    """A text that may be cut, which it then says."""
    return text if len(text) <= limit else f"{text[:limit]}\n[… {len(text) - limit} more characters]"


def json_of(text: Any) -> Any:
    """The value in a JSON text; anything else as it is."""
    if not isinstance(text, str):
        return text
    try:
        return loads(text)
    except orjson.JSONDecodeError:
        return text


def tells_failure(result: Any) -> bool:
    """Whether the result of a tool says that the tool has failed: it begins with "error", "exception", "traceback" or
    "failed", or is an object with a field `error` that is not empty.

    >>> tells_failure("error: division by zero"), tells_failure('{"error": null, "rows": 3}'), tells_failure("42")
    (True, False, False)
    """
    value = json_of(result)
    if isinstance(value, dict) and "error" in value:
        return bool(value["error"])
    return isinstance(value, str) and FAILED.match(value) is not None
