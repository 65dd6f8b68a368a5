"""What a gateway counts, for its metrics and its owner."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

MAX_UNKNOWN_NAMES: Final = 200


@dataclass(slots=True)
class Counters:
    """What the gateway has done since it was made."""

    requests: int = 0
    errors: int = 0
    """Requests answered with an error."""
    cancelled: int = 0
    """Requests whose caller hung up."""
    unattributed: int = 0
    """Requests served for no attempt, and recorded nowhere."""
    continued: int = 0
    """Requests that got the exact tokens of an earlier one."""
    drift: int = 0
    """Requests that looked like a continuation which could not be proven."""
    overridden: int = 0
    """Calls of training rollouts whose sampling parameters were not followed (`callers.on_policy`)."""
    violated: int = 0
    """Answers that have not the shape their request asked for."""
    prompt_tokens: int = 0
    response_tokens: int = 0
    unknown_fields: int = 0
    """Request fields that were ignored."""
    unknown_names: Counter[str] = field(default_factory=Counter[str])
    """The first names of them, and how often each came."""

    def count_unknown(self, unknown: tuple[str, ...]) -> None:
        self.unknown_fields += len(unknown)
        for name in unknown:
            if name in self.unknown_names or len(self.unknown_names) < MAX_UNKNOWN_NAMES:
                self.unknown_names[name] += 1
