"""What a dry run makes of the rollouts it saw: a sentence for each thing that training needs, and what to look for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from agentlightning.training.dry_run.observation import DryRunRollout
from agentlightning.training.health.signs import LEAK_SHARE, answers_in_prompts

Outcome = Literal["ok", "warning", "failed"]

FEW_HELD_OUT: Final = 40
"""Fewer held-out tasks give an interval that shows large gains only."""
IGNORED_ADDRESS: Final = (
    "it ignores the address of the rollout. Look for base_url= or api_base= with a fixed address in its code or"
    " configuration, for a .env file that overrides OPENAI_BASE_URL, OPENAI_API_BASE or ANTHROPIC_BASE_URL, for a"
    " client that reads none of these (take the parameters base_url and api_key, and give it those), for answers from a"
    " cache, and for errors that the agent catches; docs/guides/frameworks.md says what each framework needs"
)


@dataclass(frozen=True, slots=True)
class DryRunCheck:
    """One thing that training needs."""

    name: str
    outcome: Outcome
    """failed: training cannot work like this. warning: it may."""
    text: str
    """What was seen."""
    advice: str | None = None
    """What to look for."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a dry run has seen."""

    checks: tuple[DryRunCheck, ...]
    rollouts: tuple[DryRunRollout, ...] = ()
    seconds: float = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether training can begin: nothing failed."""
        return all(each.outcome != "failed" for each in self.checks)

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "ready": self.is_ready,
            "checks": [asdict(each) for each in self.checks],
            "rollouts": [asdict(each) for each in self.rollouts],
            "seconds": round(self.seconds, 2),
        }


def checks_of(rollouts: Sequence[DryRunRollout], *, trains: bool, random_weights: bool) -> list[DryRunCheck]:
    """`trains`: whether the calls of a policy are learned from; `random_weights`: whether it knows nothing yet."""
    found = [check_rollouts(rollouts)]
    if trains:
        found.append(check_calls(rollouts))
        found += [check_tokens(rollouts, random_weights)] if any(each.policy_calls for each in rollouts) else []
    else:
        found.append(check_recorded_calls(rollouts))
    found += check_prompts(rollouts)
    found += check_tools(rollouts)
    return [*found, *check_reward(rollouts, random_weights)]


def check_rollouts(rollouts: Sequence[DryRunRollout]) -> DryRunCheck:
    """Whether the agent ended without an error."""
    failed = [each for each in rollouts if each.failure is not None]
    slowest = max(each.seconds for each in rollouts)
    if not failed:
        return DryRunCheck(
            "rollouts", "ok", f"{len(rollouts)} of {len(rollouts)} ended well, the slowest in {slowest:.1f} s"
        )
    first = failed[0]
    hung = sum(each.status == "timeout" for each in failed)
    times = f", {hung} of them because they took longer than runner.timeout_seconds" if hung else ""
    return DryRunCheck(
        "rollouts",
        "failed" if len(failed) * 2 > len(rollouts) else "warning",
        f"{len(failed)} of {len(rollouts)} failed{times}. The first, {first.rollout_id}:\n{first.failure}",
        "run the agent on this task by itself: " + _short(first.task),
    )


def check_recorded_calls(rollouts: Sequence[DryRunRollout]) -> DryRunCheck:
    """Whether what the agent asks a model is recorded, where none is trained: a critic reads it."""
    calls = [each.policy_calls for each in rollouts]
    if recorded := sum(map(bool, calls)):
        text = f"{sum(calls)} calls of models were recorded, in {recorded} of {len(calls)} rollouts"
        return DryRunCheck("calls", "ok", text)
    return DryRunCheck(
        "calls",
        "warning",
        "no model call was recorded: a critic sees tasks and rewards alone, and no tokens are counted",
        "if the agent calls a model: set OPENAI_BASE_URL and OPENAI_API_KEY (or [gateway]), which the agent has to read"
        " from its environment, or report calls with agl.emit_prompt",
    )


def check_calls(rollouts: Sequence[DryRunRollout]) -> DryRunCheck:
    """Whether the agent calls the model that is to learn."""
    calls = [each.policy_calls for each in rollouts]
    silent = sum(not each for each in calls)
    errors = [error for each in rollouts for error in each.failed_calls]
    others = sorted({model for each in rollouts for model in each.other_models})
    if silent == len(calls) and others:
        text = f"no call was answered by the model that is to learn; {', '.join(others)} answered"
        return DryRunCheck(
            "calls", "failed", text, "change the routes of [gateway], or the name of the model in the agent"
        )
    if silent == len(calls) and errors:
        return DryRunCheck("calls", "failed", f"all {len(errors)} calls were refused: {errors[0]}", "mend what it says")
    if silent == len(calls):
        text = "the agent made no call to the model that is to learn"
        if all(each.failure for each in rollouts):  # Its error may be why, or what a wrong address leads to.
            return DryRunCheck(
                "calls", "failed", f"{text} before it failed", f"see the error above first. Or: {IGNORED_ADDRESS}"
            )
        return DryRunCheck("calls", "failed", text, IGNORED_ADDRESS)
    text = f"{sum(calls)} calls of the model in {len(calls)} rollouts"
    if errors:
        return DryRunCheck("calls", "warning", f"{text}, and {len(errors)} that were refused: {errors[0]}")
    if silent:
        advice = "nothing is learned from those; see whether the agent skips the call, or catches an error"
        return DryRunCheck("calls", "warning", f"{text}; {silent} rollouts made none", advice)
    return DryRunCheck("calls", "ok", text + (f"; also answered: {', '.join(others)}" if others else ""))


def check_tokens(rollouts: Sequence[DryRunRollout], random_weights: bool) -> DryRunCheck:
    """Whether the sampled tokens arrive with their log-probabilities."""
    calls = sum(each.policy_calls for each in rollouts)
    unknown = sum(each.without_tokens for each in rollouts)
    unusable = Counter(each.reason for each in rollouts if each.reason and "reward" not in each.reason)
    if unknown:
        advice = "the server that answers must report token ids and log-probabilities (docs/guides/operations/vllm.md)"
        return DryRunCheck("tokens", "failed", f"the tokens of {unknown} of {calls} calls are not known", advice)
    if unusable:
        named = next(str(each.rejection) for each in rollouts if each.reason in unusable)
        return DryRunCheck("tokens", "failed", f"{unusable.total()} rollouts cannot be learned from: {named}")
    tokens, truncated = sum(each.sampled_tokens for each in rollouts), sum(each.truncated for each in rollouts)
    text = f"{tokens} sampled tokens with their log-probabilities, {tokens / max(1, calls):.0f} an answer"
    if truncated * 2 <= calls or random_weights:
        return DryRunCheck("tokens", "ok", text)
    advice = "raise max_tokens in the agent, unless answers are meant to be cut off"
    return DryRunCheck(
        "tokens", "warning", f"{text}; {truncated} of {calls} answers were cut off at their limit", advice
    )


def check_prompts(rollouts: Sequence[DryRunRollout]) -> list[DryRunCheck]:
    """Whether prompts give the answers of their tasks away; nothing where they do not, or tasks have no answer."""
    pairs = [(each.task, json.dumps(_asked(each), ensure_ascii=False, default=str)) for each in rollouts]
    share = answers_in_prompts(pairs)
    if share is None or share < LEAK_SHARE:
        return []
    text = f"the answer of the task is in the prompt of {share:.0%} of the tasks: the policy may learn to copy it"
    advice = "do not give the agent the field of the task that the reward compares with"
    return [DryRunCheck("prompts", "warning", text, advice)]


def _asked(rollout: DryRunRollout) -> list[Any]:
    """The messages before the first answer."""
    roles = [message.get("role") for message in rollout.transcript]
    return list(rollout.transcript[: roles.index("assistant") if "assistant" in roles else None])


def check_tools(rollouts: Sequence[DryRunRollout]) -> list[DryRunCheck]:
    """Tools that raised; nothing where none did."""
    errors = [error for each in rollouts for error in each.tool_errors]
    if not errors:
        return []
    names = Counter(error.partition(":")[0] for error in errors)
    named = ", ".join(f"{name} {count} times" for name, count in names.most_common())
    advice = "where the model's arguments are at fault, it can learn; where the tool is (a key, a file), mend it first"
    return [DryRunCheck("tools", "warning", f"tools raised: {named}. The first: {errors[0]}", advice)]


def check_reward(rollouts: Sequence[DryRunRollout], random_weights: bool) -> list[DryRunCheck]:
    """Whether rollouts have rewards, and these differ; nothing where none ended well."""
    ended = [each for each in rollouts if each.failure is None]
    rewards = [each.reward for each in ended if each.reward is not None]
    missing = [each for each in ended if each.reward is None]
    if not ended:
        return []
    if missing:
        why = missing[0].rejection or "the agent returned no number, and no reward function is set"
        text = f"{len(missing)} of {len(ended)} rollouts have none: {why}"
        advice = "return a number from the agent, set a reward function (--reward), or call agl.emit_reward"
        return [DryRunCheck("reward", "warning" if len(missing) * 2 < len(ended) else "failed", text, advice)]
    low, high = min(rewards), max(rewards)
    if low < high:
        mean = sum(rewards) / len(rewards)
        return [DryRunCheck("reward", "ok", f"{mean:.3f} on average, from {low:g} to {high:g}")]
    shown = f"The first output was {_short(ended[0].output)} for the task {_short(ended[0].task)}"
    return [
        DryRunCheck(
            "reward",
            "warning",
            f"all {len(rewards)} rewards are {low:g}: rollouts that do not differ teach nothing. {shown}",
            "the model has random weights here, and its answers are noise: see what the reward gives a right answer"
            if random_weights
            else "see whether the reward reads the answer in the form that the agent gives it, and what it gives a"
            " right and a wrong one; else take tasks that the model solves sometimes",
        )
    ]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:157]}..."
