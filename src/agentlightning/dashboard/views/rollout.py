"""One rollout: its attempts, its spans, its conversation and its tokens; and two rollouts of a group side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, cast

from agentlightning import span as names
from agentlightning.algorithms.lightning_rl import LightningRLConfig
from agentlightning.dashboard.data.credit import BatchCredit
from agentlightning.dashboard.data.run_data import DashboardData, RunData
from agentlightning.dashboard.data.streams import first_difference, stream_of
from agentlightning.dashboard.data.summary import RolloutSummary, group_of, summarize
from agentlightning.dashboard.data.text import as_text, limited
from agentlightning.dashboard.query import Query
from agentlightning.dashboard.views.rollouts import by_version
from agentlightning.errors import NotFoundError
from agentlightning.policy.losses import PPOLoss
from agentlightning.rollouts import Attempt, Rollout
from agentlightning.span import Span, counts
from agentlightning.store.export.schema import encode_item
from agentlightning.tracing.rewards import get_reward_value
from agentlightning.training.persistence.token_ratios import CallRatios

MOST_SPANS: Final = 5000
MOST_VALUE: Final = 20_000
"""Characters of one attribute of a span."""
NO_RATIOS: Final = (
    "no update has recorded the ratios of this rollout: a run records them with run.token_ratios=true,"
    " and only of tokens that it learns from"
)
IN_GROUP: Final = 64
"""Rollouts of a group that are listed."""


async def show_rollout(data: DashboardData, query: Query) -> dict[str, Any]:
    """A rollout with the spans of one attempt: that of `attempt`, else the latest."""
    run = await data.run(query.part("run"))
    rollout = await run.rollout(query.part("rollout"))
    attempts = await run.store.query_attempts(rollout.rollout_id)
    attempt = _chosen(attempts, query.text("attempt"), rollout.rollout_id)
    spans = (
        [] if attempt is None else await run.store.query_spans(rollout.rollout_id, attempt.attempt_id, limit=MOST_SPANS)
    )
    credit, step = await run.credit(rollout)
    latest = attempts[-1] if attempts else None
    return {
        "rollout": rollout_json(rollout),
        "summary": asdict(summarize(rollout, latest, spans if attempt is latest else [], run.weights)),
        "attempts": [attempt_json(each) for each in attempts],
        "attempt": None if attempt is None else attempt.attempt_id,
        "spans": [span_json(span) for span in spans],
        "spans_limit": MOST_SPANS if len(spans) == MOST_SPANS else None,
        "stream": _without_tokens(stream_of(spans, credit, None)),
        "step": step,
        "writable": data.writable,
    }


async def show_tokens(data: DashboardData, query: Query) -> dict[str, Any]:
    """The tokens of a rollout, with log-probability, advantage, weight and version of each."""
    run = await data.run(query.part("run"))
    rollout = await run.rollout(query.part("rollout"))
    credit, step = await run.credit(rollout)
    ratios = await run.ratios(step, [rollout.rollout_id])
    summary, stream = await _stream(run, rollout, credit, ratios)
    return {
        "rollout": rollout_json(rollout),
        "summary": asdict(summary),
        "step": step,
        "credit": _credit_json(credit),
        "ratios": ratios_json(run, ratios),
        "has_texts": run.texts is not None,
        "stream": stream,
    }


async def show_group(data: DashboardData, query: Query) -> dict[str, Any]:
    """The group of a rollout, and two of it side by side: `left` (default: the best) and `right` (the worst)."""
    run = await data.run(query.part("run"))
    rollout = await run.rollout(query.part("rollout"))
    members = await run.group(rollout)
    rows = sorted(await run.summaries.of(members), key=_by_reward)
    chosen = [_member(rows, query.text("left"), 0), _member(rows, query.text("right"), len(rows) - 1)]
    credit, step = await run.credit(rollout)
    by_id = {each.rollout_id: each for each in members}
    ratios = await run.ratios(step, [each.rollout_id for each in chosen])
    sides = [(await _stream(run, by_id[each.rollout_id], credit, ratios))[1] for each in chosen]
    return {
        "group": group_of(rollout),
        "task": limited(as_text(rollout.input)),
        "task_key": rows[0].task_key,
        "step": step,
        "rollouts": [asdict(row) for row in rows[:IN_GROUP]],
        "left_out": max(0, len(rows) - IN_GROUP),
        "left": chosen[0].rollout_id,
        "right": chosen[1].rollout_id,
        "streams": sides,
        "difference": first_difference(*sides) if chosen[0] is not chosen[1] else None,
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


async def _stream(
    run: RunData, rollout: Rollout, credit: BatchCredit, ratios: CallRatios
) -> tuple[RolloutSummary, list[dict[str, Any]]]:
    attempt = await run.store.get_latest_attempt(rollout.rollout_id)
    if attempt is None:
        return summarize(rollout, None, []), []
    spans = await run.store.query_spans(rollout.rollout_id, attempt.attempt_id, limit=MOST_SPANS)
    return summarize(rollout, attempt, spans, run.weights), stream_of(spans, credit, run.texts, ratios)


def _chosen(attempts: Sequence[Attempt], attempt_id: str | None, rollout_id: str) -> Attempt | None:
    if attempt_id is None:
        return attempts[-1] if attempts else None
    for attempt in attempts:
        if attempt.attempt_id == attempt_id:
            return attempt
    raise NotFoundError(f"rollout {rollout_id!r} has no attempt {attempt_id!r}")


def _without_tokens(stream: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for call in stream:
        call["tokens"] = call["prompt"] = None
    return stream


def ratios_json(run: RunData, ratios: CallRatios) -> dict[str, Any]:
    """Whether there are ratios, why not, and beyond which of them the run's loss clips."""
    config = run.config
    losses = config.algorithm.losses if config is not None and isinstance(config.algorithm, LightningRLConfig) else ()
    clips = next(((each.clip_low, each.clip_high) for each in losses if isinstance(each, PPOLoss)), None)
    known = bool(ratios)
    return {"known": known, "note": "" if known else NO_RATIOS, "clip": clips}


