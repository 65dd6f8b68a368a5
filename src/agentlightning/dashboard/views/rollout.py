"""One rollout: its attempts, its spans, its conversation and its tokens; and two rollouts of a group side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import orjson

from agentlightning import span as names
from agentlightning.assemble import calls, is_call, link_rewards, steps
from agentlightning.dashboard.data.rollouts import (
    AttemptIndex,
    Key,
    RolloutSummary,
    Updates,
    as_text,
    call_facts,
    group_of,
    kind_of,
    limited,
    message_json,
    messages_of,
    parts_of,
    tells_failure,
    tool_results,
    version_of,
)
from agentlightning.dashboard.data.run_data import RunData, TokenFacts, TokenTexts
from agentlightning.dashboard.query import Query, mark_of
from agentlightning.dashboard.views.rollouts import by_version
from agentlightning.engine.likeliest_tokens import likeliest_from_text
from agentlightning.errors import NotFoundError, RewardError
from agentlightning.policy.losses import PPOLoss
from agentlightning.rollouts import Attempt, Rollout
from agentlightning.span import Span, counts
from agentlightning.store.export.jsonl import fields_of
from agentlightning.tracing.rewards import get_reward_value
from agentlightning.trajectory import Step
from agentlightning.util.common_prefix import common_prefix_length
from agentlightning.util.json_values import Json

T = TypeVar("T")
PAGE_OF_SPANS = 300
MOST_SPANS = 1000
"""Spans of one page, unless asked for otherwise, and at most."""
PAGE_OF_CALLS = 20
"""Calls whose tokens are shown at once."""
SPANS_OF_CALLS = 100
"""Spans that are read at once to find calls."""
MOST_SPANS_OF_CALLS = 2000
"""Spans that are looked through for the calls of one page; it then has fewer."""
CONTEXT = 10
"""Calls before a page that its first ones may continue."""
SECONDS = 0.1
"""How long a page waits for the totals of its attempt; where they take longer, it asks again."""
MOST_VALUE = 20_000
"""Characters of one attribute of a span."""
NO_RATIOS = (
    "no update has recorded the ratios of this rollout: a run records them with run.token_ratios=true,"
    " and only of tokens that it learns from"
)
SIDES = (("left", 0), ("right", -1))
IN_GROUP = 64
"""Rollouts of a group that are listed."""


async def show_rollout(run: RunData, query: Query) -> Json:
    """A rollout with some spans of one attempt (that of `attempt`, else the latest): `limit` from the place `start` on.
    Totals are those of all its spans. With the `mark` of an earlier answer, whether anything is different now."""
    rollout = await run.rollout(query["rollout"])
    attempts = await run.store.query_attempts(rollout.rollout_id)
    wanted, by_id = query.text("attempt"), {each.attempt_id: each for each in attempts}
    own = _chosen(by_id, wanted, -1, f"attempt of {rollout.rollout_id!r}") if wanted or by_id else None
    count = 0 if own is None else await run.store.count_spans(rollout.rollout_id, own.attempt_id)
    states = [(each.attempt_id, each.status, each.end_time) for each in attempts]
    mark = mark_of(rollout.status, rollout.end_time, states, own and own.attempt_id, count)
    known = query.text("mark")
    index = None if known == mark else await _index(run, own, count, SECONDS)
    if index is None and known in (mark, f"{mark}-counting"):
        return {"mark": known, "unchanged": True}
    summary, density, is_current = await _totals(run, rollout, own, index)
    start, limit = query.integer("start", 0), query.integer("limit", PAGE_OF_SPANS, 0, MOST_SPANS)
    spans, stream, context = await _spans(run, own, count, start, limit)
    last, seen = start + len(spans), index or AttemptIndex().add(spans)
    return {
        "mark": mark if is_current else f"{mark}-counting",
        "rollout": rollout_json(rollout),
        "summary": summary,
        "attempts": [attempt_json(each) for each in attempts],
        "attempt": own and own.attempt_id,
        "spans": [span_json(span) for span in spans],
        "spans_total": count,
        "next": last if last < count else None,
        "calls_total": index and len(index.calls),
        "kinds": index and index.kinds,
        "density": density,
        "time": {"start": seen.start, "end": seen.end},
        "stream": stream,
        "context": context,
        "step": await run.step_of(rollout),
        "writable": run.writable,
    }


async def _spans(
    run: RunData, attempt: Attempt | None, count: int, start: int, limit: int
) -> tuple[list[Span], list[Json], list[Json]]:
    """Some spans of an attempt, their model calls, and what may have changed of the calls before them."""
    if attempt is None or (limit == 0 and start >= count):
        return [], [], []
    after, earlier = None, 0
    if start:
        index = await _index(run, attempt, count, None)
        assert index is not None  # it is waited for
        after, earlier = index.start_of(min(start, len(index.ids)), CONTEXT)
    key, limit = (attempt.rollout_id, attempt.attempt_id), earlier + limit
    found = await run.store.query_spans(*key, after=after, limit=limit, tokens=False)
    calls = stream_of(found, TokenFacts(run.summaries.updates))
    if after is not None:
        for call in calls:  # whether it begins a thread is not known from here
            call["starts"] = False
    before = sum(map(is_call, found[:earlier]))
    changing = ("span_id", "counts", "reward", "error", "tool_results")
    context = [{name: call[name] for name in changing} for call in calls[:before]]
    return found[earlier:], calls[before:], context


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
        return RolloutSummary(rollout, attempt, None), None, False
    summary, density, is_current = await index.totals(rollout, attempt, run.weights)
    return summary.counted(run.summaries.updates), density, is_current


async def show_tokens(run: RunData, query: Query) -> Json:
    """The tokens of some calls of a rollout, with log-probability, advantage, weight and version of each: from the call
    `from` on (default: the page that has `call`)."""
    rollout = await run.rollout(query["rollout"])
    facts = await run.facts(rollout, [rollout.rollout_id])
    call = query.integer("call", 0)
    first = query.integer("from", call - call % PAGE_OF_CALLS)
    return {**await _calls(run, rollout, facts, first), "first_call": first, **_facts_json(run, facts)}


async def show_group(run: RunData, query: Query) -> Json:
    """The group of a rollout, and two of it side by side: `left` (default: the best) and `right` (the worst)."""
    rollout = await run.rollout(query["rollout"])
    members = {each.rollout_id: each for each in await run.group(rollout)}
    rows = sorted(await run.summaries.of([*members.values()]), key=_by_reward)
    ranked = {row.rollout_id: members[row.rollout_id] for row in rows}
    left, right = (_chosen(ranked, query.text(name), at, "rollout of this group") for name, at in SIDES)
    facts = await run.facts(rollout, [left.rollout_id, right.rollout_id])
    sides = [await _calls(run, each, facts, 0) for each in (left, right)]
    streams = [each["stream"] for each in sides]
    return {
        "group": group_of(rollout),
        "task": limited(rollout.input),
        "task_key": rows[0].task_key,
        "rollouts": rows[:IN_GROUP],
        "left_out": max(0, len(rows) - IN_GROUP),
        "left": left.rollout_id,
        "right": right.rollout_id,
        "streams": streams,
        "more_calls": [each["next"] is not None for each in sides],
        "difference": first_difference(*streams) if left is not right else None,
        "versions": by_version(rows),
        **_facts_json(run, facts),
    }


def _by_reward(row: RolloutSummary) -> tuple[bool, float, str]:
    """The best first; those without a reward last."""
    number = row.reward_number
    return number is None, -(number or 0.0), row.rollout_id


def _chosen(known: Mapping[str, T], name: str | None, default: int, kind: str) -> T:
    """That of the name; without a name, that at a place. Raises NotFoundError."""
    if name is not None and name not in known:
        raise NotFoundError(f"{name!r} is no {kind}")
    return [*known.values()][default] if name is None else known[name]


async def _calls(run: RunData, rollout: Rollout, facts: TokenFacts, first: int) -> Json:
    """Some calls of the latest attempt of a rollout, with their tokens; where those after them begin, if there are any;
    and how many there are, unless they are still being counted."""
    attempt = await run.store.get_latest_attempt(rollout.rollout_id)
    key = rollout.rollout_id, "" if attempt is None else attempt.attempt_id
    count = 0 if attempt is None else await run.store.count_spans(*key)
    index = await _index(run, attempt, count, SECONDS if not first else None)
    if index is None:
        skip, (spans, more) = 0, await _until_call(run, key, PAGE_OF_CALLS)
    else:
        place, end = (index.calls[n] if n < len(index.calls) else count for n in (first, first + PAGE_OF_CALLS))
        start, earlier = index.start_of(place, 1)
        limit, more = earlier + end - place, end < count
        spans = await run.store.query_spans(*key, after=start, limit=limit) if limit else []
        skip = sum(map(is_call, spans[:earlier]))
    stream = stream_of(spans, facts)[skip:]
    summary, _, _ = await _totals(run, rollout, attempt, index)
    after = first + len(stream) if more else None
    return {"summary": summary, "stream": stream, "next": after, "calls_total": index and len(index.calls)}


async def _until_call(run: RunData, key: Key, calls: int) -> tuple[list[Span], bool]:
    """The first spans, up to the call that follows so many, which is left out; and whether there is one."""
    found: list[Span] = []
    while len(found) < MOST_SPANS_OF_CALLS:
        after = found[-1].span_id if found else None
        chunk = await run.store.query_spans(*key, after=after, limit=SPANS_OF_CALLS)
        found += chunk
        places = [place for place, span in enumerate(found) if is_call(span)]
        if len(places) > calls:
            return found[: places[calls]], True
        if len(chunk) < SPANS_OF_CALLS:
            return found, False
    return found, True


def _facts_json(run: RunData, facts: TokenFacts) -> Json:
    """What tokens may be coloured by: the credit; whether there are ratios, why not, and beyond which of them the run's
    loss clips; whether their texts are known."""
    losses = getattr(run.config and run.config.algorithm, "losses", ())
    clips = next(((each.clip_low, each.clip_high) for each in losses if isinstance(each, PPOLoss)), None)
    credit, known = facts.credit, bool(facts.ratios)
    return {
        "step": facts.step,
        "credit": {"rule": credit.rule, "notes": credit.notes, "known": bool(credit.calls)},
        "ratios": {"known": known, "note": "" if known else NO_RATIOS, "clip": clips},
        "has_texts": facts.texts is not None,
    }


# -- as JSON -----------------------------------------------------------------------------------------------------------


def rollout_json(rollout: Rollout) -> Json:
    """A rollout with the whole text of its task."""
    return {
        **{name: value for name, value in fields_of(rollout).items() if name not in ("input", "metadata")},
        "task": limited(rollout.input),
        "group": group_of(rollout),
        "metadata": limited(rollout.metadata, MOST_VALUE),
    }


def attempt_json(attempt: Attempt) -> Json:
    """An attempt with its error or its output as text."""
    found = fields_of(attempt)
    metadata = cast(Json, found.pop("metadata"))
    known: Any = metadata.get("error")
    fields = ("type", "message", "traceback")
    error = {name: limited(known.get(name) or "") for name in fields} if isinstance(known, dict) else None
    output = limited(metadata["output"]) if "output" in metadata else None
    return {**found, "error": error, "output": output}


PLAIN = ("span_id", "parent_id", "sequence_id", "name", "start_time", "end_time")


def span_json(span: Span) -> Json:
    """A span without token ids and log-probabilities, which the token view has."""
    return {
        **{name: getattr(span, name) for name in PLAIN},
        "status": span.status_code,
        "message": span.status_message,
        "kind": kind_of(span),
        "agent": span.attributes.get(names.AGENT_NAME),
        "reward": get_reward_value(span),
        "counts": counts(span),
        "attributes": _short(span.attributes),
        "events": [{"name": e.name, "timestamp": e.timestamp, "attributes": _short(e.attributes)} for e in span.events],
    }


def _value(name: str, value: Any) -> Any:
    if name in (names.KEPT_SETS, names.TOP_LOGPROBS) and isinstance(value, str):
        return f"[{len(value)} characters of compressed numbers]"
    if name in names.TOKEN_ATTRIBUTES and isinstance(value, list):
        return f"[{len(cast('list[Any]', value))} numbers]"
    return value if isinstance(value, int | float | bool) or value is None else limited(value, MOST_VALUE)


def _short(attributes: Mapping[str, Any]) -> Json:
    return {name: _value(name, value) for name, value in attributes.items()}


# -- the tokens of an attempt, call by call ---------------------------------------------------------------------------
#
# A call's prompt is shown from where it leaves the tokens of the call before it. Of each sampled token there are the
# log-probability it was drawn with, the version of the weights, its advantage and its weight in the loss; where they
# are recorded the ratio of new to old (`run.token_ratios`) and the likeliest tokens (`gateway.record_top_logprobs`).


MOST_PROMPT = 4000
"""Tokens of a prompt that are sent, the last ones."""
MOST_SAMPLED = 40_000
"""Sampled tokens of a rollout that are sent; those of further calls are left out, which the call says."""
Tokens = list[int]


def stream_of(spans: Sequence[Span], facts: TokenFacts) -> list[Json]:
    """The model calls of one attempt, whose `spans` these are, in order, failed ones included, for the page.

    A request repeats the conversation so far. Shown is what it adds to the last call that it continues: one whose
    messages it begins with. A call that continues none starts a thread, and is shown whole. The results of a call's
    tools are in their spans, else in what the next request of its thread adds."""
    rewards = _rewards(spans)
    counted = {span.span_id for span in calls(spans)}
    tools = {step.span_id: step for step in steps(spans) if step.kind == "tool"}
    found: list[Json] = []
    threads: list[_Thread] = []
    before: Tokens = []
    left = MOST_SAMPLED
    for span in sorted(spans, key=lambda span: span.sequence_id):
        if (tool := tools.get(span.span_id)) is not None and found:
            found[-1]["tool_results"].append(_tool_result(tool.error or tool.result, tool))
        if not is_call(span):
            continue
        request, answer = messages_of(span, names.INPUT_MESSAGES), messages_of(span, names.OUTPUT_MESSAGES)
        lines = [_line(message) for message in request]
        thread, said = _continued(threads, lines)
        if thread is None:
            threads.append(thread := _Thread())
        elif not thread.call["tool_results"]:
            thread.call["tool_results"] = [_tool_result(each) for each in tool_results(request[said:])]
        prompt, sampled = _tokens(span, names.PROMPT_TOKEN_IDS), _tokens(span, names.RESPONSE_TOKEN_IDS)
        shown = len(sampled) <= left
        left -= len(sampled) if shown else 0
        known = common_prefix_length(before, prompt)
        attributes = span.attributes
        reasons = attributes.get(names.FINISH_REASONS)
        failed = span.status_code == "ERROR" or names.ERROR_TYPE in attributes
        error = span.status_message or attributes.get(names.ERROR_TYPE) or "error"
        call = {
            **call_facts(span, facts.updates),
            "name": span.name,
            "finish": as_text(reasons[0]) if isinstance(reasons, list) and reasons else None,
            "error": limited(error) if failed else None,
            "drift": attributes.get(names.DRIFT_REASON) if attributes.get(names.DRIFT) else None,
            "starts": not said,
            "messages": [message_json(each) for each in request[said:]],
            "answer": [message_json(each) for each in answer],
            "tool_results": [],
            "counts": span.span_id in counted,
            "reward": rewards.get(span.span_id),
            "known_tokens": known,
            "prompt": _prompt(prompt[known:], facts.texts) if shown and prompt else None,
            "tokens": _sampled(span, sampled, facts) if shown and sampled else None,
            "left_out": not shown,
        }
        found.append(call)
        thread.lines, thread.call = [*lines, *map(_line, answer)], call
        before = [*prompt, *sampled] if prompt else before
    return found


@dataclass(slots=True)
class _Thread:
    lines: list[str] = field(default_factory=list[str])
    """What was said, a line a message, without ids and times."""
    call: Json = field(default_factory=Json)
    """Its last call."""


def _continued(threads: Iterable[_Thread], lines: Sequence[str]) -> tuple[_Thread | None, int]:
    """The thread that a request continues, and how many of its messages are known."""
    best, known = None, 0
    for thread in threads:
        same = common_prefix_length(lines, thread.lines)
        if same > known and same >= len(thread.lines) - 1:  # an answer may come back in another form
            best, known = thread, same
    if best is not None and known < len(best.lines) and known < len(lines):
        known += lines[known].startswith("assistant\0")
    return best, known


def _line(message: Json) -> str:
    parts = [{k: v for k, v in part.items() if k != "id"} for part in parts_of(message)]
    return f"{message.get('role')}\0{orjson.dumps(parts, default=repr, option=orjson.OPT_SORT_KEYS).decode()}"


def _tool_result(result: Any, step: Step | None = None) -> Json:
    failed = (step is not None and step.error is not None) or tells_failure(result)
    return {"name": step and step.name, "text": limited(result), "failed": failed, "span_id": step and step.span_id}


def _rewards(spans: Sequence[Span]) -> Json:
    """The intermediate reward of each call."""
    try:
        return dict(link_rewards(spans).intermediate)
    except RewardError:
        return {}


def _prompt(tokens: Tokens, texts: TokenTexts | None) -> Json:
    shown = tokens[-MOST_PROMPT:]
    return {"ids": shown, "texts": texts and texts.of(shown), "left_out": len(tokens) - len(shown)}


def _sampled(span: Span, sampled: Tokens, facts: TokenFacts) -> Json:
    def fitting(values: Any) -> list[float] | None:
        return values if isinstance(values, list) and len(cast("list[Any]", values)) == len(sampled) else None

    key = span.rollout_id, span.span_id
    advantages, weights = map(fitting, facts.credit.calls.get(key, (None, None)))
    return {
        "ids": sampled,
        "texts": facts.texts and facts.texts.of(sampled),
        "logprobs": fitting(span.attributes.get(names.LOGPROBS)),
        "advantages": advantages,
        "weights": weights,
        "log_ratios": fitting(facts.ratios.get(key)),
        "versions": _versions(span, len(sampled), facts.updates),
        "alternatives": _alternatives(span, len(sampled), facts.texts),
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
    shown = {token: texts and texts.of([token])[0] for row in rows for token, _ in row}
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
