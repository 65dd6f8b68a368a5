"""What an attempt holds, however many spans it has: their ids in order, its model calls, and what sums it up.

A page shows some hundreds of spans; its totals are those of all. They are read once, without tokens, in chunks and in
the background, and later only what was added. The number of spans, which the store keeps, says whether that is needed.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from agentlightning import span as names
from agentlightning.assemble.model_calls import is_call
from agentlightning.dashboard.data.summary import RolloutSummary, summarize
from agentlightning.rollouts import Attempt, Rollout
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.trajectory import RewardWeights

CHUNK: Final = 10_000
"""Spans that are read at once."""
BUCKETS: Final = 100
REMEMBERED: Final = 8
MOST_REMEMBERED: Final = 300_000
"""Attempts whose index is kept, and spans of all of them; that of the last one is kept however large it is."""
REST: Final = 20
"""Totals of an attempt that grows are computed again after so many times the time that they took."""
CONTEXT_SPANS: Final = 500
"""Spans before a page that are read again at most, so that its calls are shown as what they continue."""
LARGE: Final = frozenset({names.INPUT_MESSAGES, names.OUTPUT_MESSAGES, names.TOP_LOGPROBS, names.KEPT_SETS})
"""Attributes of calls that totals do not need."""
Key = tuple[str, str]
"""(rollout_id, attempt_id)"""


def kind_of(span: Span) -> str:
    """What a span is, for its colour: model, tool, reward, error or operation."""
    if span.name == names.REWARD:
        return "reward"
    if span.name == names.EXCEPTION or span.status_code == "ERROR":
        return "error"
    if span.attributes.get(names.OPERATION_NAME) == "execute_tool":
        return "tool"
    if names.REQUEST_MODEL in span.attributes or names.INPUT_MESSAGES in span.attributes:
        return "model"
    return "operation"


class Start(NamedTuple):
    """Where a page is read from: some spans before it belong to calls that it continues."""

    after: str | None
    """The span to read after; None: from the first one."""
    context: int
    """Spans from there to the first one of the page."""


@dataclass(slots=True)
class AttemptIndex:
    """The index of one attempt."""

    ids: list[str] = field(default_factory=list[str])
    """Of its spans, in order."""
    calls: list[int] = field(default_factory=list[int])
    """Places of the model calls among them, failed ones included."""
    kinds: Counter[str] = field(default_factory=Counter[str])
    start: float | None = None
    end: float | None = None
    starts: array[float] = field(default_factory=lambda: array("d"))
    kept: list[Span] = field(default_factory=list[Span])
    """The spans that a summary is made of: calls without their messages, tools, rewards, feedback."""
    _totals: tuple[Any, RolloutSummary, list[int]] | None = None
    """What was computed of them last, after what it depends on."""
    _totals_until: float = 0.0
    _longest: tuple[int, int] = -1, -1
    """The call with the longest request, which keeps its messages: its place in `kept`, its length."""

    def add(self, spans: Sequence[Span]) -> None:
        """Add the spans that follow."""
        for span in spans:
            self.kinds[kind_of(span)] += 1
            end = span.start_time if span.end_time is None else span.end_time
            self.start = span.start_time if self.start is None else min(self.start, span.start_time)
            self.end = end if self.end is None else max(self.end, end)
            if is_call(span):
                self.calls.append(len(self.ids))
                self._keep_call(span)
            elif _counts_in_summary(span):
                self.kept.append(span)
            self.ids.append(span.span_id)
            self.starts.append(span.start_time)

    def _keep_call(self, span: Span) -> None:
        request = span.attributes.get(names.INPUT_MESSAGES)
        size = len(request) if isinstance(request, str) else 0
        place, longest = self._longest
        if size > longest:
            if place >= 0:
                self.kept[place] = _without_messages(self.kept[place])
            self._longest = len(self.kept), size
            self.kept.append(span)
        else:
            self.kept.append(_without_messages(span))

    async def totals(
        self, rollout: Rollout, attempt: Attempt | None, weights: RewardWeights
    ) -> tuple[RolloutSummary, list[int], bool]:
        """The summary of the attempt, how many of its spans start in each of BUCKETS equal parts of its time, and
        whether both are up to date: while spans are added, they take at most a share of the time."""
        state = rollout.status, rollout.end_time, attempt and (attempt.status, attempt.end_time)
        known, began = self._totals, time.monotonic()
        if known is not None and known[0] == (state, len(self.ids)):
            return known[1], known[2], True
        if known is not None and known[0][0] == state and began < self._totals_until:
            return known[1], known[2], False
        count = len(self.ids)
        summary, density = await asyncio.to_thread(
            lambda: (summarize(rollout, attempt, list(self.kept), weights), self._density())
        )
        self._totals = (state, count), summary, density
        self._totals_until = time.monotonic() + REST * (time.monotonic() - began)
        return summary, density, True

    def _density(self) -> list[int]:
        low, high = self.start or 0.0, self.end or 0.0
        scale = (BUCKETS - 1e-9) / (high - low) if high > low else 0.0
        found = Counter(int((each - low) * scale) for each in tuple(self.starts))
        return [found[bucket] for bucket in range(BUCKETS)]

    def calls_before(self, place: int) -> int:
        """The number of calls before a place."""
        return bisect_left(self.calls, place)

    def start_of(self, place: int, context: int) -> Start:
        """Where to read a page from that begins at a place, with up to `context` calls before it."""
        number = self.calls_before(place)
        first = self.calls[max(0, number - context)] if number else place
        first = max(first, place - CONTEXT_SPANS)
        return Start(self.ids[first - 1] if first else None, place - first)


def _counts_in_summary(span: Span) -> bool:
    attributes = span.attributes
    return (
        span.name == names.REWARD
        or names.FEEDBACK_LABEL in attributes
        or attributes.get(names.OPERATION_NAME) == "execute_tool"
    )


def _without_messages(span: Span) -> Span:
    return replace(span, attributes={name: value for name, value in span.attributes.items() if name not in LARGE})


class AttemptIndexes:
    """Reads indexes of the attempts of a store, and remembers the last ones."""

    def __init__(self, store: LightningStoreBase) -> None:
        self._store = store
        self._known: OrderedDict[Key, AttemptIndex] = OrderedDict()
        self._tasks: dict[Key, asyncio.Task[AttemptIndex]] = {}

    async def of(self, key: Key, count: int, seconds: float | None = None) -> AttemptIndex | None:
        """The index of an attempt that has `count` spans. None: it is not complete after `seconds`, and is read on
        meanwhile."""
        known = self._known.get(key)
        if known is not None and len(known.ids) == count:
            self._known.move_to_end(key)
            return known
        earlier = self._tasks.get(key)
        task = earlier or asyncio.create_task(self._read(key, count))
        if earlier is None:
            self._tasks[key] = task
            task.add_done_callback(lambda done: self._end(key, done))
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done:
            return None
        index = task.result()
        if earlier is not None and len(index.ids) < count:  # it began before the last spans were stored
            return await self.of(key, count, seconds)
        return index

    def _end(self, key: Key, task: asyncio.Task[AttemptIndex]) -> None:
        self._tasks.pop(key, None)
        if task.cancelled() or task.exception() is not None:
            return  # whoever waits for it has the error
        self._known[key] = task.result()
        while len(self._known) > REMEMBERED or (len(self._known) > 1 and self._size() > MOST_REMEMBERED):
            self._known.popitem(last=False)

    def _size(self) -> int:
        return sum(len(each.ids) for each in self._known.values())

    async def _read(self, key: Key, count: int) -> AttemptIndex:
        index = self._known.get(key)
        if index is not None and index.ids and len(index.ids) < count:
            await self._extend(index, key)
            if len(index.ids) >= count:
                return index
        index = AttemptIndex()  # the first time, or where a span was stored between others
        await self._extend(index, key)
        return index

    async def _extend(self, index: AttemptIndex, key: Key) -> None:
        while True:
            after = index.ids[-1] if index.ids else None
            spans = await self._store.query_spans(*key, after=after, limit=CHUNK, tokens=False)
            await asyncio.to_thread(index.add, spans)  # the gateway of the same server is not to wait
            if len(spans) < CHUNK:
                return

    async def close(self) -> None:
        """Stop reading."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
