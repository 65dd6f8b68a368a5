"""Rollouts as tables: those that match filters, those of a step by group, of one task by version of weights, failed
ones by cause."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, get_args

from agentlightning.dashboard.data.rollouts import RolloutSummary, as_text, digest_of, group_of, grouped, limited
from agentlightning.dashboard.data.run_data import RunData
from agentlightning.dashboard.query import Query, mark_of
from agentlightning.dashboard.views.runs import mean_of, warnings_of
from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.rollouts import Rollout, RolloutMode, RolloutStatus
from agentlightning.training.health.signs import signs_of
from agentlightning.util.json_values import Json

# -- which rollouts a table shows -------------------------------------------------------------------------------------
#
# What the store knows (state, mode, id) it filters; everything else is in spans, so that rollouts are read page by page
# until a page of matches is full or MOST_SCANNED were read. The page then says so, and where to go on. A whole store is
# sorted by what it has in order (creation, state, id); everything else sorts the rollouts of one step or group.


MOST_SCANNED = 3000
"""Rollouts that are read for one page."""
CHUNK = 200
MOST_COUNTED = 100_000
"""Rollouts of a store that are counted one by one where the store does not keep their number."""
MOST_NEWER = 100
"""Newer rollouts that are counted."""
MOST_ROWS = 500
CREATED = "created"
BY_STORE = (CREATED, "status", "rollout_id")
BY_SUMMARY = (
    "reward_number",
    "seconds",
    "calls",
    "sampled_tokens",
    "prompt_tokens",
    "tool_errors",
    "attempts",
    "end_time",
    "mode",
    "queue",
)
SORTS = (*BY_STORE, *BY_SUMMARY)


class Table:
    """What a table shows: what its rollouts must be like, their order, and where its page begins. Raises ConfigError
    for values that cannot be."""

    def __init__(self, query: Query) -> None:
        self.states = query.names("state", get_args(RolloutStatus))
        self.modes = query.names("mode", get_args(RolloutMode))
        self.id = query.text("id")
        """Part of its id."""
        self.group, self.step = query.text("group"), query.integer("step", None)
        self.task = query.text("task")
        """Part of the text of its task, in any case."""
        self.by_spans = [*_by_spans(query)]
        """What its spans must say."""
        self.sort = query.choice("sort", SORTS)
        self.descending = query.choice("order", ("asc", "desc")) != "asc"
        self.after = query.text("after")
        """The `next` of the page before; None: this is the first one."""
        self.limit = query.integer("limit", 50, 1, MOST_ROWS)

    @property
    def by_store(self) -> bool:
        """Whether the store alone can tell which rollouts match."""
        return not self.by_spans and (self.group, self.step, self.task) == (None, None, None)

    @property
    def offset(self) -> int:
        """Where its page begins in a sorted list. Raises ConfigError."""
        if self.after is not None and not self.after.isdecimal():
            raise ConfigError(f"after={self.after!r} is no place in a sorted list; use the `next` of the page before")
        return int(self.after or 0)

    def wanted(self, run: RunData) -> dict[str, Any]:
        """The filters of the store."""
        contains = self.id or run.in_ids
        return {"status_in": self.states or None, "mode_in": self.modes or None, "rollout_id_contains": contains}

    def admits(self, rollout: Rollout) -> bool:
        """By what the rollout itself says."""
        return (
            (not self.states or rollout.status in self.states)
            and (not self.modes or rollout.mode in self.modes)
            and (self.id is None or self.id in rollout.rollout_id)
            and (self.group is None or group_of(rollout) == self.group)
            and (self.task is None or self.task.lower() in as_text(rollout.input).lower())
        )

    async def admitted(self, run: RunData, rollouts: Iterable[Rollout]) -> list[RolloutSummary]:
        """Those that match, by their spans, too."""
        rows = await run.summaries.of([each for each in rollouts if self.admits(each)])
        return [row for row in rows if all(admits(row) for admits in self.by_spans)]


def _by_spans(query: Query) -> Iterator[Callable[[RolloutSummary], bool]]:
    """The filters that read the spans of a rollout: agent and failure by a part of their name, in any case; of a
    failure, also `any`."""
    if (low := query.number("reward_min")) is not None:
        yield lambda row: row.reward_number is not None and row.reward_number >= low
    if (high := query.number("reward_max")) is not None:
        yield lambda row: row.reward_number is not None and row.reward_number <= high
    if query.choice("reward", ("missing",)):
        yield lambda row: row.reward is None
    if query.choice("tools", ("failed",)):
        yield lambda row: row.tool_errors > 0
    if (version := query.integer("version", None)) is not None:
        yield lambda row: version in row.versions
    if label := query.text("label"):
        yield lambda row: label in row.labels
    if agent := query.text("agent"):
        yield lambda row: any(agent.lower() in each.lower() for each in row.agents)
    if failure := query.text("failure"):
        yield lambda row: _has_failure(row, failure.lower())


def _has_failure(row: RolloutSummary, wanted: str) -> bool:
    failure = f"{row.failure_kind or ''} {row.failure or ''}".strip().lower()
    return bool(failure) if wanted == "any" else wanted in failure


Page = tuple[Sequence[RolloutSummary], str | None, int, int | None]
"""Rows, where the next page begins (None: this is the last one), how many rollouts were read for it, and how many match
(None: the store would have to count them one by one, and is too large for that)."""


async def select(run: RunData, table: Table) -> Json:
    """One page, and by what it may be sorted. Raises ConfigError for an order or a cursor that cannot be."""
    rollouts = None if table.group is None else await run.by_group_name(table.group)
    if table.step is not None:
        rollouts = await rollouts_of_step(run, table.step)
    if rollouts is not None:
        page = await _from_set(run, table, rollouts)
    elif table.sort in BY_SUMMARY:
        raise ConfigError(
            f"sort={table.sort!r} sorts the rollouts of one step= or group=; a whole store: {', '.join(BY_STORE)}"
        )
    elif table.id is not None and table.after is None and (whole := await run.by_ids([table.id])):
        page = await table.admitted(run, whole), None, 1, None
    else:
        page = await _scan(run, table)
    rows, after, scanned, total = page
    sorts = BY_STORE if rollouts is None else SORTS
    return {"rows": rows, "next": after, "scanned": scanned, "total": total, "sorts": sorts}


async def _scan(run: RunData, table: Table) -> Page:
    """The first matches from a place on, in the order of the store."""
    rows: list[RolloutSummary] = []
    scanned, cursor, wanted, more = 0, table.after, table.wanted(run), True
    total = await _total(run, table, wanted) if cursor is None and table.by_store else None
    size = table.limit if table.by_store else CHUNK
    by_creation = table.sort in (None, CREATED)
    while more and len(rows) < table.limit and scanned < MOST_SCANNED:
        order: dict[str, Any] = {"newest_first": table.descending, "after": cursor}
        if not by_creation:
            sort_order = "desc" if table.descending else "asc"
            order = {"sort_by": table.sort, "sort_order": sort_order, "offset": table.offset + scanned}
        chunk = await run.store.query_rollouts(**wanted, **order, limit=size)
        more = len(chunk) == size
        found = {each.rollout_id: each for each in await table.admitted(run, chunk)}
        for number, rollout in enumerate(chunk, 1):
            scanned += 1
            cursor = rollout.rollout_id if by_creation else str(table.offset + scanned)
            if rollout.rollout_id in found:
                rows.append(found[rollout.rollout_id])
            if len(rows) == table.limit:
                more = more or number < len(chunk)
                break
    return rows, cursor if more else None, scanned, total


async def newer_than(run: RunData, table: Table, newest: str | None) -> tuple[int, bool]:
    """How many rollouts that match were created after `newest` (None: at all), and whether there may be more. Looks at
    the first MOST_NEWER of them, or the last ones of all."""
    if table.step is not None:
        return 0, False  # the rollouts of a step are those it was given
    order: dict[str, Any] = {"newest_first": True} if newest is None else {"after": newest}
    found = await run.store.query_rollouts(**table.wanted(run), **order, limit=MOST_NEWER + 1)
    usable = [each for each in found[:MOST_NEWER] if table.admits(each)]
    newer = await table.admitted(run, usable) if table.by_spans else usable
    return len(newer), len(found) > MOST_NEWER


async def _total(run: RunData, table: Table, wanted: Mapping[str, Any]) -> int | None:
    """How many match; None as in `Page`."""
    kept = not table.modes and wanted["rollout_id_contains"] is None
    if not kept and await run.store.count_rollouts() > MOST_COUNTED:
        return None
    return await run.store.count_rollouts(**wanted)


async def _from_set(run: RunData, table: Table, rollouts: Sequence[Rollout]) -> Page:
    """The rollouts of a step or a group: few enough to read all of them."""
    rows = await table.admitted(run, rollouts)
    if table.sort is not None:
        value = attrgetter("start_time" if table.sort == CREATED else table.sort)
        known = sorted((each for each in rows if value(each) is not None), key=value, reverse=table.descending)
        rows = [*known, *(each for each in rows if value(each) is None)]
    end = table.offset + table.limit
    return rows[table.offset : end], str(end) if end < len(rows) else None, len(rollouts), len(rows)


async def rollouts_of_step(run: RunData, step: int) -> list[Rollout]:
    """The rollouts that a step was given, those that failed or were rejected included, by the audit log and their
    groups; without an audit log those that were started for the turn of the step."""
    learned, turns = run.run().learned().get(step), f"{run.run_id}-train-"
    own = f"{turns}{step:06d}"
    if learned is None:
        return await run.store.query_rollouts(rollout_id_contains=own)
    found = {each.rollout_id: each for each in await run.by_ids(learned)}
    groups = {group_of(each) for each in found.values()}
    stems = sorted({group[: group.rfind("-")] for group in groups if group.startswith(turns)})
    for stem in stems[:8]:
        for each in await run.store.query_rollouts(rollout_id_contains=stem):
            if stems == [own] or group_of(each) in groups:
                found.setdefault(each.rollout_id, each)
    return list(found.values())


# -- tables -----------------------------------------------------------------------------------------------------------


MOST_OF_TASK = 20_000
"""Rollouts that are looked through for those of one task, the newest."""
PAGE_OF_TASK = 1000


async def list_rollouts(run: RunData, query: Query) -> Json:
    """A page of the rollouts that match the filters."""
    return await select(run, Table(query)) | {"writable": run.writable}


async def show_changes(run: RunData, query: Query) -> Json:
    """What is different for a table of rollouts: its `rows` as they are now, without the spans of those that run; and
    with `count`, how many that match its filters are newer than its first one, `newest`. With the `mark` of an earlier
    answer, whether anything in the store is different now."""
    statistics = await run.store.statistics()
    mark = mark_of(sorted(statistics.items()))
    if query.text("mark") == mark:
        return {"mark": mark, "unchanged": True}
    rows = await run.summaries.of(await run.by_ids(query.names("rows")[:MOST_ROWS]), open_spans=False)
    newer, more = await newer_than(run, Table(query), query.text("newest")) if query.text("count") else (0, False)
    return {"mark": mark, "rows": rows, "newer": newer, "more": more}


async def show_step(run: RunData, query: Query) -> Json:
    """A step: its metrics, the warnings of it, and its groups, those with the largest spread of rewards first."""
    step = query.integer("step", 0)
    files = run.run()
    metrics = files.metrics()
    line = next((row for row in metrics if row.get("step") == step), None)
    if line is None:
        last = metrics[-1]["step"] if metrics else 0
        raise NotFoundError(f"step {step} is not finished; the last one of {run.name} is {last}")
    rows = await run.summaries.of(await rollouts_of_step(run, step))
    learned = files.learned().get(step)
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


def _holds(sign: Mapping[str, Any], step: int) -> bool:
    since, until = sign["since"], sign["until"]
    return since is not None and since <= step <= (since if until is None else until)


def groups_of(rows: Sequence[RolloutSummary]) -> list[Json]:
    """The groups among rollouts, those with the largest spread of rewards first."""
    groups = grouped(rows, lambda row: row.group or row.task_key or row.rollout_id)
    found = [_group(name, members) for name, members in groups.items()]
    return sorted(found, key=lambda each: (-(each["spread"] or 0.0), each["group"]))


def _group(name: str, members: Sequence[RolloutSummary]) -> Json:
    rewards = [each.reward_number for each in members]
    known = [(reward, each.rollout_id) for each in members if (reward := each.reward_number) is not None]
    known.sort(key=itemgetter(0))
    return {
        "group": name,
        "task": members[0].task,
        "rollouts": len(members),
        "rewards": rewards,
        "reward": mean_of(members),
        "spread": statistics.pstdev(reward for reward, _ in known) if len(known) > 1 else None,
        "best": known[-1][1] if known else None,
        "first": members[0].rollout_id,
        "worst": known[0][1] if known else members[0].rollout_id,
        "failed": sum(each.status == "failed" for each in members),
        "tool_errors": sum(each.tool_errors for each in members),
        "versions": sorted({version for each in members for version in each.versions}),
    }


async def show_task(run: RunData, query: Query) -> Json:
    """One task across the versions of the weights: the reward of its rollouts by version, each with its interval."""
    key, found, after = query["task"], list[Rollout](), None
    scanned, complete = 0, False
    newest = partial(run.store.query_rollouts, rollout_id_contains=run.in_ids, newest_first=True, limit=PAGE_OF_TASK)
    while scanned < MOST_OF_TASK and not complete:  # in parts: all of their tasks may be more than the memory holds
        chunk = await newest(after=after)
        keys = await asyncio.to_thread(list, map(digest_of, [each.input for each in chunk]))
        found += [each for each, own in zip(chunk, keys, strict=True) if own == key]
        scanned, complete = scanned + len(chunk), len(chunk) < PAGE_OF_TASK
        after = chunk[-1].rollout_id if chunk else None
    if not found:
        raise NotFoundError(f"no rollout of task {key} among the {scanned} newest of {run.name}")
    rows = await run.summaries.of(found[::-1])
    return {
        "task_key": key,
        "task": limited(found[-1].input),
        "scanned": scanned,
        "complete": complete,
        "versions": by_version(rows),
        "rollouts": rows,
    }


def by_version(rows: Iterable[RolloutSummary]) -> list[Json]:
    """The rollouts by (version of the weights, mode), with the interval of their mean reward."""
    found = grouped(rows, lambda row: (max(row.versions, default=-1), row.mode or ""))
    return [
        {
            "version": None if version < 0 else version,
            "mode": mode or None,
            "reward": mean_of(own),
            "rewards": [each.reward_number for each in own],
            "rollouts": [each.rollout_id for each in own],
        }
        for (version, mode), own in sorted(found.items())
    ]


# -- the server -------------------------------------------------------------------------------------------------------


MOST_FAILED = 1000
"""Failed rollouts that are read, the newest."""


async def show_server(run: RunData, query: Query) -> Json:
    """Counts of the store, what is running, queues, workers, and the calls that ended last."""
    return await run.live(run.in_ids)


async def list_failures(run: RunData, query: Query) -> Json:
    """The causes, the most frequent first: how often, a message, the newest rollout, the agents."""
    failed = await run.store.query_rollouts(
        status_in=["failed"], rollout_id_contains=run.in_ids, newest_first=True, limit=MOST_FAILED
    )
    causes = grouped(await run.summaries.of(failed), lambda row: row.failure_kind or "").items()
    rows = [
        {
            "cause": kind or None,
            "count": len(own),
            "message": own[0].failure,
            "messages": len({row.failure for row in own}),
            "newest": own[0].rollout_id,
            "newest_time": own[0].end_time,
            "oldest_time": own[-1].end_time,
            "modes": sorted({row.mode for row in own if row.mode}),
            "agents": sorted({agent for row in own for agent in row.agents}),
        }
        for kind, own in sorted(causes, key=lambda each: -len(each[1]))
    ]
    return {"causes": rows, "read": len(failed), "all": len(failed) < MOST_FAILED}
