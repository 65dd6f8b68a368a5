"""The counters of a gateway."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

MAX_UNKNOWN_NAMES: Final = 200


@dataclass(slots=True)
class Counters:
    """Counts since the gateway was created."""

    requests: int = 0
    errors: int = 0
    """Requests with an error reply."""
    cancelled: int = 0
    """Requests whose client disconnected."""
    unattributed: int = 0
    """Requests without an attempt, which are not recorded."""
    continued: int = 0
    """Requests whose prompt continues the tokens of an earlier call."""
    drift: int = 0
    """Requests that looked like a continuation but could not be proven to be one."""
    tools_in_messages: int = 0
    """Requests whose tools stand in their messages, as the model's template has no place for them."""
    overridden: int = 0
    """Calls of training rollouts whose sampling parameters were overridden (`callers.on_policy`)."""
    violated: int = 0
    """Answers that violate the schema or tool choice of their request."""
    prompt_tokens: int = 0
    response_tokens: int = 0
    unknown_fields: int = 0
    """Request fields that were ignored."""
    unknown_names: Counter[str] = field(default_factory=Counter[str])
    """Count by name, for the first names."""

    def count_unknown(self, unknown: tuple[str, ...]) -> None:
        self.unknown_fields += len(unknown)
        for name in unknown:
            if name in self.unknown_names or len(self.unknown_names) < MAX_UNKNOWN_NAMES:
                self.unknown_names[name] += 1
