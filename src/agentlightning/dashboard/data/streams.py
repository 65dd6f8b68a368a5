"""The tokens of a rollout, call by call, with all that is known of each: what the token view and a group show.

A call's prompt is shown from where it leaves the tokens of the call before it. Of each sampled token there are the
log-probability it was drawn with, the version of the weights, its advantage and its weight in the loss; where they are
recorded the ratio of new to old (`run.token_ratios`) and the likeliest tokens (`gateway.record_top_logprobs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

from agentlightning import span as names
from agentlightning.assemble import calls, link_rewards, steps
from agentlightning.dashboard.data.conversation import Turn, message_json, tool_results, turns_of
from agentlightning.dashboard.data.credit import BatchCredit
from agentlightning.dashboard.data.summary import Updates, call_facts, version_of
from agentlightning.dashboard.data.text import as_text, limited, tells_failure
from agentlightning.dashboard.data.token_text import TokenTexts
from agentlightning.engine.likeliest_tokens import likeliest_from_text
from agentlightning.errors import RewardError
from agentlightning.span import Span
from agentlightning.training.persistence.token_ratios import CallRatios
from agentlightning.util.common_prefix import common_prefix_length
from agentlightning.util.json_values import Json

MOST_PROMPT: Final = 4000
"""Tokens of a prompt that are sent, the last ones."""
MOST_SAMPLED: Final = 40_000
"""Sampled tokens of a rollout that are sent; those of further calls are left out, which the call says."""
Tokens = list[int]


def stream_of(
    spans: Sequence[Span],
    credit: BatchCredit,
    texts: TokenTexts | None,
    ratios: CallRatios | None = None,
    updates: Updates = int,
) -> list[Json]:
    """The model calls of one attempt, for the page. `spans` are those of the attempt, `ratios` of its rollout, and
    `updates` counts those behind a version of the weights."""
    turns = turns_of(spans)
    rewards = _rewards(spans)
    counted = {span.span_id for span in calls(spans)}
    found: list[Json] = []
    before: Tokens = []
    left = MOST_SAMPLED
    for turn in turns:
        span = turn.span
        prompt, sampled = _tokens(span, names.PROMPT_TOKEN_IDS), _tokens(span, names.RESPONSE_TOKEN_IDS)
        shown = len(sampled) <= left
        left -= len(sampled) if shown else 0
        known = common_prefix_length(before, prompt)
        found.append(
            {
                **call_facts(span, updates),
                **call_json(turn),
                "counts": span.span_id in counted,
                "reward": rewards.get(span.span_id),
                "known_tokens": known,
                "prompt": _prompt(prompt[known:], texts) if shown else None,
                "tokens": _sampled(span, sampled, credit, texts, ratios or {}, updates) if shown and sampled else None,
                "left_out": not shown,
            }
        )
        before = [*prompt, *sampled] if prompt else before
    for place, results in _results(turns, spans).items():
        found[place]["tool_results"] = results
    return found


def call_json(turn: Turn) -> Json:
    """What was said in a model call, and how it ended."""
    span, attributes = turn.span, turn.span.attributes
    reasons = attributes.get(names.FINISH_REASONS)
    failed = span.status_code == "ERROR" or names.ERROR_TYPE in attributes
    return {
        "name": span.name,
        "finish": as_text(reasons[0]) if isinstance(reasons, list) and reasons else None,
        "error": _error(span) if failed else None,
        "drift": attributes.get(names.DRIFT_REASON) if attributes.get(names.DRIFT) else None,
        "starts": turn.starts,
        "messages": [message_json(each) for each in turn.new],
        "answer": [message_json(each) for each in turn.answer],
        "tool_results": [],
    }


def _error(span: Span) -> str:
    return limited(as_text(span.status_message or span.attributes.get(names.ERROR_TYPE) or "error"))


def _rewards(spans: Sequence[Span]) -> Json:
    """The intermediate reward of each call."""
    try:
        return dict(link_rewards(spans).intermediate)
    except RewardError:
        return {}


def _results(turns: Sequence[Turn], spans: Sequence[Span]) -> dict[int, list[Json]]:
    """By place of a turn, what its tool calls gave: by their spans, else by what the next request of its thread
    adds."""
    found: dict[int, list[Json]] = {}
    tools = [step for step in steps(spans) if step.kind == "tool"]
    for place, turn in enumerate(turns):
        own: list[Json] = []
        following = turns[place + 1].span.sequence_id if place + 1 < len(turns) else 2**62
        for step in tools:
            if turn.span.sequence_id < step.sequence_id < following:
                failed = step.error is not None or tells_failure(step.result)
                text = limited(as_text(step.error if step.error is not None else step.result))
                own.append({"name": step.name, "text": text, "failed": failed, "span_id": step.span_id})
        if not own:
            after = next((each for each in turns[place + 1 :] if each.thread == turn.thread), None)
            for result in tool_results(after.new) if after is not None else ():
                text = limited(as_text(result))
                own.append({"name": None, "text": text, "failed": tells_failure(result), "span_id": None})
        if own:
            found[place] = own
    return found


def _prompt(tokens: Tokens, texts: TokenTexts | None) -> Json:
    shown = tokens[-MOST_PROMPT:]
    return {
        "ids": shown,
        "texts": None if texts is None else texts.of(shown),
        "left_out": len(tokens) - len(shown),
    }


def _sampled(
    span: Span, sampled: Tokens, credit: BatchCredit, texts: TokenTexts | None, ratios: CallRatios, updates: Updates
) -> Json:
    recorded = span.attributes.get(names.LOGPROBS)
    logprobs = cast("list[float]", recorded) if isinstance(recorded, list) else []
    own = credit.calls.get((span.rollout_id, span.span_id))
    fits = own is not None and len(own.advantages) == len(sampled)
    moved = ratios.get((span.rollout_id, span.span_id), ())
    return {
        "ids": sampled,
        "texts": None if texts is None else texts.of(sampled),
        "logprobs": logprobs if len(logprobs) == len(sampled) else None,
        "advantages": list(own.advantages) if own is not None and fits else None,
        "weights": list(own.weights) if own is not None and fits else None,
        "log_ratios": moved if len(moved) == len(sampled) else None,
        "versions": _versions(span, len(sampled), updates),
        "alternatives": _alternatives(span, len(sampled), texts),
    }


def _alternatives(span: Span, count: int, texts: TokenTexts | None) -> list[list[tuple[int, str | None, float]]] | None:
    """For each token the likeliest ones at its place, as (id, text, log-probability); None where none are recorded."""
    recorded = span.attributes.get(names.TOP_LOGPROBS)
    if not isinstance(recorded, str):
        return None
    try:
        rows = likeliest_from_text(recorded, count)
    except ValueError:  # written by something else; the span shows what
        return None
    shown = {token: None if texts is None else texts.of([token])[0] for row in rows for token, _ in row}
    return [[(token, shown[token], value) for token, value in row] for row in rows]


def _versions(span: Span, count: int, updates: Updates) -> list[int] | None:
    """The version of the weights that sampled each token; None where it is not known."""
    runs = span.attributes.get(names.POLICY_VERSIONS)
    if isinstance(runs, list) and all(isinstance(each, int) for each in cast("list[Any]", runs)):
        numbers = cast("list[int]", runs)
        found = [updates(v) for v, n in zip(numbers[::2], numbers[1::2], strict=False) for _ in range(min(n, count))]
        if len(found) == count:
            return found
    version = version_of(span, updates)
    return None if version is None else [version] * count


def _tokens(span: Span, attribute: str) -> Tokens:
    value = span.attributes.get(attribute)
    return cast("Tokens", value) if isinstance(value, list) else []


def first_difference(first: Iterable[Json], second: Iterable[Json]) -> Json | None:
    """The first sampled token in which two streams differ, as (call, token): counted from 0, among the calls that
    count. Calls without tokens are compared by their text. None where one stream is the other."""
    mine, theirs = ([each for each in stream if each["counts"]] for stream in (first, second))
    for call, (left, right) in enumerate(zip(mine, theirs, strict=False)):
        a, b = left["tokens"], right["tokens"]
        if a is None or b is None:
            if left["answer"] != right["answer"]:
                return {"call": call, "token": 0}
        elif a["ids"] != b["ids"]:
            return {"call": call, "token": common_prefix_length(a["ids"], b["ids"])}
    return None if len(mine) == len(theirs) else {"call": min(len(mine), len(theirs)), "token": 0}
