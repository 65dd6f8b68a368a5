"""Each rollout that is left out has a reason to be counted under, and a message."""

from __future__ import annotations

from agentlightning.credit.rejection import Rejection, count_reasons, describe_reasons, rejection
from agentlightning.errors import RewardError


def test_an_error_becomes_the_reason_and_the_message_of_a_rejection() -> None:
    assert rejection("ro-1", RewardError("it is hot")) == Rejection("ro-1", "bad_reward", "it is hot")
    assert rejection("ro-2", KeyError("tokens")) == Rejection(
        "ro-2", "malformed_spans", "the spans of rollout ro-2 cannot be read: KeyError: 'tokens'"
    )


def test_reasons_are_counted_and_the_most_frequent_comes_first() -> None:
    found = [Rejection(str(n), reason, "") for n, reason in enumerate(["bad_reward", "missing_reward"] + ["stale"] * 3)]
    counts = count_reasons([*found, Rejection("last", "missing_reward", "")])
    assert list(counts.items()) == [("stale", 3), ("missing_reward", 2), ("bad_reward", 1)]
    assert describe_reasons(counts) == "3 stale, 2 missing reward, 1 bad reward"
