"""Rollouts as tables: those that match filters, those of a step by group, those of one task by version of weights."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from agentlightning.dashboard.data.catalog import Catalog
from agentlightning.dashboard.data.run_data import RunData
from agentlightning.dashboard.data.selection import (
    BY_STORE,
    BY_SUMMARY,
    Filters,
    newer_than,
    rollouts_of_step,
    select,
)
from agentlightning.dashboard.data.summary import RolloutSummary
from agentlightning.dashboard.data.text import as_text, limited
from agentlightning.dashboard.query import Query, mark_of
from agentlightning.dashboard.views.runs import measured, warnings_of
from agentlightning.errors import NotFoundError
from agentlightning.task import task_key
from agentlightning.training.health.signs import signs_of
from agentlightning.util.json_values import Json

MOST_ROWS: Final = 500
MOST_OF_TASK: Final = 20_000
"""Rollouts that are looked through for those of one task, the newest."""
PAGE: Final = 1000


async def list_rollouts(data: Catalog, query: Query) -> Json:
    """A page of the rollouts that match the filters."""
    run = await data.run(query.part("run"))
    page = await select(
        run,
        Filters.of(query),
        sort=query.choice("sort", (*BY_STORE, *BY_SUMMARY)),
        descending=query.choice("order", ("asc", "desc"), "desc") == "desc",
        cursor=query.text("after"),
        limit=query.integer("limit", 50, 1, MOST_ROWS),
    )
    return {
        "rows": [asdict(row) for row in page.rows],
        "next": page.next,
        "scanned": page.scanned,
        "total": page.total,
        "sorts": [*BY_STORE, *BY_SUMMARY] if page.whole else BY_STORE,
        "writable": data.writable,
    }


async def show_changes(data: Catalog, query: Query) -> Json:
    """What is different for a table of rollouts: its `rows` as they are now, without the spans of those that run; and
    with `count`, how many that match its filters are newer than its first one, `newest`. With the `mark` of an earlier
    answer, whether anything in the store is different now."""
    run = await data.run(query.part("run"))
    statistics = await run.store.statistics()
    mark = mark_of(sorted(statistics.items()))
    if query.text("mark") == mark:
        return {"mark": mark, "unchanged": True}
    rows = await run.summaries.of(await run.by_ids(query.names("rows")[:MOST_ROWS]), open_spans=False)
    counted = query.text("count") is not None
    newer, more = await newer_than(run, Filters.of(query), query.text("newest")) if counted else (0, False)
    return {"mark": mark, "rows": [asdict(row) for row in rows], "newer": newer, "more": more}


async def show_step(data: Catalog, query: Query) -> Json:
    """A step: its metrics, the warnings of it, and its groups, those with the largest spread of rewards first."""
    run = await data.run(query.part("run"))
    step = _step(query)
    files = run.source.run()
    metrics = files.metrics()
    line = next((row for row in metrics if row.get("step") == step), None)
    if line is None:
        last = metrics[-1]["step"] if metrics else 0
        raise NotFoundError(f"step {step} is not finished; the last one of {run.name} is {last}")
    rows = await run.summaries.of(await rollouts_of_step(run, step))
    learned = files.learned_by(step)
    words = {sign.name: asdict(sign) for sign in signs_of([each for each in files.records() if each.step <= step])}
    signs = [each | words.get(each["name"], {}) for each in warnings_of(files, files.state()) if _holds(each, step)]
    return {
        "step": step,
        "last": metrics[-1]["step"],
        "metrics": line,
        "warnings": signs,
        "groups": groups_of(rows),
        "rollouts": len(rows),
        "learned": None if learned is None else len(learned),
        "versions": sorted({version for row in rows for version in row.versions}),
    }


def _step(query: Query) -> int:
    text = query.part("step")
    if not text.isdecimal():
        raise NotFoundError(f"step {text!r} is no number")
    return int(text)


def _holds(sign: Mapping[str, Any], step: int) -> bool:
    since, until = sign["since"], sign["until"]
    return since is not None and since <= step <= (since if until is None else until)


def groups_of(rows: Sequence[RolloutSummary]) -> list[Json]:
    """The groups among rollouts, those with the largest spread of rewards first."""
    groups: dict[str, list[RolloutSummary]] = {}
    for row in rows:
        groups.setdefault(row.group or row.task_key or row.rollout_id, []).append(row)
    found = [_group(name, members) for name, members in groups.items()]
    return sorted(found, key=lambda each: (-(each["spread"] or 0.0), each["group"]))


def _group(name: str, members: Sequence[RolloutSummary]) -> Json:
    known = sorted((each for each in members if each.reward_number is not None), key=_number)
    rewards = [each.reward_number for each in members]
    return {
        "group": name,
        "task": members[0].task,
        "rollouts": len(members),
        "rewards": rewards,
        "reward": measured(rewards),
        "spread": statistics.pstdev(map(_number, known)) if len(known) > 1 else None,
        "best": known[-1].rollout_id if known else None,
        "worst": known[0].rollout_id if known else members[0].rollout_id,
        "first": members[0].rollout_id,
        "failed": sum(each.status == "failed" for each in members),
        "tool_errors": sum(each.tool_errors for each in members),
        "versions": sorted({version for each in members for version in each.versions}),
    }


def _number(row: RolloutSummary) -> float:
    return row.reward_number or 0.0


async def show_task(data: Catalog, query: Query) -> Json:
    """One task across the versions of the weights: the reward of its rollouts by version, each with its interval."""
    run = await data.run(query.part("run"))
    key = query.part("task")
    rollouts, scanned, complete = await _of_task(run, key)
    if not rollouts:
        raise NotFoundError(f"no rollout of task {key} among the {scanned} newest of {run.name}")
    rows = await run.summaries.of(rollouts)
    return {
        "task_key": key,
        "task": limited(as_text(rollouts[0].input)),
        "scanned": scanned,
        "complete": complete,
        "versions": by_version(rows),
        "rollouts": [asdict(row) for row in rows],
    }


def by_version(rows: Iterable[RolloutSummary]) -> list[Json]:
    """The rollouts by (version of the weights, mode), with the interval of their mean reward."""
    found: dict[tuple[int, str], list[RolloutSummary]] = {}
    for row in rows:
        version = max(row.versions, default=-1)
        found.setdefault((version, row.mode or ""), []).append(row)
    return [
        {
            "version": None if version < 0 else version,
            "mode": mode or None,
            "reward": measured([each.reward_number for each in own]),
            "rewards": [each.reward_number for each in own],
            "rollouts": [each.rollout_id for each in own],
        }
        for (version, mode), own in sorted(found.items())
    ]


async def _of_task(run: RunData, key: str) -> tuple[list[Any], int, bool]:
    """The rollouts of a task among the newest, oldest first; how many were read, and whether those are all."""
    found: list[Any] = []
    after: str | None = None
    scanned = 0
    while scanned < MOST_OF_TASK:
        chunk = await run.store.query_rollouts(
            rollout_id_contains=run.in_ids, newest_first=True, after=after, limit=PAGE
        )
        found += [each for each in chunk if task_key(each.input) == key]
        scanned += len(chunk)
        if len(chunk) < PAGE:
            return found[::-1], scanned, True
        after = chunk[-1].rollout_id
    return found[::-1], scanned, False
