"""A session as it is recorded, and what of it is still to be written."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from agentlightning.errors import Failure
from agentlightning.recording.redaction import redact_failure, redact_spans, redact_start
from agentlightning.recording.settings import SAMPLING_RATE, Redact
from agentlightning.rollouts import Attempt, AttemptStatus, Rollout, RolloutConfig, RolloutMode, RolloutStatus
from agentlightning.span import Span
from agentlightning.store.types import RolloutRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

SESSION_QUEUE: Final = "_sessions"
"""The queue of sessions. It is private: no runner claims them."""
SESSION: Final = "session"
"""In the metadata of a rollout that is a session: its name, or ""."""
SILENT_SECONDS: Final = 300.0
"""A session of a process that ended without a word fails after this time."""
HEARTBEAT_SECONDS: Final = 60.0

CONFIG: Final = RolloutConfig(unresponsive_seconds=SILENT_SECONDS)


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

    def begin(self) -> None:
        """Prepare what the start tells for writing."""
        if self.redact is not None:
            own = {name: self.metadata[name] for name in (SESSION, SAMPLING_RATE) if name in self.metadata}
            users = {name: value for name, value in self.metadata.items() if name not in own}
            self.task, metadata = redact_start(self.redact, self.task, users)
            self.metadata = {**metadata, **own}

    def add_spans(self, spans: Sequence[Span]) -> None:
        """Add spans to those that are to be written."""
        self.spans.extend(spans if self.redact is None else redact_spans(self.redact, spans))

    def finish(self, end: SessionEnd) -> None:
        """Note how it ended."""
        if self.redact is not None and end.failure is not None:
            end = SessionEnd(end.time, redact_failure(self.redact, end.failure))
        self.end = end


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


def whole_record(session: SessionRecord, end: SessionEnd, spans: Sequence[Span]) -> RolloutRecord:
    """A session that has ended, for a store that knows nothing of it."""
    status: RolloutStatus = "succeeded" if end.failure is None else "failed"
    rollout = Rollout(
        session.rollout_id,
        session.task,
        session.start_time,
        status,
        mode=session.mode,
        end_time=end.time,
        config=CONFIG,
        metadata=session.metadata,
        queue=SESSION_QUEUE,
    )
    attempt = Attempt(
        session.rollout_id,
        session.attempt_id,
        1,
        session.start_time,
        end.status,
        end_time=end.time,
        last_heartbeat_time=end.time,
        metadata=end.metadata,
    )
    return RolloutRecord(rollout, (attempt,), tuple(spans))
