"""A session as it is recorded, and how it is written to a store.

Finished sessions are written whole, many in one transaction; open ones as they go on. Every call may be repeated
without taking effect twice. What the store rejects is written without the values it cannot hold, or dropped and
counted: it must not take other sessions with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from agentlightning.errors import AgentLightningError, ConfigError, ConflictError, Failure, NotFoundError
from agentlightning.recording.settings import SAMPLING_RATE, Redact, redact_failure, redact_spans, redact_start
from agentlightning.rollouts import Attempt, AttemptStatus, Rollout, RolloutConfig, RolloutMode
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.types import RolloutRecord
from agentlightning.tracing.outbox import counters
from agentlightning.tracing.sanitize import sanitize_span, sanitize_value

SESSION_QUEUE: Final = "_sessions"
"""The queue of sessions. It is private: no runner claims them."""
SESSION: Final = "session"
"""In the metadata of a rollout that is a session: its name, or ""."""
SILENT_SECONDS: Final = 300.0
"""A session of a process that ended without a word fails after this time."""
CONFIG: Final = RolloutConfig(unresponsive_seconds=SILENT_SECONDS)
REJECTED: Final = (ConfigError, ConflictError, NotFoundError)
SPANS_PER_CALL: Final = 1000


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """How a session ended."""

    time: float
    failure: Failure | None = None

    @property
    def status(self) -> AttemptStatus:
        return "succeeded" if self.failure is None else "failed"

    @property
    def metadata(self) -> dict[str, Any]:
        failure = self.failure
        if failure is None:
            return {}
        return {"error": {"type": failure.type, "message": failure.message, "traceback": failure.traceback}}


@dataclass(slots=True, eq=False)
class SessionRecord:
    """One session. Once it has begun, its fields belong to the thread that writes."""

    rollout_id: str
    claim_id: str
    attempt_id: str
    start_time: float
    task: Any
    mode: RolloutMode | None
    metadata: dict[str, Any]
    process_id: int = field(default_factory=os.getpid)
    """Of the process that opened it."""
    redact: Redact | None = None
    in_store: bool = False
    """Its rollout is in the store."""
    written: bool = False
    """All of it is in the store, with its end."""
    lost: bool = False
    """The store has rejected it: nothing more of it is written."""
    spans: list[Span] = field(default_factory=list[Span])
    """Not yet written."""
    end: SessionEnd | None = None

    def add(self, what: Sequence[Span] | SessionEnd | None) -> None:
        """Prepare its start (None), spans of it, or its end for writing."""
        redact = self.redact
        if isinstance(what, SessionEnd):
            failure = what.failure
            self.end = (
                what if redact is None or failure is None else replace(what, failure=redact_failure(redact, failure))
            )
        elif what is not None:
            self.spans.extend(what if redact is None else redact_spans(redact, what))
        elif redact is not None:
            own = {name: self.metadata[name] for name in (SESSION, SAMPLING_RATE) if name in self.metadata}
            users = {name: value for name, value in self.metadata.items() if name not in own}
            self.task, metadata = redact_start(redact, self.task, users)
            self.metadata = {**metadata, **own}

    @property
    def is_changed(self) -> bool:
        """Whether something of it is to be written."""
        return not self.written and bool(self.spans or self.end is not None or not self.in_store)

    def sanitized(self) -> SessionRecord:
        """Without the values that no store can hold."""
        task, metadata = sanitize_value(self.task), sanitize_value(self.metadata)
        return replace(self, task=task, metadata=metadata, spans=list(map(sanitize_span, self.spans)))

    def reject(self, error: AgentLightningError) -> None:
        """The store does not take it: drop it, and count it."""
        self.lost = True
        counters.add("sessions_lost")
        counters.warn("rejected", f"the store rejects session {self.rollout_id}: {error}")
        self.drop_spans()

    def drop_spans(self) -> None:
        if self.spans:
            counters.add("spans_dropped", len(self.spans))
            self.spans = []


def _whole(session: SessionRecord) -> RolloutRecord:
    """A session that has ended, for a store that knows nothing of it."""
    end, ids = session.end, (session.rollout_id, session.attempt_id)
    assert end is not None
    rollout = Rollout(
        session.rollout_id,
        session.task,
        session.start_time,
        "succeeded" if end.failure is None else "failed",
        mode=session.mode,
        end_time=end.time,
        config=CONFIG,
        metadata=session.metadata,
        queue=SESSION_QUEUE,
    )
    times = {"end_time": end.time, "last_heartbeat_time": end.time}
    attempt = Attempt(*ids, 1, session.start_time, end.status, metadata=end.metadata, **times)
    spans = tuple(replace(span, sequence_id=number) for number, span in enumerate(session.spans, start=1))
    return RolloutRecord(rollout, (attempt,), spans)


class StoreWriter:
    """Writes sessions to `store`. Raises errors of the store other than REJECTED, and can then be called again."""

    def __init__(self, store: LightningStoreBase) -> None:
        self._store = store

    async def write(self, sessions: Sequence[SessionRecord]) -> None:
        """Write what is waiting of each session."""
        for session in sessions:
            if session.lost:
                session.drop_spans()
        live = [session for session in sessions if not session.lost]
        await self._write_whole([session for session in live if session.end is not None and not session.in_store])
        for session in live:
            if session.end is None and not session.in_store:
                session.in_store = await self._in_some_form(session, self._start)
        await self._write_spans([session for session in live if session.spans and session.in_store])
        for session in live:
            if session.end is not None and session.in_store and not session.written:
                await self._end(session)

    async def beat(self, sessions: Sequence[SessionRecord]) -> None:
        """Tell the store that these sessions go on."""
        for session in sessions:
            if session.in_store and session.end is None and not session.lost:
                await self._store.update_attempt(
                    session.rollout_id, session.attempt_id, last_heartbeat_time=time.time()
                )

    async def _in_some_form(self, session: SessionRecord, write: Callable[[SessionRecord], Awaitable[object]]) -> bool:
        """Write a session as it is, or else what the store can hold of it. Whether it took that."""
        for each in (session, session.sanitized()):
            try:
                await write(each)
            except REJECTED as error:
                problem = error
            else:
                return True
        session.reject(problem)
        return False

    async def _write_whole(self, sessions: Sequence[SessionRecord]) -> None:
        if not sessions:
            return
        written = sessions
        try:
            await self._add(*sessions)
        except REJECTED:
            written = [session for session in sessions if await self._in_some_form(session, self._add)]
        for session in written:
            counters.add("spans_written", len(session.spans))
            session.in_store, session.spans = True, []
            self._note_written(session)

    async def _add(self, *sessions: SessionRecord) -> None:
        await self._store.add_records(list(map(_whole, sessions)))

    async def _start(self, session: SessionRecord) -> None:
        await self._store.start_rollout(
            session.task,
            session.mode,
            config=CONFIG,
            metadata=session.metadata,
            rollout_id=session.rollout_id,
            queue=SESSION_QUEUE,
            claim_id=session.claim_id,
        )
        await self._store.update_attempt(session.rollout_id, session.attempt_id, status="running")

    async def _write_spans(self, sessions: Sequence[SessionRecord]) -> None:
        for chunk in _chunks(sessions):
            try:
                await self._add_spans([span for session in chunk for span in session.spans])
            except REJECTED:
                for span in (span for session in chunk for span in session.spans):
                    await self._write_alone(span)
            for session in chunk:
                session.spans = []

    async def _add_spans(self, spans: Sequence[Span]) -> None:
        await self._store.add_many_spans(spans)
        counters.add("spans_written", len(spans))

    async def _write_alone(self, span: Span) -> None:
        try:
            await self._add_spans([sanitize_span(span)])
        except REJECTED as error:
            counters.add("spans_dropped")
            counters.warn("rejected", f"the store rejects span {span.name!r} of {span.rollout_id}: {error}")

    async def _end(self, session: SessionRecord) -> None:
        end = session.end
        assert end is not None
        ids = session.rollout_id, session.attempt_id
        try:
            await self._store.update_attempt(*ids, status=end.status, metadata=end.metadata)
        except REJECTED as error:
            session.reject(error)
        else:
            self._note_written(session)

    def _note_written(self, session: SessionRecord) -> None:
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
