"""One rollout: its attempts, its spans, its conversation and its tokens; and two rollouts of a group side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, cast

from agentlightning import span as names
from agentlightning.algorithms.lightning_rl import LightningRLConfig
from agentlightning.assemble import calls, link_rewards, steps
from agentlightning.assemble.model_calls import is_call
from agentlightning.dashboard.data.rollouts import (
    AttemptIndex,
    Key,
    RolloutSummary,
    Start,
    Turn,
    Updates,
    as_text,
    call_facts,
    group_of,
    kind_of,
    limited,
    message_json,
    summarize,
    tells_failure,
    tool_results,
    turns_of,
    version_of,
)
from agentlightning.dashboard.data.run_data import BatchCredit, Catalog, RunData, TokenTexts
from agentlightning.dashboard.query import Query, mark_of
from agentlightning.dashboard.views.rollouts import by_version
from agentlightning.engine.likeliest_tokens import likeliest_from_text
from agentlightning.errors import NotFoundError, RewardError
from agentlightning.policy.losses import PPOLoss
from agentlightning.rollouts import Attempt, Rollout
from agentlightning.span import Span, counts
from agentlightning.store.export.jsonl import fields_of
from agentlightning.tracing.rewards import get_reward_value
from agentlightning.training.persistence.token_ratios import CallRatios
from agentlightning.util.common_prefix import common_prefix_length
from agentlightning.util.json_values import Json

PAGE_OF_SPANS: Final = 300
MOST_SPANS: Final = 1000
"""Spans of one page, unless asked for otherwise, and at most."""
PAGE_OF_CALLS: Final = 20
"""Calls whose tokens are shown at once."""
SPANS_OF_CALLS: Final = 100
"""Spans that are read at once to find calls."""
MOST_SPANS_OF_CALLS: Final = 2000
"""Spans that are looked through for the calls of one page; it then has fewer."""
CONTEXT: Final = 10
"""Calls before a page that its first ones may continue."""
SECONDS: Final = 0.1
"""How long a page waits for the totals of its attempt; where they take longer, it asks again."""
MOST_VALUE: Final = 20_000
"""Characters of one attribute of a span."""
NO_RATIOS: Final = (
    "no update has recorded the ratios of this rollout: a run records them with run.token_ratios=true,"
    " and only of tokens that it learns from"
)
IN_GROUP: Final = 64
"""Rollouts of a group that are listed."""


async def show_rollout(data: Catalog, query: Query) -> Json:
    """A rollout with some spans of one attempt (that of `attempt`, else the latest): `limit` from the place `start` on.
    Totals are those of all its spans. With the `mark` of an earlier answer, whether anything is different now."""
    run = await data.run(query.part("run"))
    rollout = await run.rollout(query.part("rollout"))
    attempts = await run.store.query_attempts(rollout.rollout_id)
    attempt = _chosen(attempts, query.text("attempt"), rollout.rollout_id)
    count = 0 if attempt is None else await run.store.count_spans(rollout.rollout_id, attempt.attempt_id)
    mark = _mark(rollout, attempts, attempt, count)
    if query.text("mark") == mark:
        return {"mark": mark, "unchanged": True}
    index = await _index(run, attempt, count, SECONDS)
    if index is None and query.text("mark") == f"{mark}-counting":
        return {"mark": f"{mark}-counting", "unchanged": True}
    summary, density, is_current = await _totals(run, rollout, attempt, index)
    start, limit = query.integer("start", 0), query.integer("limit", PAGE_OF_SPANS, 0, MOST_SPANS)
    page = await _spans(run, attempt, count, start, limit)
    last = start + len(page.spans)
    return {
        "mark": mark if is_current else f"{mark}-counting",
        "rollout": rollout_json(rollout),
        "summary": asdict(summary),
        "attempts": [attempt_json(each) for each in attempts],
        "attempt": None if attempt is None else attempt.attempt_id,
        "spans": [span_json(span) for span in page.spans],
        "spans_total": count,
        "next": last if last < count else None,
        "calls_total": None if index is None else len(index.calls),
        "kinds": None if index is None else index.kinds,
        "density": density,
        "time": _time(attempt, page.spans, index),
        "stream": page.stream,
        "context": page.context,
        "step": await run.step_of(rollout),
        "writable": data.writable,
    }


@dataclass(frozen=True, slots=True)
class _Page:
    """Some spans of an attempt."""

    spans: list[Span]
    stream: list[Json]
    """Their model calls."""
    context: list[Json]
    """What may have changed of the calls before them."""


async def _spans(run: RunData, attempt: Attempt | None, count: int, start: int, limit: int) -> _Page:
    if attempt is None or (limit == 0 and start >= count):
        return _Page([], [], [])
    key = attempt.rollout_id, attempt.attempt_id
    begin = Start(None, 0)
    if start:
        index = await _index(run, attempt, count, None)
        assert index is not None  # it is waited for
        begin = index.start_of(min(start, len(index.ids)), CONTEXT)
    found = await run.store.query_spans(*key, after=begin.after, limit=begin.context + limit, tokens=False)
    own = found[begin.context :]
    calls = _without_tokens(stream_of(found, BatchCredit(), None, updates=run.summaries.updates))
    shown = {span.span_id for span in own}
    if begin.after is not None:
        for call in calls:  # whether it begins a thread is not known from here
            call["starts"] = False
    changing = ("span_id", "counts", "reward", "error", "tool_results")
    return _Page(
        own,
        [call for call in calls if call["span_id"] in shown],
        [{name: call[name] for name in changing} for call in calls if call["span_id"] not in shown],
    )


def _mark(rollout: Rollout, attempts: Sequence[Attempt], attempt: Attempt | None, count: int) -> str:
    """A text that changes with all that a page of a rollout shows."""
    states = [(each.attempt_id, each.status, each.end_time) for each in attempts]
    return mark_of(rollout.status, rollout.end_time, states, attempt and attempt.attempt_id, count)


async def _index(run: RunData, attempt: Attempt | None, count: int, seconds: float | None) -> AttemptIndex | None:
    """None: it is not complete yet."""
    if attempt is None:
        return AttemptIndex()
    return await run.attempts.of((attempt.rollout_id, attempt.attempt_id), count, seconds)


async def _totals(
    run: RunData, rollout: Rollout, attempt: Attempt | None, index: AttemptIndex | None
) -> tuple[RolloutSummary, list[int] | None, bool]:
    """Those of an attempt, and whether they are up to date; where its spans are still being read, without what they
    say."""
    if index is None:
        return summarize(rollout, attempt, None), None, False
    summary, density, is_current = await index.totals(rollout, attempt, run.weights)
    return run.summaries.counted(summary), density, is_current


def _time(attempt: Attempt | None, spans: Sequence[Span], index: AttemptIndex | None) -> dict[str, float | None]:
    """From when to when the spans of an attempt are, as far as it is known."""
    if index is not None:
        return {"start": index.start, "end": index.end}
    ends = [span.start_time if span.end_time is None else span.end_time for span in spans]
    latest = attempt.end_time if attempt is not None and attempt.end_time is not None else max(ends, default=None)
    return {"start": min((span.start_time for span in spans), default=None), "end": latest}


async def show_tokens(data: Catalog, query: Query) -> Json:
    """The tokens of some calls of a rollout, with log-probability, advantage, weight and version of each: from the call
    `from` on (default: the page that has `call`)."""
    run = await data.run(query.part("run"))
    rollout = await run.rollout(query.part("rollout"))
    credit, step = await run.credit(rollout)
    ratios = await run.ratios(step, [rollout.rollout_id])
    call = query.integer("call", 0)
    first = query.integer("from", call - call % PAGE_OF_CALLS)
    calls = await _calls(run, rollout, credit, ratios, first)
    return {
        "summary": asdict(calls.summary),
        "step": step,
        "credit": _credit_json(credit),
        "ratios": ratios_json(run, ratios),
        "has_texts": run.texts is not None,
        "stream": calls.stream,
        "first_call": first,
        "calls_total": calls.total,
        "next": first + len(calls.stream) if calls.more else None,
    }


async def show_group(data: Catalog, query: Query) -> Json:
    """The group of a rollout, and two of it side by side: `left` (default: the best) and `right` (the worst)."""
    run = await data.run(query.part("run"))
    rollout = await run.rollout(query.part("rollout"))
    members = await run.group(rollout)
    rows = sorted(await run.summaries.of(members), key=_by_reward)
    chosen = [_member(rows, query.text("left"), 0), _member(rows, query.text("right"), len(rows) - 1)]
    credit, step = await run.credit(rollout)
    by_id = {each.rollout_id: each for each in members}
    ratios = await run.ratios(step, [each.rollout_id for each in chosen])
    sides = [await _calls(run, by_id[each.rollout_id], credit, ratios, 0) for each in chosen]
    streams = [each.stream for each in sides]
    return {
        "group": group_of(rollout),
        "task": limited(as_text(rollout.input)),
        "task_key": rows[0].task_key,
        "step": step,
        "rollouts": [asdict(row) for row in rows[:IN_GROUP]],
        "left_out": max(0, len(rows) - IN_GROUP),
        "left": chosen[0].rollout_id,
        "right": chosen[1].rollout_id,
        "streams": streams,
        "more_calls": [each.more for each in sides],
        "difference": first_difference(*streams) if chosen[0] is not chosen[1] else None,
        "versions": by_version(rows),
        "credit": _credit_json(credit),
        "ratios": ratios_json(run, ratios),
        "has_texts": run.texts is not None,
    }


def _by_reward(row: RolloutSummary) -> tuple[bool, float, str]:
    """The best first; those without a reward last."""
    number = row.reward_number
    return number is None, -(number or 0.0), row.rollout_id


def _member(rows: Sequence[RolloutSummary], rollout_id: str | None, default: int) -> RolloutSummary:
    if rollout_id is None:
        return rows[default]
    for row in rows:
        if row.rollout_id == rollout_id:
            return row
    raise NotFoundError(f"rollout {rollout_id!r} is not of this group")


@dataclass(frozen=True, slots=True)
class _Calls:
    """Some calls of the latest attempt of a rollout, with their tokens."""

    summary: RolloutSummary
    stream: list[Json]
    more: bool
    """Whether it has more calls after these."""
    total: int | None
    """All its calls; None: they are still being counted."""


async def _calls(run: RunData, rollout: Rollout, credit: BatchCredit, ratios: CallRatios, first: int) -> _Calls:
    attempt = await run.store.get_latest_attempt(rollout.rollout_id)
    if attempt is None:
        return _Calls(summarize(rollout, None, []), [], False, 0)
    key = rollout.rollout_id, attempt.attempt_id
    count = await run.store.count_spans(*key)
    index = await _index(run, attempt, count, SECONDS if not first else None)
    if index is None:
        skip, (spans, more) = 0, await _until_call(run, key, PAGE_OF_CALLS)
    else:
        place, end = (index.calls[n] if n < len(index.calls) else count for n in (first, first + PAGE_OF_CALLS))
        begin = index.start_of(place, 1)
        skip, more = index.calls_before(place) - index.calls_before(place - begin.context), end < count
        spans = await run.store.query_spans(*key, after=begin.after, limit=begin.context + end - place)
    stream = stream_of(spans, credit, run.texts, ratios, run.summaries.updates)[skip:]
    total = None if index is None else len(index.calls)
    summary, _, _ = await _totals(run, rollout, attempt, index)
    return _Calls(summary, stream, more, total)


async def _until_call(run: RunData, key: Key, calls: int) -> tuple[list[Span], bool]:
    """The first spans, up to the call that follows so many, which is left out; and whether there is one."""
    found: list[Span] = []
    seen, after = 0, None
    while len(found) < MOST_SPANS_OF_CALLS:
        chunk = await run.store.query_spans(*key, after=after, limit=SPANS_OF_CALLS)
        for span in chunk:
            if is_call(span):
                if seen == calls:
                    return found, True
                seen += 1
            found.append(span)
        if len(chunk) < SPANS_OF_CALLS:
            return found, False
        after = chunk[-1].span_id
    return found, True


def _chosen(attempts: Sequence[Attempt], attempt_id: str | None, rollout_id: str) -> Attempt | None:
    if attempt_id is None:
        return attempts[-1] if attempts else None
    for attempt in attempts:
        if attempt.attempt_id == attempt_id:
            return attempt
    raise NotFoundError(f"rollout {rollout_id!r} has no attempt {attempt_id!r}")


def _without_tokens(stream: list[Json]) -> list[Json]:
    for call in stream:
        call["tokens"] = call["prompt"] = None
    return stream


def ratios_json(run: RunData, ratios: CallRatios) -> Json:
    """Whether there are ratios, why not, and beyond which of them the run's loss clips."""
    config = run.config
    losses = config.algorithm.losses if config is not None and isinstance(config.algorithm, LightningRLConfig) else ()
    clips = next(((each.clip_low, each.clip_high) for each in losses if isinstance(each, PPOLoss)), None)
    known = bool(ratios)
    return {"known": known, "note": "" if known else NO_RATIOS, "clip": clips}


