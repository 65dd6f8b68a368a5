"""The query of a request, with its types. Errors name the parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypeVar

from agentlightning.errors import ConfigError

D = TypeVar("D", int, None)


@dataclass(frozen=True, slots=True)
class Query:
    """The parameters of a view: those of its path and of its query string. An empty one is none."""

    path: Mapping[str, str] = field(default_factory=dict[str, str])
    values: Mapping[str, str] = field(default_factory=dict[str, str])

    def part(self, name: str) -> str:
        """A part of the path."""
        return self.path[name]

    def text(self, name: str) -> str | None:
        return self.values.get(name) or None

    def number(self, name: str) -> float | None:
        """Raises ConfigError for what is no finite number."""
        text = self.text(name)
        if text is None:
            return None
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(f"{name}={text!r} is not a number")
        return number

    def integer(self, name: str, default: D, least: int = 0, most: int = 2**53) -> int | D:
        """Raises ConfigError for what is no whole number within the bounds."""
        text = self.text(name)
        if text is None:
            return default
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise ConfigError(f"{name}={text!r} is not a whole number from {least} to {most}")
        return number

    def choice(self, name: str, choices: Sequence[str], default: str | None = None) -> str | None:
        """Raises ConfigError for anything else."""
        text = self.text(name)
        if text is not None and text not in choices:
            raise ConfigError(f"{name}={text!r} is none of: {', '.join(choices)}")
        return default if text is None else text

    def names(self, name: str) -> list[str]:
        """Several values, separated by commas."""
        return [each for each in (self.text(name) or "").split(",") if each]


def mark_of(*shown: object) -> str:
    """A short text that differs where any of these does, by which a page that asks again learns of changes."""
    return blake2b(repr(shown).encode(), digest_size=8).hexdigest()
