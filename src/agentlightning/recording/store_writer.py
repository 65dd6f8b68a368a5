"""Writes batches of sessions to a store: finished ones whole, in one transaction; open ones as they go on.

Every call may be repeated without taking effect twice, so a batch that failed is written again as it is. What the store
rejects is written without the values it cannot hold, or dropped and counted: it must not take other sessions with it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from agentlightning.errors import AgentLightningError, ConfigError, ConflictError, NotFoundError
from agentlightning.recording.records import CONFIG, SESSION_QUEUE, SessionRecord, whole_record
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.tracing.sanitize import sanitize_span, sanitize_value
from agentlightning.tracing.status import counters

REJECTED: Final = (ConfigError, ConflictError, NotFoundError)
SPANS_PER_CALL: Final = 1000


class StoreWriter:
    """Writes sessions to `store`. Raises errors of the store other than REJECTED, and can then be called again."""

    def __init__(self, store: LightningStoreBase) -> None:
        self._store = store

    async def write(self, sessions: Sequence[SessionRecord]) -> None:
        """Write what is waiting of each session."""
        live = [session for session in sessions if not session.lost]
        for session in sessions:
            if session.lost:
                _drop(session)
        await self._write_whole([s for s in live if s.end is not None and not s.in_store])
        for session in live:
            if session.end is None and not session.in_store:
                await self._start(session)
        await self._write_spans([s for s in live if s.spans and s.in_store and not s.lost])
        for session in live:
            if session.end is not None and session.in_store and not (session.lost or session.written):
                await self._end(session)

    async def beat(self, sessions: Sequence[SessionRecord]) -> None:
        """Tell the store that these sessions go on."""
        for session in sessions:
            if session.in_store and not session.lost:
                try:
                    await self._store.update_attempt(
                        session.rollout_id, session.attempt_id, last_heartbeat_time=time.time()
                    )
                except REJECTED as error:
                    _reject(session, error)

    async def _write_whole(self, sessions: Sequence[SessionRecord]) -> None:
        if not sessions:
            return
        try:
            await self._store.add_records([_numbered(session) for session in sessions])
        except REJECTED as error:
            for session in sessions if len(sessions) > 1 else ():
                await self._write_whole([session])
            if len(sessions) == 1:
                await self._write_sanitized(sessions[0], error)
            return
        for session in sessions:
            _written(session)

    async def _write_sanitized(self, session: SessionRecord, error: AgentLightningError) -> None:
        clean = _sanitized(session)
        try:
            await self._store.add_records([_numbered(clean)])
        except REJECTED:
            _reject(session, error)
        else:
            _written(session)

    async def _start(self, session: SessionRecord) -> None:
        for each in (session, _sanitized(session)):
            try:
                await self._store.start_rollout(
                    each.task,
                    each.mode,
                    config=CONFIG,
                    metadata=each.metadata,
                    rollout_id=each.rollout_id,
                    queue=SESSION_QUEUE,
                    claim_id=each.claim_id,
                )
                await self._store.update_attempt(each.rollout_id, each.attempt_id, status="running")
            except REJECTED as error:
                problem = error
            else:
                session.in_store = True
                return
        _reject(session, problem)

    async def _write_spans(self, sessions: Sequence[SessionRecord]) -> None:
        for chunk in _chunks(sessions):
            spans = [span for session in chunk for span in session.spans]
            try:
                await self._add_spans(spans)
            except REJECTED:
                for session in chunk:
                    await self._write_spans_of(session)
            for session in chunk:
                session.spans = []

    async def _add_spans(self, spans: Sequence[Span]) -> None:
        await self._store.add_many_spans(spans)
        counters.add("spans_written", len(spans))

    async def _write_spans_of(self, session: SessionRecord) -> None:
        for span in session.spans:
            try:
                await self._add_spans([sanitize_span(span)])
            except REJECTED as error:
                counters.add("spans_dropped")
                counters.warn("rejected", f"the store rejects span {span.name!r} of {session.rollout_id}: {error}")

    async def _end(self, session: SessionRecord) -> None:
        end = session.end
        assert end is not None
        try:
            await self._store.update_attempt(
                session.rollout_id, session.attempt_id, status=end.status, metadata=end.metadata
            )
        except REJECTED as error:
            _reject(session, error)
        else:
            session.written = True
            counters.add("sessions_written")


def _chunks(sessions: Sequence[SessionRecord]) -> list[list[SessionRecord]]:
    chunks: list[list[SessionRecord]] = []
    size = SPANS_PER_CALL
    for session in sessions:
        if size + len(session.spans) > SPANS_PER_CALL:
            chunks.append([])
            size = 0
        chunks[-1].append(session)
        size += len(session.spans)
    return chunks


def _numbered(session: SessionRecord) -> Any:
    spans = [replace(span, sequence_id=number) for number, span in enumerate(session.spans, start=1)]
    assert session.end is not None
    return whole_record(session, session.end, spans)


def _written(session: SessionRecord) -> None:
    counters.add("spans_written", len(session.spans))
    counters.add("sessions_written")
    session.in_store, session.written, session.spans = True, True, []


def _sanitized(session: SessionRecord) -> SessionRecord:
    task, metadata = sanitize_value(session.task), sanitize_value(session.metadata)
    return replace(session, task=task, metadata=metadata, spans=list(map(sanitize_span, session.spans)))


def _reject(session: SessionRecord, error: AgentLightningError) -> None:
    session.lost = True
    counters.add("sessions_lost")
    counters.warn("rejected", f"the store rejects session {session.rollout_id}: {error}")
    _drop(session)


def _drop(session: SessionRecord) -> None:
    if session.spans:
        counters.add("spans_dropped", len(session.spans))
        session.spans = []
