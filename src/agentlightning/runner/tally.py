"""What a runner has done so far, in attempts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunnerStatistics:
    """Counts since the runner was made.

    >>> agl.RunnerStatistics(claimed=2, succeeded=1).succeeded
    1
    """

    claimed: int = 0
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    timeout: int = 0
    discarded: int = 0
    """Stopped, or ended without a report, because the store had moved on."""
    requeued: int = 0
    """Given back when the runner stopped."""
    crashes: int = 0
    """Agent processes that died."""
