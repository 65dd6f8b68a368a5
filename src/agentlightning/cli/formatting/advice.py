"""The next step after `agl run` and `agl eval`, in a sentence each: for people, and in the JSON that programs read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from agentlightning.evaluation.evaluation import Evaluation

CALLS: Final = "model calls: "
NOT_REDIRECTED: Final = (
    f"{CALLS}none recorded: give --model or --routes, or the key of a provider (OPENAI_API_KEY, ANTHROPIC_API_KEY)"
)
NO_CALLS: Final = (
    f"{CALLS}none reached the gateway: look for an address in the code or its configuration (base_url=, api_base=, a"
    " .env file that overrides the environment), a cache of answers, or an error before the first call"
)
NO_REWARD: Final = "no reward was recorded: give --reward file.py:function, or a number"
ALL_EQUAL: Final = (
    "all {count} rewards are {reward:g}, and reinforcement learning learns from differences: {way}; --sampled shows"
    " whether rollouts of one task differ"
)
TOO_HARD: Final = "use easier tasks, a reward with partial credit, or `agl sft` on demonstrations first"
TOO_EASY: Final = "use harder tasks"


def run_advice(*, error: str | None, redirected: bool, calls: int, failed_calls: int, rewarded: bool) -> list[str]:
    """What a recorded rollout lacks for training, the first cause first; empty where it lacks nothing."""
    found: list[str] = []
    if not redirected:
        found.append(NOT_REDIRECTED)
    elif not calls:  # before the error, which it often causes
        found.append(NO_CALLS)
    elif failed_calls:
        found.append(f"{failed_calls} of {calls} model calls failed; `agl store show` has their messages")
    if error is not None:
        found.append(f"{error}; run the command by itself to see why")
    if not rewarded and error is None:
        found.append(NO_REWARD)
    return found


def evaluation_advice(result: Evaluation) -> list[str]:
    """What keeps an evaluation from saying more, or from being a start for training."""
    found: list[str] = []
    if result.missing:
        found.append(f"{result.missing} of {len(result.rewards)} tasks have no reward; `reasons` counts why")
    if result.known and len(set(result.known)) == 1 and result.comparison is None:
        reward = result.known[0]
        way = TOO_EASY if reward >= 1 else TOO_HARD
        found.append(ALL_EQUAL.format(count=len(result.known), reward=reward, way=way))
    if result.comparison is not None and not result.comparison.significant:
        found.append(
            "no difference is shown: say so, or measure on more tasks (agl eval --aa says how small a gain these show)"
        )
    return found
