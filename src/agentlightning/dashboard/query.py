"""The query of a request, with its types. Errors name the parameter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import TypeVar

from agentlightning.errors import ConfigError

D = TypeVar("D", int, None)
N = TypeVar("N", int, float)


class Query(dict[str, str]):
    """The parameters of a view: those of its path and of its query string. An empty one is none."""

    def text(self, name: str) -> str | None:
        return self.get(name) or None

    def number(self, name: str) -> float | None:
        """Raises ConfigError for what is no finite number."""
        return self._read(name, float, "a number", -sys.float_info.max, sys.float_info.max)

    def integer(self, name: str, default: D, least: int = 0, most: int = 2**53) -> int | D:
        """Raises ConfigError for what is no whole number within the bounds."""
        found = self._read(name, int, f"a whole number from {least} to {most}", least, most)
        return default if found is None else found

    def _read(self, name: str, convert: Callable[[str], N], kind: str, least: N, most: N) -> N | None:
        if (text := self.text(name)) is None:
            return None
        with suppress(ValueError):
            if least <= (number := convert(text)) <= most:
                return number
        raise ConfigError(f"{name}={text!r} is not {kind}")

    def names(self, name: str, choices: Sequence[str] | None = None, commas: int = -1) -> list[str]:
        """Several values, separated by commas (at most so many). Raises ConfigError for one that is none of the
        choices."""
        found = [each for each in (self.text(name) or "").split(",", commas) if each]
        if choices is not None and (unknown := [each for each in found if each not in choices]):
            raise ConfigError(f"{name}={unknown[0]!r} is none of: {', '.join(choices)}")
        return found

    def choice(self, name: str, choices: Sequence[str], default: str | None = None) -> str | None:
        """One value. Raises as `names`."""
        return next(iter(self.names(name, choices, 0)), default)


def mark_of(*shown: object) -> str:
    """A short text that differs where any of these does, by which a page that asks again learns of changes."""
    return blake2b(repr(shown).encode(), digest_size=8).hexdigest()
