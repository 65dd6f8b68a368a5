"""Finds the attempt that each span of an OTLP request belongs to.

In this order: the attempt whose key the request carries; the ids among the span's own attributes; those among the
attributes of its resource; the attempt from which its trace id was made; the attempt of another span of its trace.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from agentlightning.attempt_address import attempt_of_trace
from agentlightning.errors import NotFoundError
from agentlightning.store.base import LightningStoreBase
from agentlightning.tracing.otlp.decode import Decoded
from agentlightning.util.shared_cache import open_cache

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
        self, spans: Sequence[Decoded], caller: AttemptIds | None, rejected: Counter[str]
    ) -> tuple[list[tuple[AttemptIds, Decoded]], list[Decoded]]:
        """(spans with their attempts, in order, spans without one). Counts spans that must be rejected in `rejected`,
        by reason."""
        named = await self._by_name(spans, caller)
        traces = {span.trace_id: ids for span, ids in named if isinstance(ids, tuple)}
        unnamed = {span.trace_id for span, ids in named if ids is None} - traces.keys()
        by_trace = traces | {trace_id: await self.by_trace(trace_id) for trace_id in unnamed}
        attributed: list[tuple[AttemptIds, Decoded]] = []
        unattributed: list[Decoded] = []
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
        self, spans: Sequence[Decoded], caller: AttemptIds | None
    ) -> list[tuple[Decoded, AttemptIds | str | None]]:
        """Each span with the attempt that it names, None if it names none, or the reason why it is rejected."""
        resolved: dict[NamedIds, AttemptIds | str | None] = {}
        resources: dict[int, NamedIds] = {}
        result: list[tuple[Decoded, AttemptIds | str | None]] = []
        for span in spans:
            names = _named_ids(span.attributes)
            if names is UNNAMED:
                key = id(span.resource)
                if key not in resources:
                    resources[key] = _named_ids(span.resource)
                names = resources[key]
            if names not in resolved:
                ids = await self._complete(*names)
                resolved[names] = ids if caller is None else _as_caller(caller, ids)
            result.append((span, resolved[names]))
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
