"""Finds the attempt that each span of an OTLP request belongs to, and stores traces of programs that name no rollout as
rollouts of their own.

The attempt is, in this order: the one whose key the request carries; that of the ids among the span's own attributes;
of those among the attributes of its resource; the attempt from which its trace id was made; that of another span of its
trace.

Each unknown trace becomes one rollout with one attempt, in the queue `traces`. Both ids follow from the trace id, so
that a repeated request, another server on the same database, and this one after a restart use the same rollout. The
status of the root span decides whether the attempt succeeded or failed; spans that arrive later still belong to it. A
trace whose root span never arrives (because it began elsewhere, say) succeeds after `idle_seconds` without spans.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

from agentlightning import span as names
from agentlightning.attempt_address import attempt_of_trace
from agentlightning.errors import ConflictError, NotFoundError, StoreError
from agentlightning.rollouts import FINISHED, AttemptStatus
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.ids import claimed_id
from agentlightning.store.types import UNSET
from agentlightning.util.shared_cache import open_cache

logger = logging.getLogger(__name__)

CACHED: Final = 16384
"""Attempts whose rollout is cached."""
TRACES: Final = 65536
"""Traces whose attempt is kept, the latest."""
ROLLOUT_IDS: Final = ("agentlightning.rollout_id", "agl.rollout_id")
ATTEMPT_IDS: Final = ("agentlightning.attempt_id", "agl.attempt_id")

AttemptIds = tuple[str, str]
"""(rollout_id, attempt_id)."""
NamedIds = tuple[str | None, str | None]
"""The (rollout_id, attempt_id) that attributes name."""
UNNAMED: Final[NamedIds] = (None, None)


class TraceOwners:
    """The attempts of the latest traces that are not an attempt's own, in memory or in a folder that several processes
    share."""

    def __init__(self, shared: Path | None = None) -> None:
        schema = (
            "CREATE TABLE IF NOT EXISTS owners (number INTEGER PRIMARY KEY, trace_id TEXT, by_token INTEGER,"
            " rollout_id TEXT, attempt_id TEXT, UNIQUE (trace_id, by_token))"
        )
        self._run = open_cache(shared, "traces.db", schema).execute

    def find(self, trace_id: str) -> AttemptIds | None:
        """The attempt of a trace. What holders of the access token sent takes precedence over claims of attempts."""
        query = (
            "SELECT rollout_id, attempt_id FROM owners WHERE trace_id = ? AND rollout_id > '' ORDER BY by_token DESC"
        )
        return self._run(query, (trace_id,)).fetchone()

    def note(self, trace_id: str, ids: AttemptIds, *, by_token: bool) -> None:
        """Note that an attempt has made a model call or sent spans in a trace, by its key; or that a holder of the
        access token said so. If several attempts claim a trace, it belongs to none of them."""
        columns, noted = "trace_id, by_token, rollout_id, attempt_id", (trace_id, by_token, *ids)
        if self._run(f"SELECT 1 FROM owners WHERE ({columns}) = (?, ?, ?, ?)", noted).fetchone():
            return
        changed = "excluded.rollout_id, excluded.attempt_id" if by_token else "NULL, NULL"
        change = f"ON CONFLICT DO UPDATE SET (rollout_id, attempt_id) = ({changed})"
        self._run(f"INSERT INTO owners ({columns}) VALUES (?, ?, ?, ?) {change}", noted)
        self._run("DELETE FROM owners WHERE number <= last_insert_rowid() - ?", (TRACES,))


@dataclass(slots=True)
class AttemptResolver:
    """Finds the attempts of spans, and caches those of the latest traces."""

    store: LightningStoreBase
    owners: TraceOwners
    attempts: OrderedDict[str, AttemptIds] = field(default_factory=OrderedDict[str, AttemptIds])

    async def resolve(
        self, spans: Sequence[Span], caller: AttemptIds | None, rejected: Counter[str]
    ) -> tuple[list[tuple[AttemptIds, Span]], list[Span]]:
        """(spans with their attempts, in order, spans without one). Counts spans that must be rejected in `rejected`,
        by reason."""
        named = await self._by_name(spans, caller)
        traces = {span.trace_id: ids for span, ids in named if isinstance(ids, tuple)}
        unnamed = {span.trace_id for span, ids in named if ids is None} - traces.keys()
        by_trace = traces | {trace_id: await self.by_trace(trace_id) for trace_id in unnamed}
        attributed: list[tuple[AttemptIds, Span]] = []
        unattributed: list[Span] = []
        for span, ids in named:
            ids = by_trace[span.trace_id] if ids is None else ids
            if isinstance(ids, tuple):
                attributed.append((ids, span))
            elif ids is None:
                unattributed.append(span)
            else:
                rejected[ids] += 1
        for trace_id, ids in traces.items():
            self.owners.note(trace_id, ids, by_token=caller is None)
        return attributed, unattributed

    async def _by_name(
        self, spans: Sequence[Span], caller: AttemptIds | None
    ) -> list[tuple[Span, AttemptIds | str | None]]:
        """Each span with the attempt that it names, None if it names none, or the reason why it is rejected."""
        resolved: dict[NamedIds, AttemptIds | str | None] = {}
        resources: dict[int, NamedIds] = {}
        result: list[tuple[Span, AttemptIds | str | None]] = []
        for span in spans:
            given = _named_ids(span.attributes)
            if given is UNNAMED:
                key = id(span.resource)
                if key not in resources:
                    resources[key] = _named_ids(span.resource)
                given = resources[key]
            if given not in resolved:
                ids = await self._complete(*given)
                resolved[given] = ids if caller is None else _as_caller(caller, ids)
            result.append((span, resolved[given]))
        return result

    async def _complete(self, rollout_id: str | None, attempt_id: str | None) -> AttemptIds | str | None:
        """Both ids, or the reason why there are none; None if no id is given."""
        if rollout_id is not None and attempt_id is not None:
            return rollout_id, attempt_id
        if attempt_id is not None:
            return await self._of_attempt(attempt_id) or f"no attempt {attempt_id!r} in this store"
        if rollout_id is None:
            return None
        try:
            attempt = await self.store.get_latest_attempt(rollout_id)
        except NotFoundError as error:
            return str(error)
        return f"rollout {rollout_id!r} has no attempt yet" if attempt is None else (rollout_id, attempt.attempt_id)

    async def _of_attempt(self, attempt_id: str) -> AttemptIds | None:
        ids = self.attempts.get(attempt_id)
        if ids is None and (attempt := await self.store.get_attempt(attempt_id)) is not None:
            ids = attempt.rollout_id, attempt_id
            self.attempts[attempt_id] = ids
            if len(self.attempts) > CACHED:
                self.attempts.popitem(last=False)
        return ids

    async def by_trace(self, trace_id: str) -> AttemptIds | None:
        """The attempt of a trace. No claim can override the attempt from which the trace id was made; what holders of
        the access token sent takes precedence over claims of attempts."""
        attempt_id = attempt_of_trace(trace_id)
        if attempt_id is not None and (ids := await self._of_attempt(attempt_id)) is not None:
            return ids
        return self.owners.find(trace_id)


def _named_ids(attributes: Mapping[str, Any]) -> NamedIds:
    """The ids that attributes name; the object UNNAMED if they name none."""
    rollout_id = attributes.get(ROLLOUT_IDS[0]) or attributes.get(ROLLOUT_IDS[1])
    attempt_id = attributes.get(ATTEMPT_IDS[0]) or attributes.get(ATTEMPT_IDS[1])
    if rollout_id is None and attempt_id is None:
        return UNNAMED
    return _text(rollout_id), _text(attempt_id)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _as_caller(caller: AttemptIds, ids: AttemptIds | str | None) -> AttemptIds | str:
    if ids is None or ids == caller:
        return caller
    return f"the key is that of attempt {caller[1]!r}, which may not send spans of another"


# -- unknown traces ----------------------------------------------------------------------------------------------------

QUEUE: Final = "traces"
SOURCE: Final = "otlp"
IDLE_SECONDS: Final = 600.0
CHECK_SECONDS: Final = 5.0
"""Time between two searches for idle traces."""
BATCH: Final = 256
"""Idle traces that are finished concurrently."""
MAX_OPEN: Final = 100_000
"""Beyond this number of open traces, those idle for longest are finished early."""
PAGE: Final = 1000


def ids_of_trace(trace_id: str) -> AttemptIds:
    """The ids of the rollout and the attempt of an unknown trace."""
    return f"ro-{trace_id}", claimed_id(_claim_id(trace_id), 0)


def _claim_id(trace_id: str) -> str:
    return f"trace-{trace_id}"


class UnknownTraces:
    """Creates rollouts for unknown traces and finishes them."""

    def __init__(self, store: LightningStoreBase, idle_seconds: float = IDLE_SECONDS) -> None:
        self._store = store
        self._idle = idle_seconds
        self._open: OrderedDict[str, float] = OrderedDict()
        """Trace id -> time of arrival of its last span (monotonic seconds), the one idle for longest first."""
        self._checking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Continue with the traces that were open when the last server stopped, and start looking for idle ones."""
        after = None
        while True:
            page = await self._store.query_rollouts(
                queue_in=[QUEUE], status_in=["preparing", "running"], after=after, limit=PAGE
            )
            for rollout in page:
                trace_id = rollout.metadata.get("trace_id")
                if isinstance(trace_id, str) and rollout.metadata.get("source") == SOURCE:
                    self._open[trace_id] = time.monotonic()
            if len(page) < PAGE:
                break
            after = page[-1].rollout_id
        self._checking = asyncio.create_task(self._check_regularly())

    async def close(self) -> None:
        """Stop looking for idle traces. Open traces stay open for the next server."""
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.wait({self._checking})

    async def adopt(self, spans: Sequence[Span]) -> list[tuple[AttemptIds, Span]]:
        """The spans with the ids of their attempts, which are created if they do not exist."""
        first = {span.trace_id: span for span in reversed(spans) if span.trace_id not in self._open}
        await asyncio.gather(
            *(self._begin(trace_id, span.resource.get("service.name")) for trace_id, span in first.items())
        )
        return [(ids_of_trace(span.trace_id), span) for span in spans]

    async def begin(self, trace_id: str) -> AttemptIds:
        """The attempt of a trace of which only the id is known, created if it does not exist."""
        if not self._touch(trace_id):
            await self._begin(trace_id, None)
        return ids_of_trace(trace_id)

    async def _begin(self, trace_id: str, service: Any) -> None:
        rollout_id, attempt_id = ids_of_trace(trace_id)
        metadata: dict[str, Any] = {"source": SOURCE, "trace_id": trace_id}
        if isinstance(service, str):
            metadata["service"] = service
        try:
            started = await self._store.start_rollout(
                None, metadata=metadata, rollout_id=rollout_id, queue=QUEUE, claim_id=_claim_id(trace_id)
            )
        except ConflictError:  # the rollout has already finished
            return
        if started.attempt.attempt_id == attempt_id and started.status not in FINISHED:
            self._open[trace_id] = time.monotonic()

    async def record(self, spans: Iterable[Span]) -> None:
        """Note that these spans were stored, and finish the traces whose root span is among them."""
        roots = [span for span in spans if self._touch(span.trace_id) and span.parent_id is None]
        await asyncio.gather(*(self._finish(root.trace_id, _status(root), root) for root in roots))

    def _touch(self, trace_id: str) -> bool:
        """Note that a span of a trace has arrived. Whether the trace is open."""
        if is_open := trace_id in self._open:
            self._open[trace_id] = time.monotonic()
            self._open.move_to_end(trace_id)
        return is_open

    async def _finish(self, trace_id: str, status: AttemptStatus, root: Span | None) -> None:
        rollout_id, attempt_id = ids_of_trace(trace_id)
        try:
            if root is not None and (task := _input(root)) is not None:
                await self._store.update_rollout(rollout_id, input=task)
            metadata = UNSET if root is not None else {"incomplete": "its root span has not arrived"}
            await self._store.update_attempt(rollout_id, attempt_id, status=status, metadata=metadata)
        except (ConflictError, NotFoundError) as error:
            logger.info("the trace %s has already been finished: %s", trace_id, error)
        self._open.pop(trace_id, None)

    async def _check_regularly(self) -> None:
        while True:
            await asyncio.sleep(min(CHECK_SECONDS, self._idle))
            while idle := self._idle_traces():
                try:
                    await asyncio.gather(*(self._finish(trace_id, "succeeded", None) for trace_id in idle))
                except StoreError as error:
                    logger.warning("could not finish %d idle traces, trying again: %s", len(idle), error)
                    break

    def _idle_traces(self) -> list[str]:
        """The next batch of traces that are idle for too long or exceed MAX_OPEN."""
        deadline, excess = time.monotonic() - self._idle, len(self._open) - MAX_OPEN
        first = list(islice(self._open.items(), BATCH))
        return [trace_id for index, (trace_id, last_span) in enumerate(first) if last_span < deadline or index < excess]


def _status(root: Span) -> AttemptStatus:
    return "failed" if root.status_code == "ERROR" else "succeeded"


def _input(root: Span) -> Any:
    """The input of the program according to its root span."""
    values = (root.attributes.get(name) for name in (names.OPERATION_INPUT, names.INPUT_MESSAGES))
    return next((value for value in values if value is not None), None)
