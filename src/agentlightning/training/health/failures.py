"""Signs in the rollouts that are not learned from: timeouts, failures, rejections by reason."""

from __future__ import annotations

from collections import Counter
from typing import Final

from agentlightning.credit.rejection import describe_reasons
from agentlightning.training.health.sign import WINDOW, Records, Sign

MIN_FAILURES: Final = 4
"""Fewer are no pattern."""
TIMEOUT_SHARE: Final = 0.1
"""The share of rollouts that timed out from which on there is a sign."""
LEFT_OUT_SHARE: Final = 0.2
"""The share of rollouts that failed or were rejected from which on there is a sign: above it, those that are left may
be the easy ones."""


def timed_out(records: Records) -> Sign | None:
    """Counts those that failed for it: with a `timeout_reward` they are learned from."""
    window = records[-WINDOW:]
    timeouts = sum(min(record.timeouts, record.failed) for record in window)
    rollouts = sum(record.rollouts_trained + record.failed for record in window)
    if timeouts < MIN_FAILURES or timeouts < TIMEOUT_SHARE * rollouts:
        return None
    return Sign(
        "timeouts_left_out",
        f"{timeouts} of the last {rollouts} rollouts timed out and were left out, so that nothing teaches the policy to"
        " be quicker",
        "where its own answers take the time, give such rollouts a reward (algorithm.timeout_reward=0.0); where the"
        " agent's tools do, give them more time (runner.timeout_seconds)",
    )


def left_out(records: Records) -> Sign | None:
    """Many rollouts failed or were rejected, timeouts aside."""
    window = records[-WINDOW:]
    causes = Counter[str]()
    for record in window:
        causes["failed"] += max(0, record.failed - record.timeouts)
        causes.update(record.rejected)
    count = sum(causes.values())
    rollouts = sum(record.rollouts_trained + record.failed + sum(record.rejected.values()) for record in window)
    if count < MIN_FAILURES or count < LEFT_OUT_SHARE * rollouts:
        return None
    named = describe_reasons({name: number for name, number in causes.most_common() if number})
    return Sign(
        "rollouts_left_out",
        f"{count} of the last {rollouts} rollouts were left out: {named}",
        "the first of each kind is named in the output of the run, and `agl doctor` lists errors by kind; mend the"
        " agent and continue with --resume",
    )
