"""What a program can ask of recording: to write now, and what has been recorded and lost."""

from __future__ import annotations

from agentlightning.recording import recorder
from agentlightning.tracing.status import RecordingStatus, counters


def flush_recording(timeout: float = 10.0) -> bool:
    """Wait until what was recorded so far is in the store: then it survives any end of the process. False if that took
    longer than `timeout` seconds. The end of the process waits for it by itself, and so does that of a worker of
    `multiprocessing`; `os._exit` in a process made by `os.fork` does not.

        >>> with agl.track_session():
        ...     agl.emit_message("here")
        >>> agl.flush_recording()
        True
    """
    return recorder.flush_all(timeout)


def recording_status() -> RecordingStatus:
    """What this process has recorded, and what could not be.

    >>> agl.recording_status().spans_dropped
    0
    """
    return counters.status(recorder.waiting())
