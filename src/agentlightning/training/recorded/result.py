"""What training on recorded sessions did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentlightning.evaluation.intervals import Gain


@dataclass(frozen=True, slots=True)
class OfflineResult:
    """What was learned from recorded sessions, what could not be used, and by how much the model is better."""

    algorithm: str
    method: str | None
    """How rollouts of another policy were learned from: importance, awr or rejection; None for other algorithms."""
    steps: int
    sessions: int
    """Sessions that were learned from."""
    left_out: Mapping[str, int]
    """Sessions that were not, by reason."""
    rendered_calls: int
    """Model calls whose text was put into the model's tokens, because theirs were not recorded."""
    foreign_calls: int
    """Among those, calls that were recorded in tokens of another tokenizer."""
    metrics: Mapping[str, float]
    """Of the last step."""
    counts: Mapping[str, float]
    """What steps skipped and trained, summed over all of them: groups_without_spread, tokens_trained ..."""
    held_out: Mapping[str, Gain]
    """By sampling mode, the held-out reward before and after with the 95% interval of the paired gain; empty without an
    agent to measure with."""
    checkpoint: Path
    """A directory that transformers loads."""
    run_dir: Path
    seconds: float
    notes: tuple[str, ...] = field(default=())
    """What was said while it ran."""

    def as_json(self) -> dict[str, Any]:
        """The result as JSON values, as `--json` prints it."""
        return {
            "algorithm": self.algorithm,
            "method": self.method,
            "steps": self.steps,
            "sessions": self.sessions,
            "left_out": dict(self.left_out),
            "rendered_calls": self.rendered_calls,
            "foreign_calls": self.foreign_calls,
            "metrics": {name: value for name, value in self.metrics.items() if value == value},
            "counts": dict(self.counts),
            "held_out": {
                mode: {
                    "before": gain.before,
                    "after": gain.after,
                    "gain": gain.gain,
                    "interval": list(gain.interval),
                    "tasks": gain.tasks,
                }
                for mode, gain in self.held_out.items()
            },
            "checkpoint": str(self.checkpoint),
            "run_dir": str(self.run_dir),
            "seconds": round(self.seconds, 2),
            "notes": list(self.notes),
        }
