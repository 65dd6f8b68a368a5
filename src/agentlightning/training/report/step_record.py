"""The numbers of a finished step that the run itself uses: for its warnings, its progress bar and its result.

A line of `metrics.jsonl` holds these and all other metrics of the algorithm. This is the only place that knows the
names of metrics; `StepRecord.read` makes a typed record of a line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. Fields have the names of the metrics; None or 0: not reported.

    >>> StepRecord.read({"step": 3, "reward": 0.5, "anything": 1}).reward
    0.5
    """

    step: int = 0
    revision: int = 0
    """The number of changes of what rewards mean, before this step."""
    reward: float | None = None
    """Mean reward of the batch."""
    loss: float | None = None
    entropy: float | None = None
    """Mean entropy of the trained tokens, in nats."""
    lr: float | None = None
    groups: int = 0
    groups_trained: int = 0
    groups_without_spread: int = 0
    """Groups whose rollouts all had the same reward."""
    rollouts_trained: int = 0
    failed: int = 0
    timeouts: int = 0
    skipped_steps: int = 0
    """Updates skipped because the loss or its gradient was not finite."""
    tokens_per_second: float = 0.0

    @classmethod
    def read(cls, line: Mapping[str, Any]) -> StepRecord:
        """The record of a line of metrics. Unknown metrics are ignored."""
        known = {field.name: line[field.name] for field in fields(cls) if line.get(field.name) is not None}
        counts = {name: int(value) for name, value in known.items() if name in _COUNTS}
        return cls(**known | counts)

    @property
    def skipped_groups(self) -> int:
        """Groups that taught nothing."""
        return self.groups - self.groups_trained

    def progress(self) -> dict[str, float]:
        """What the progress bar shows."""
        if self.reward is not None:
            return {"reward": self.reward, "tokens_per_second": self.tokens_per_second}
        return {} if self.loss is None else {"loss": self.loss}


_COUNTS = frozenset(field.name for field in fields(StepRecord) if field.type == "int")
