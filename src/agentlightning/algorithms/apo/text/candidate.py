"""A candidate: one text for each resource that is optimised, and how it differs from another."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import orjson


@dataclass(frozen=True)
class Candidate:
    """Texts by the name of their resource.

    >>> Candidate({"prompt": "Say {word}."}).changed(prompt="Please say {word}.").texts["prompt"]
    'Please say {word}.'
    """

    texts: Mapping[str, str]

    @property
    def digest(self) -> str:
        """The same for the same texts, in every process."""
        return hashlib.blake2b(orjson.dumps(dict(self.texts), option=orjson.OPT_SORT_KEYS), digest_size=8).hexdigest()

    def changed(self, **texts: str) -> Candidate:
        """The candidate with other texts for some resources."""
        return Candidate({**self.texts, **texts})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Candidate) and dict(self.texts) == dict(other.texts)

    def __hash__(self) -> int:
        return hash(self.digest)


def diff(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """What changed, as a unified diff with a part for each resource; empty where nothing did."""
    parts: list[str] = []
    for name in after:
        old, new = before.get(name, "").splitlines(), after[name].splitlines()
        parts += difflib.unified_diff(old, new, f"{name} before", f"{name} after", lineterm="")
    return "\n".join(parts)
