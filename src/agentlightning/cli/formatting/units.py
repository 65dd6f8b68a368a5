"""Parses and formats durations and sizes: `30d`, `1.5h`, `10GB`, `512 MiB`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from agentlightning.errors import ConfigError

if TYPE_CHECKING:
    from agentlightning.store.types import Retention

_quantity = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", re.ASCII)

SECONDS: Final = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
BYTES: Final = {
    "": 1.0,
    "b": 1.0,
    **{f"{letter}b": 1000.0**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024.0**power for power, letter in enumerate("kmgt", start=1)},
}


def read_duration(text: str) -> float:
    """The seconds in `90s`, `15m`, `12h`, `30d` or `2w`. Raises ConfigError for other text."""
    return _read(text, SECONDS, "a duration such as 90s, 15m, 12h, 30d or 2w")


def read_size(text: str) -> int:
    """The bytes in `500MB` (powers of 1000), `512MiB` (powers of 1024) or a plain number. Raises ConfigError for other
    text."""
    return round(_read(text, BYTES, "a size such as 500MB, 10GB or 512MiB"))


def _read(text: str, units: Mapping[str, float], what: str) -> float:
    match = _quantity.fullmatch(text)
    factor = None if match is None else units.get(match[2].lower())
    if match is None or factor is None:
        raise ConfigError(f"{text!r} is not {what}")
    value = float(match[1]) * factor
    if not math.isfinite(value) or value >= 2**63:
        raise ConfigError(f"{text!r} is too large for {what}")
    return value


def show_size(size: int) -> str:
    """Such as `512 bytes`, `1.5 KB` or `10 GB`: powers of 1000, two or three digits."""
    value, unit = float(size), "bytes"
    for larger in ("KB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if value >= 99.5 or unit == "bytes" else f"{value:.2g} {unit}"


def retention_from(older_than: str | None, keep: int | None, max_size: str | None) -> Retention:
    """The retention policy for an age, a number of rollouts and a size. Raises ConfigError for invalid values, and if
    none is given, as that would keep everything."""
    from agentlightning.store.types import Retention

    if older_than is None and keep is None and max_size is None:
        raise ConfigError("say what to remove: --older-than 30d, --keep 100000 or --max-size 10GB")
    if keep is not None and keep < 0:
        raise ConfigError(f"--keep {keep}: a number of rollouts is at least 0")
    return Retention(
        max_age_seconds=None if older_than is None else read_duration(older_than),
        max_rollouts=keep,
        max_bytes=None if max_size is None else read_size(max_size),
    )
