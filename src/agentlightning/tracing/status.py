"""What recording has done and what it has lost: counters, and one warning for each kind of loss."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

logger = logging.getLogger("agentlightning.recording")


@dataclass(frozen=True, slots=True)
class RecordingStatus:
    """What this process has recorded so far.

    >>> agl.RecordingStatus().spans_dropped
    0
    """

    sessions: int = 0
    """Sessions that have begun."""
    sessions_implicit: int = 0
    """Those among them that `emit_*` has begun, outside of any other."""
    sessions_written: int = 0
    """Sessions whose end is in the store."""
    sessions_sampled_out: int = 0
    """Sessions that were not recorded, because of `sampling_rate`."""
    sessions_lost: int = 0
    """Sessions that are not, or not completely, in the store: it could not be opened, rejected them, or did not answer
    until the process ended."""
    spans_written: int = 0
    spans_dropped: int = 0
    """Spans that are not in the store: the queue was full, the store rejected them, a redaction hook failed, or the
    process ended."""
    redactions_failed: int = 0
    """Calls of the redaction hook that failed; what it was called for is not stored."""
    spans_unmarked: int = 0
    """Spans outside of `track_critical_path`, where only what is within is recorded."""
    prompts_unanswered: int = 0
    """Prompts of `emit_prompt` without a response."""
    responses_unprompted: int = 0
    """Responses of `emit_response` without a prompt."""
    waiting: int = 0
    """Records that are still to be written."""
    problem: str = ""
    """The last problem, as the warning said it; empty while there was none."""


class _Counters:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._warned: set[str] = set()
        self._problem = ""

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + count

    def warn(self, kind: str, message: str) -> None:
        """Log a problem. Later ones of the same kind are only counted, until `settle`."""
        with self._lock:
            self._problem = message
        self.note(kind, message)

    def note(self, kind: str, message: str) -> None:
        """Log what is no problem, once."""
        with self._lock:
            first = kind not in self._warned
            self._warned.add(kind)
        if first:
            logger.warning("%s", message)

    def after_fork(self) -> None:
        """In a child process: a thread of the parent may hold the lock."""
        self._lock = threading.Lock()

    def settle(self, kind: str) -> bool:
        """The problem is over: the next one is logged again. True if there was one."""
        with self._lock:
            known = kind in self._warned
            self._warned.discard(kind)
            return known

    def status(self, waiting: int) -> RecordingStatus:
        with self._lock:
            return RecordingStatus(**self._counts, waiting=waiting, problem=self._problem)


counters = _Counters()