def _credit_json(credit: BatchCredit) -> dict[str, Any]:
    return {"rule": credit.rule, "notes": list(credit.notes), "known": bool(credit.calls)}


# -- as JSON -----------------------------------------------------------------------------------------------------------


def rollout_json(rollout: Rollout) -> dict[str, Any]:
    """A rollout with the whole text of its task."""
    return {
        **{name: value for name, value in encode_item(rollout).items() if name not in ("input", "metadata")},
        "task": limited(as_text(rollout.input)),
        "group": group_of(rollout),
        "metadata": limited(as_text(rollout.metadata), MOST_VALUE),
    }


def attempt_json(attempt: Attempt) -> dict[str, Any]:
    """An attempt with its error or its output as text."""
    found = encode_item(attempt)
    metadata = cast("dict[str, Any]", found.pop("metadata"))
    error: Any = metadata.get("error")
    return {
        **found,
        "error": {name: limited(as_text(error.get(name) or "")) for name in ("type", "message", "traceback")}
        if isinstance(error, dict)
        else None,
        "output": limited(as_text(metadata["output"])) if "output" in metadata else None,
    }


def span_json(span: Span) -> dict[str, Any]:
    """A span; token ids and log-probabilities are shown by their number, which the token view has in full."""
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


def kind_of(span: Span) -> str:
    """What a span is, for its colour."""
    operation = span.attributes.get(names.OPERATION_NAME)
    if span.name == names.REWARD:
        return "reward"
    if span.name == names.EXCEPTION or span.status_code == "ERROR":
        return "error"
    if operation == "execute_tool":
        return "tool"
    if names.REQUEST_MODEL in span.attributes or names.INPUT_MESSAGES in span.attributes:
        return "model"
    return "operation"


def _value(name: str, value: Any) -> Any:
    if name in (names.KEPT_SETS, names.TOP_LOGPROBS) and isinstance(value, str):
        return f"[{len(value)} characters of compressed numbers]"
    if name in names.TOKEN_ATTRIBUTES and isinstance(value, list):
        return f"[{len(cast('list[Any]', value))} numbers]"
    return value if isinstance(value, int | float | bool) or value is None else limited(as_text(value), MOST_VALUE)


def _short(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _value(name, value) for name, value in attributes.items()}
