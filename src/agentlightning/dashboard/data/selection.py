"""Which rollouts a table shows: filters, order and pages, at a cost that does not grow with the number of rollouts.

What the store knows (state, mode, id) it filters; everything else is in spans, so that rollouts are read page by page
until a page of matches is full or MOST_SCANNED were read. The page then says so, and where to go on. A whole store is
sorted by what it has in order (creation, state, id); everything else sorts the rollouts of one step or group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast, get_args

from agentlightning.dashboard.data.run_data import RunData
from agentlightning.dashboard.data.summary import RolloutSummary, group_of
from agentlightning.dashboard.data.text import as_text
from agentlightning.dashboard.query import Query
from agentlightning.errors import ConfigError
from agentlightning.rollouts import Rollout, RolloutMode, RolloutStatus

MOST_SCANNED: Final = 3000
"""Rollouts that are read for one page."""
CHUNK: Final = 200
MOST_COUNTED: Final = 100_000
"""Rollouts of a store that are counted one by one where the store does not keep their number."""
MOST_NEWER: Final = 100
"""Newer rollouts that are counted."""
CREATED: Final = "created"
BY_STORE: Final = (CREATED, "status", "rollout_id")
BY_SUMMARY: Final = (
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


@dataclass(frozen=True, slots=True)
class Filters:
    """What a rollout must be like."""

    states: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    id: str | None = None
    """Part of its id."""
    group: str | None = None
    step: int | None = None
    task: str | None = None
    """Part of the text of its task, in any case."""
    by_spans: tuple[Callable[[RolloutSummary], bool], ...] = ()
    """What its spans must say."""

    @classmethod
    def of(cls, query: Query) -> Filters:
        """Raises ConfigError for values that cannot be."""
        states, modes = tuple(query.names("state")), tuple(query.names("mode"))
        for name, given, known in (("state", states, get_args(RolloutStatus)), ("mode", modes, get_args(RolloutMode))):
            if unknown := [each for each in given if each not in known]:
                raise ConfigError(f"{name}={unknown[0]!r} is none of: {', '.join(known)}")
        named, step, task = query.text("group"), query.integer("step", None), query.text("task")
        return cls(states, modes, query.text("id"), named, step, task, tuple(_by_spans(query)))

    @property
    def by_store(self) -> bool:
        """Whether the store alone can tell which rollouts match."""
        return self == Filters(states=self.states, modes=self.modes, id=self.id)

    def admit_rollout(self, rollout: Rollout) -> bool:
        """By what the rollout itself says."""
        return (
            (not self.states or rollout.status in self.states)
            and (not self.modes or rollout.mode in self.modes)
            and (self.id is None or self.id in rollout.rollout_id)
            and (self.group is None or group_of(rollout) == self.group)
            and (self.task is None or self.task.lower() in as_text(rollout.input).lower())
        )

    def admit(self, found: RolloutSummary) -> bool:
        """By what its spans say."""
        return all(admits(found) for admits in self.by_spans)


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


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a table."""

    rows: list[RolloutSummary]
    next: str | None
    """Where the next page begins; None: this is the last one."""
    scanned: int
    """Rollouts that were read for it."""
    total: int | None = None
    """The number of all that match, where the store can count them."""
    whole: bool = False
    """Whether all that match were read, so that they can be sorted by anything."""


async def select(
    run: RunData, filters: Filters, *, sort: str | None, descending: bool, cursor: str | None, limit: int
) -> Page:
    """One page. Raises ConfigError for an order or a cursor that cannot be."""
    if filters.step is not None or (filters.group is not None and await _in_ids(run, filters.group)):
        return await _from_set(run, filters, sort, descending, cursor, limit)
    if sort in BY_SUMMARY:
        raise ConfigError(
            f"sort={sort!r} sorts the rollouts of one step= or group=; a whole store: {', '.join(BY_STORE)}"
        )
    if filters.id is not None and cursor is None and (whole := await run.by_ids([filters.id])):
        rows = [each for each in await run.summaries.of(whole) if filters.admit(each)]
        return Page(rows if filters.admit_rollout(whole[0]) else [], None, 1, None)
    return await _scan(run, filters, None if sort == CREATED else sort, descending, cursor, limit)


async def _in_ids(run: RunData, group: str) -> bool:
    """Whether the ids of rollouts tell their group, as those of training runs do. Other rollouts name it in their
    metadata alone, and are searched page by page. Where the newest ones do so, no id is searched for."""
    newest = await run.store.query_rollouts(newest_first=True, limit=CHUNK)
    if not any(own and each.rollout_id.startswith(_stem(own)) for each in newest if (own := group_of(each))):
        return False
    found = await run.store.query_rollouts(rollout_id_contains=_stem(group), limit=1)
    return bool(found) and found[0].rollout_id.startswith(_stem(group_of(found[0])) or "-")