def _credit_json(credit: BatchCredit) -> Json:
    return {"rule": credit.rule, "notes": list(credit.notes), "known": bool(credit.calls)}


# -- as JSON -----------------------------------------------------------------------------------------------------------


def rollout_json(rollout: Rollout) -> Json:
    """A rollout with the whole text of its task."""
    return {
        **{name: value for name, value in fields_of(rollout).items() if name not in ("input", "metadata")},
        "task": limited(as_text(rollout.input)),
        "group": group_of(rollout),
        "metadata": limited(as_text(rollout.metadata), MOST_VALUE),
    }


def attempt_json(attempt: Attempt) -> Json:
    """An attempt with its error or its output as text."""
    found = fields_of(attempt)
    metadata = cast(Json, found.pop("metadata"))
    error: Any = metadata.get("error")
    return {
        **found,
        "error": {name: limited(as_text(error.get(name) or "")) for name in ("type", "message", "traceback")}
        if isinstance(error, dict)
        else None,
        "output": limited(as_text(metadata["output"])) if "output" in metadata else None,
    }


def span_json(span: Span) -> Json:
    """A span without token ids and log-probabilities, which the token view has."""
    return {
        "span_id": span.span_id,
        "parent_id": span.parent_id,
        "sequence_id": span.sequence_id,
        "name": span.name,
        "start_time": span.start_time,
        "end_time": span.end_time,
        "status": span.status_code,
        "message": span.status_message,
        "kind": kind_of(span),
        "agent": span.attributes.get(names.AGENT_NAME),
        "reward": get_reward_value(span),
        "counts": counts(span),
        "attributes": {name: _value(name, value) for name, value in span.attributes.items()},
        "events": [{"name": e.name, "timestamp": e.timestamp, "attributes": _short(e.attributes)} for e in span.events],
    }


def _value(name: str, value: Any) -> Any:
    if name in (names.KEPT_SETS, names.TOP_LOGPROBS) and isinstance(value, str):
        return f"[{len(value)} characters of compressed numbers]"
    if name in names.TOKEN_ATTRIBUTES and isinstance(value, list):
        return f"[{len(cast('list[Any]', value))} numbers]"
    return value if isinstance(value, int | float | bool) or value is None else limited(as_text(value), MOST_VALUE)


def _short(attributes: Mapping[str, Any]) -> Json:
    return {name: _value(name, value) for name, value in attributes.items()}


# -- the tokens of an attempt, call by call ---------------------------------------------------------------------------
#
# A call's prompt is shown from where it leaves the tokens of the call before it. Of each sampled token there are the
# log-probability it was drawn with, the version of the weights, its advantage and its weight in the loss; where they
# are recorded the ratio of new to old (`run.token_ratios`) and the likeliest tokens (`gateway.record_top_logprobs`).


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
