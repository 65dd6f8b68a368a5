"""One rollout: its attempts, its spans, its conversation and its tokens; and two rollouts of a group side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

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
from agentlightning.dashboard.data.run_data import RunData, TokenFacts
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
from agentlightning.util.json_values import Json, is_list, is_table

T = TypeVar("T")
PAGE_OF_SPANS = 300
MOST_SPANS = 1000
"""Spans of one page, unless asked for otherwise, and at most."""
PAGE_OF_CALLS = 20
"""Calls whose tokens are shown at once."""
FIRST_SPANS = 2000
"""Spans that are looked through for the first calls of an attempt that is still being read; there may then be fewer."""
CONTEXT = 10
"""Calls before a page that its first ones may continue."""
SECONDS = 0.1
"""How long a page waits for the totals of its attempt; where they take longer, it asks again."""
CHANGING = ("span_id", "counts", "reward", "error", "tool_results")
"""What may have changed of calls before a page."""
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
    key = rollout.rollout_id, "latest" if own is None else own.attempt_id
    count = await run.store.count_spans(*key)
    states = [(each.attempt_id, each.status, each.end_time) for each in attempts]
    mark = mark_of(rollout.status, rollout.end_time, states, own and own.attempt_id, count)
    known = query.text("mark")
    index = None if known == mark else await run.attempts.of(key, count, SECONDS)
    if index is None and known in (mark, f"{mark}-counting"):
        return {"mark": known, "unchanged": True}
    summary, density, is_current = await _totals(run, rollout, own, index)
    start, limit = query.integer("start", 0), query.integer("limit", PAGE_OF_SPANS, 0, MOST_SPANS)
    whole = await run.attempts.of(key, count) if start else index
    spans, stream, before = await _read(run, key, whole, start, limit)
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
        "context": [{name: call[name] for name in CHANGING} for call in before],
        "step": await run.step_of(rollout),
        "writable": run.writable,
    }


async def _read(
    run: RunData, key: Key, index: AttemptIndex | None, start: int, limit: int, facts: TokenFacts | None = None
) -> tuple[list[Span], list[Json], list[Json]]:
    """Some spans of an attempt, their model calls, and the calls before them that they may continue: CONTEXT of them;
    with `facts`, which is with their tokens, the last one. `index`: None where the spans are the first ones."""
    after, earlier = (None, 0) if index is None else index.start_of(start, 1 if facts else CONTEXT)
    found = await run.store.query_spans(*key, after=after, limit=earlier + limit, tokens=facts is not None)
    stream = stream_of(found, facts or TokenFacts(run.updates), after is None)
    before = sum(map(is_call, found[:earlier]))
    return found[earlier:], stream[before:], stream[:before]


async def _totals(
    run: RunData, rollout: Rollout, attempt: Attempt | None, index: AttemptIndex | None
) -> tuple[RolloutSummary, list[int] | None, bool]:
    """Those of an attempt, and whether they are up to date; where its spans are still being read, without what they
    say."""
    if index is None:
        return RolloutSummary(rollout, attempt, None), None, False
    summary, density, is_current = await index.totals(rollout, attempt, run.weights)
    return summary.counted(run.updates), density, is_current


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
    key = rollout.rollout_id, "latest" if attempt is None else attempt.attempt_id
    count = await run.store.count_spans(*key)
    whole = index = await run.attempts.of(key, count, None if first else SECONDS)
    if index is None:  # the first calls are among the first spans
        index = AttemptIndex().add(await run.store.query_spans(*key, limit=FIRST_SPANS, tokens=False))
    start, end = (index.calls[n] if n < len(index.calls) else len(index.ids) for n in (first, first + PAGE_OF_CALLS))
    _, stream, _ = await _read(run, key, index, start, end - start, facts)
    summary, _, _ = await _totals(run, rollout, attempt, whole)
    after = first + len(stream) if end < count else None
    return {"summary": summary, "stream": stream, "next": after, "calls_total": whole and len(whole.calls)}


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
    found, metadata = fields_of(attempt), attempt.metadata
    del found["metadata"]
    known, fields = metadata.get("error"), ("type", "message", "traceback")
    error = {name: limited(known.get(name) or "") for name in fields} if is_table(known) else None
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
    if name in names.TOKEN_ATTRIBUTES and is_list(value):
        return f"[{len(value)} numbers]"
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


def stream_of(spans: Sequence[Span], facts: TokenFacts, whole: bool) -> list[Json]:
    """The model calls of one attempt, whose `spans` these are, in order, failed ones included, for the page.

    A request repeats the conversation so far. Shown is what it adds to the last call that it continues: one whose
    messages it begins with. A call that continues none starts a thread, and is shown whole; of spans that are not the
    first ones, which are `whole`, this is not known. The results of a call's tools are in their spans, else in what the
    next request of its thread adds."""
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
            "finish": as_text(reasons[0]) if is_list(reasons) and reasons else None,
            "error": limited(error) if failed else None,
            "drift": attributes.get(names.DRIFT_REASON) if attributes.get(names.DRIFT) else None,
            "starts": whole and not said,
            "messages": [message_json(each) for each in request[said:]],
            "answer": [message_json(each) for each in answer],
            "tool_results": [],
            "counts": span.span_id in counted,
            "reward": rewards.get(span.span_id),
            "known_tokens": known,
            "prompt": _prompt(prompt[known:], facts) if shown and prompt else None,
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


def _prompt(tokens: Tokens, facts: TokenFacts) -> Json:
    shown = tokens[-MOST_PROMPT:]
    return {
        "ids": shown,
        "texts": None if facts.texts is None else [*map(facts.text, shown)],
        "left_out": len(tokens) - len(shown),
    }


def _sampled(span: Span, sampled: Tokens, facts: TokenFacts) -> Json:
    def fitting(values: Any) -> list[float] | None:
        return values if is_list(values) and len(values) == len(sampled) else None

    key = span.rollout_id, span.span_id
    advantages, weights = map(fitting, facts.credit.calls.get(key, (None, None)))
    return {
        "ids": sampled,
        "texts": None if facts.texts is None else [*map(facts.text, sampled)],
        "logprobs": fitting(span.attributes.get(names.LOGPROBS)),
        "advantages": advantages,
        "weights": weights,
        "log_ratios": fitting(facts.ratios.get(key)),
        "versions": _versions(span, len(sampled), facts.updates),
        "alternatives": _alternatives(span, len(sampled), facts),
    }


def _alternatives(span: Span, count: int, facts: TokenFacts) -> list[list[tuple[int, str | None, float]]] | None:
    """For each token the likeliest ones at its place, as (id, text, log-probability); None where none are recorded."""
    recorded = span.attributes.get(names.TOP_LOGPROBS)
    if not isinstance(recorded, str):
        return None
    try:
        rows = likeliest_from_text(recorded, count)
    except ValueError:  # written by something else; the span shows what
        return None
    return [[(token, facts.text(token), value) for token, value in row] for row in rows]


def _versions(span: Span, count: int, updates: Updates) -> list[int] | None:
    """The version of the weights that sampled each token; None where it is not known."""
    runs = span.attributes.get(names.POLICY_VERSIONS)
    if is_list(runs) and all(isinstance(each, int) for each in runs):
        found = [updates(v) for v, n in zip(runs[::2], runs[1::2], strict=False) for _ in range(min(n, count))]
        if len(found) == count:
            return found
    version = version_of(span, updates)
    return None if version is None else [version] * count


def _tokens(span: Span, attribute: str) -> Tokens:
    value = span.attributes.get(attribute)
    return value if is_list(value) else []


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