async def _scan(
    run: RunData, filters: Filters, sort: str | None, descending: bool, cursor: str | None, limit: int
) -> Page:
    rows: list[RolloutSummary] = []
    scanned, wanted = 0, _wanted(run, filters)
    total = await _total(run, filters, wanted) if cursor is None and filters.by_store else None
    size = limit if filters.by_store else CHUNK
    while True:
        offset = 0 if sort is None else _offset(cursor)
        order: dict[str, Any] = (
            {"newest_first": descending, "after": cursor}
            if sort is None
            else {"sort_by": sort, "sort_order": "desc" if descending else "asc", "offset": offset}
        )
        chunk = await run.store.query_rollouts(**wanted, **order, limit=size)
        usable = [each for each in chunk if filters.admit_rollout(each)]
        found = {each.rollout_id: each for each in await run.summaries.of(usable)}
        for place, rollout in enumerate(chunk, 1):
            scanned, cursor = scanned + 1, rollout.rollout_id if sort is None else str(offset + place)
            summary = found.get(rollout.rollout_id)
            if summary is not None and filters.admit(summary):
                rows.append(summary)
            if len(rows) == limit:
                more = place < len(chunk) or len(chunk) == size
                return Page(rows, cursor if more else None, scanned, total)
        if len(chunk) < size:
            return Page(rows, None, scanned, total)
        if scanned >= MOST_SCANNED:
            return Page(rows, cursor, scanned, total)


async def newer_than(run: RunData, filters: Filters, newest: str | None) -> tuple[int, bool]:
    """How many rollouts that match were created after `newest` (None: at all), and whether there may be more. Looks at
    the first MOST_NEWER of them, or the last ones of all."""
    if filters.step is not None:
        return 0, False  # the rollouts of a step are those it was given
    order: dict[str, Any] = {"newest_first": True} if newest is None else {"after": newest}
    found = await run.store.query_rollouts(**_wanted(run, filters), **order, limit=MOST_NEWER + 1)
    usable = [each for each in found[:MOST_NEWER] if filters.admit_rollout(each)]
    if not filters.by_store:
        by_id = {each.rollout_id: each for each in await run.summaries.of(usable)}
        usable = [each for each in usable if filters.admit(by_id[each.rollout_id])]
    return len(usable), len(found) > MOST_NEWER


def _wanted(run: RunData, filters: Filters) -> dict[str, Any]:
    """The filters of the store."""
    return {
        "status_in": cast("Sequence[RolloutStatus]", filters.states) or None,
        "mode_in": cast("Sequence[RolloutMode]", filters.modes) or None,
        "rollout_id_contains": filters.id or run.in_ids,
    }


async def _total(run: RunData, filters: Filters, wanted: Mapping[str, Any]) -> int | None:
    """How many match. None: the store would have to count them one by one, and is too large for that."""
    kept = not filters.modes and wanted["rollout_id_contains"] is None
    if not kept and await run.store.count_rollouts() > MOST_COUNTED:
        return None
    return await run.store.count_rollouts(**wanted)


async def _from_set(
    run: RunData, filters: Filters, sort: str | None, descending: bool, cursor: str | None, limit: int
) -> Page:
    """The rollouts of a step or a group: few enough to read all of them."""
    if filters.step is not None:
        rollouts = await rollouts_of_step(run, filters.step)
    else:
        rollouts = await run.store.query_rollouts(rollout_id_contains=_stem(str(filters.group)), limit=20_000)
    rows = await run.summaries.of([each for each in rollouts if filters.admit_rollout(each)])
    rows = [each for each in rows if filters.admit(each)]
    if sort is not None:
        field = "start_time" if sort == CREATED else sort
        known = [each for each in rows if getattr(each, field) is not None]
        unknown = [each for each in rows if getattr(each, field) is None]
        rows = [*sorted(known, key=lambda each: getattr(each, field), reverse=descending), *unknown]
    offset = _offset(cursor)
    page = rows[offset : offset + limit]
    more = offset + limit < len(rows)
    return Page(page, str(offset + limit) if more else None, len(rollouts), len(rows), whole=True)


def _stem(group: str) -> str:
    """What the ids of a group's rollouts contain: the group without its number, which ids write with zeros."""
    return group.rstrip("0123456789")


def _offset(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not cursor.isdecimal():
        raise ConfigError(f"after={cursor!r} is no position in a sorted list; use the `next` of the page before")
    return int(cursor)


async def rollouts_of_step(run: RunData, step: int) -> list[Rollout]:
    """The rollouts that a step was given, those that failed or were rejected included, by the audit log and their
    groups; without an audit log those that were started for the turn of the step."""
    files, run_id = run.source.run(), run.source.run_id
    learned = files.learned_by(step)
    if learned is None:
        return await run.store.query_rollouts(rollout_id_contains=f"{run_id}-train-{step:06d}")
    known = await run.by_ids(learned)
    groups = {group_of(each) for each in known}
    stems = sorted({group[: group.rfind("-")] for group in groups if group.startswith(f"{run_id}-train-")})
    found = {each.rollout_id: each for each in known}
    for stem in stems[:8]:
        for each in await run.store.query_rollouts(rollout_id_contains=stem):
            alone = stems == [f"{run_id}-train-{step:06d}"]
            if alone or group_of(each) in groups:
                found.setdefault(each.rollout_id, each)
    return list(found.values())
