"""Validation of the arguments of a store, and JSON that can be read back as it was written.

Every check raises ConfigError, which names the argument and the way out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final, cast

import orjson
from msgspec import Struct

from agentlightning.errors import ConfigError
from agentlightning.util.json_values import dumps

MAX_TEXT: Final = 512
NO_LIMIT: Final = 2**62
_url_part = re.compile(r"[A-Za-z0-9_:-]{1,128}")

# -- JSON ------------------------------------------------------------------------------------------------------------


def to_json(value: Any, what: str, of: str = "", default: Callable[[Any], Any] | None = None) -> str:
    """`value` as JSON; `what` names it in the error, and `of` what it belongs to. Refuses NaN and infinity, which
    orjson writes as null. default: what to write for values, dataclasses among them, that JSON lacks."""
    try:
        text = dumps(value, default, default and orjson.OPT_PASSTHROUGH_DATACLASS).decode()
    except TypeError as error:
        raise ConfigError(
            f"{what}{of} cannot be stored as JSON: {error}; use str, int, float, bool, None, list, dict"
        ) from error
    if text.rfind("null") >= 0 and (found := find_not_finite(value)) is not None:
        raise ConfigError(
            f"{what}{found[0]}{of} is {found[1]}, which JSON cannot hold; leave it out or send it as text"
        )
    return text


def dict_to_json(value: Any, what: str) -> str:
    if not isinstance(value, dict):
        raise ConfigError(f"{what}={value!r} is not a dict")
    return to_json(value, what)


def find_not_finite(value: Any) -> tuple[str, float] | None:
    """(path within `value`, number) of the first NaN or infinity."""
    if isinstance(value, float):
        return None if math.isfinite(value) else ("", value)
    items: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        items = ((f"[{key!r}]", each) for key, each in cast("dict[Any, Any]", value).items())
    elif isinstance(value, list | tuple):
        items = ((f"[{index}]", each) for index, each in enumerate(cast("Sequence[Any]", value)))
    elif is_dataclass(value):
        form = ".{}" if isinstance(value, Struct) else "[{!r}]"
        items = ((form.format(each.name), getattr(value, each.name)) for each in fields(value))
    for place, item in items:
        found = find_not_finite(item)
        if found is not None:
            return place + found[0], found[1]
    return None


# -- arguments -------------------------------------------------------------------------------------------------------


def check_text(value: Any, what: str, of: str = "", limit: int = MAX_TEXT) -> str:
    """Refuse what is not text that every database can store. `of` says what it belongs to."""
    if type(value) is str and value.isascii() and len(value) <= MAX_TEXT and "\0" not in value:
        return value
    if not isinstance(value, str):
        raise ConfigError(f"{what}={value!r}{of} is not a string")
    if len(value) > limit:
        raise ConfigError(f"{what}={value[:40]!r}...{of} has {len(value)} characters; the store takes {limit}")
    if "\0" in value:
        raise ConfigError(f"{what}={value!r}{of} contains a NUL character; leave it out")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what}={value!r}{of} is not Unicode text: {error.reason}") from error
    return value


def check_texts(values: Sequence[Any], what: str) -> list[str]:
    if isinstance(values, str):
        raise ConfigError(f"{what}={values!r} is one text; give a list")
    return [check_text(value, what) for value in values]


def check_new_id(value: Any, what: str) -> str:
    """Refuse an id or a name that cannot be part of a URL."""
    if not isinstance(value, str) or not _url_part.fullmatch(value):
        raise ConfigError(f"{what}={value!r} cannot be part of a URL; use up to 128 letters, digits, - _ and :")
    return value


def check_time(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{what}={value!r} is not a time in seconds")
    return value


def check_page(limit: Any, offset: Any = 0, after: Any = None) -> tuple[int, int]:
    """Returns (limit, offset) as a database takes them. after: the id that the page begins after."""
    if after is not None:
        check_text(after, "after")
    for name, value, least in (("limit", limit, -1), ("offset", offset, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            advice = "-1 for no limit, or a number from 0" if name == "limit" else "a number from 0"
            raise ConfigError(f"{name}={value!r} is out of range; use {advice}")
    return (NO_LIMIT if limit == -1 else min(limit, NO_LIMIT)), min(offset, NO_LIMIT)


def check_status(value: Any, known: Collection[str], of: str = "") -> str:
    if value not in known:
        raise ConfigError(f"status={value!r}{of} is unknown; use one of {', '.join(known)}")
    return value
