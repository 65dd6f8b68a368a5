"""One rollout in a line of a table: what happened, its reward, its cost. Read from its latest attempt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, cast

from agentlightning import span as names
from agentlightning.assemble import calls, link_rewards, scalar_reward, steps
from agentlightning.assemble.model_calls import has_failed
from agentlightning.dashboard.data.conversation import messages_of, tool_results
from agentlightning.dashboard.data.text import shortened, tells_failure
from agentlightning.errors import RewardError
from agentlightning.rollouts import Attempt, Rollout
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.task import task_key
from agentlightning.trajectory import Reward, RewardWeights
from agentlightning.util.json_values import Json

REMEMBERED: Final = 20_000
"""Finished rollouts whose summaries are remembered."""


Updates: TypeAlias = Callable[[int], int]
"""The number of updates behind weights of a version. Pages show it: loading a checkpoint raises the version too."""


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """A line of the table of rollouts."""

    rollout_id: str
    status: str
    mode: str | None
    queue: str
    group: str
    task: str
    """Its beginning."""
    task_key: str
    start_time: float
    end_time: float | None
    seconds: float | None
    """Of the latest attempt."""
    attempts: int
    attempt_start: float | None
    """Of the latest attempt."""
    worker: str | None
    reward: Reward | None
    reward_number: float | None
    """The reward as one number; None: missing, or named dimensions without weights."""
    spans_read: bool
    """False: what follows is not known, but for failures and resources_id."""
    calls: int
    prompt_tokens: int
    sampled_tokens: int
    agents: tuple[str, ...]
    versions: tuple[int, ...]
    """Of the weights that answered, in order."""
    tool_calls: int
    tool_errors: int
    failure: str | None
    """Why it failed, or why it has no reward."""
    failure_kind: str | None
    """The type of the error, or how the attempt ended."""
    labels: tuple[str, ...]
    """What people have said of it."""
    resources_id: str | None


class Summaries:
    """Reads summaries, and remembers those of finished rollouts."""

    def __init__(self, store: LightningStoreBase, weights: RewardWeights = None, updates: Updates = int) -> None:
        self._store, self._weights, self.updates = store, weights, updates
        self._known: OrderedDict[tuple[str, float | None, str], RolloutSummary] = OrderedDict()

    async def of(
        self, rollouts: Sequence[Rollout], *, fresh: bool = False, open_spans: bool = True
    ) -> list[RolloutSummary]:
        """In the given order. `fresh`: what was remembered is read again, for rollouts that may have been annotated.
        Without `open_spans`, no spans are read of rollouts that are not finished."""
        missing = {each.rollout_id: each for each in rollouts if fresh or _key(each) not in self._known}
        latest = await self._store.get_latest_attempts([*missing]) if missing else []
        attempts = {each.rollout_id: each for each in latest}
        found = {name: summarize(each, attempts.get(name), None) for name, each in missing.items()}
        wanted = [name for name, each in missing.items() if name in attempts and (open_spans or each.finished)]
        if wanted:
            async for name, spans in self._store.iter_spans(wanted, tokens=False):
                found[name] = summarize(missing[name], attempts[name], spans, self._weights)
        self._known |= {_key(each): found[name] for name, each in missing.items() if each.finished}
        result = [found.get(each.rollout_id) or self._known[_key(each)] for each in rollouts]
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return [self.counted(each) for each in result]

    def counted(self, summary: RolloutSummary) -> RolloutSummary:
        """With updates in place of versions."""
        return replace(summary, versions=tuple(map(self.updates, summary.versions)))


def _key(rollout: Rollout) -> tuple[str, float | None, str]:
    return rollout.rollout_id, rollout.end_time, rollout.status


def summarize(
    rollout: Rollout, attempt: Attempt | None, spans: Sequence[Span] | None, weights: RewardWeights = None
) -> RolloutSummary:
    """The summary of a rollout, from the spans of its latest attempt. None: they were not read."""
    spans_read, spans = attempt is None or spans is not None, spans or ()
    answered = calls(spans)
    reward, problem = reward_of(spans)
    kind, message = _failure(attempt) if rollout.status == "failed" or problem is None else (None, problem)
    tools, failed = _tools(spans, answered)
    return RolloutSummary(
        rollout_id=rollout.rollout_id,
        status=rollout.status,
        mode=rollout.mode,
        queue=rollout.queue,
        group=group_of(rollout),
        task=shortened(rollout.input),
        task_key=_digest(rollout.input),
        start_time=rollout.start_time,
        end_time=rollout.end_time,
        seconds=None if attempt is None or attempt.end_time is None else attempt.end_time - attempt.start_time,
        attempts=0 if attempt is None else attempt.sequence_id,
        attempt_start=None if attempt is None else attempt.start_time,
        worker=None if attempt is None else attempt.worker_id,
        reward=reward,
        reward_number=number_of(reward, weights),
        spans_read=spans_read,
        calls=len(answered),
        prompt_tokens=sum(token_count(span, names.INPUT_TOKENS, names.PROMPT_TOKEN_IDS) for span in answered),
        sampled_tokens=sum(token_count(span, names.OUTPUT_TOKENS, names.RESPONSE_TOKEN_IDS) for span in answered),
        agents=tuple(dict.fromkeys(str(a) for span in answered if (a := span.attributes.get(names.AGENT_NAME)))),
        versions=tuple(dict.fromkeys(v for span in answered if isinstance(v := version_of(span), int))),
        tool_calls=tools,
        tool_errors=failed,
        failure=message,
        failure_kind=kind,
        labels=tuple(dict.fromkeys(str(x) for span in spans if (x := span.attributes.get(names.FEEDBACK_LABEL)))),
        resources_id=rollout.resources_id,
    )


def group_of(rollout: Rollout) -> str:
    """The group that a rollout says it belongs to; empty where it says none."""
    group = rollout.metadata.get("group")
    return group if isinstance(group, str) else ""


def reward_of(spans: Iterable[Span]) -> tuple[Reward | None, str | None]:
    """The final reward of an attempt, and what is wrong with its rewards."""
    try:
        return link_rewards(spans).final, None
    except RewardError as error:
        return None, str(error)


def number_of(reward: Reward | None, weights: RewardWeights) -> float | None:
    """A reward as one number: a single named dimension as it is, several by their weights."""
    if isinstance(reward, dict) and not weights:
        return next(iter(reward.values())) if len(reward) == 1 else None
    try:
        return scalar_reward(reward, weights)
    except RewardError:
        return None


def version_of(span: Span, updates: Updates = int) -> int | None:
    version = span.attributes.get(names.POLICY_VERSION)
    return updates(version) if isinstance(version, int) else None


def call_facts(span: Span, updates: Updates) -> Json:
    """Who made a model call, what answered it, and what it cost."""
    attributes = span.attributes
    return {
        "span_id": span.span_id,
        "agent": attributes.get(names.AGENT_NAME),
        "model": attributes.get(names.RESPONSE_MODEL) or attributes.get(names.REQUEST_MODEL),
        "version": version_of(span, updates),
        "seconds": None if span.end_time is None else span.end_time - span.start_time,
        "prompt_tokens": token_count(span, names.INPUT_TOKENS, names.PROMPT_TOKEN_IDS),
        "sampled_tokens": token_count(span, names.OUTPUT_TOKENS, names.RESPONSE_TOKEN_IDS),
        "failed": has_failed(span),
    }


def _digest(task: Any) -> str:
    try:
        return task_key(task)
    except TypeError:
        return ""


def token_count(span: Span, usage: str, ids: str) -> int:
    known = span.attributes.get(ids)
    if isinstance(known, list):
        return len(cast("list[int]", known))
    number = span.attributes.get(usage)
    return number if isinstance(number, int) else 0


def _tools(spans: Sequence[Span], answered: Sequence[Span]) -> tuple[int, int]:
    """Tool calls and those that went wrong: by their spans, else by the results that later requests show."""
    own = [step for step in steps(spans) if step.kind == "tool"]
    if own:
        return len(own), sum(step.error is not None or tells_failure(step.result) for step in own)
    longest: list[Any] = []
    for span in answered:
        found = tool_results(messages_of(span, names.INPUT_MESSAGES))
        longest = found if len(found) > len(longest) else longest
    return len(longest), sum(map(tells_failure, longest))


def _failure(attempt: Attempt | None) -> tuple[str | None, str | None]:
    if attempt is None or attempt.status == "succeeded":
        return None, None
    error: Any = attempt.metadata.get("error")
    if not isinstance(error, dict):
        return (None, None) if attempt.status in ("preparing", "running") else (attempt.status, None)
    return str(error.get("type") or attempt.status), shortened(error.get("message") or "")
