"""The log of a server or a runner, as text or JSON lines, with logs of state changes and slow operations.

Records can have the ids of the rollout, attempt and worker: `about(rollout_id=...)` adds them to every record in its
context, `extra={"rollout_id": ...}` to one record. Keys and tokens are removed from all records.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, Literal

import orjson

from agentlightning.rollouts import Attempt, Rollout
from agentlightning.store.instrumented import CallRecord, Observer, ids_of
from agentlightning.store.types import Queue
from agentlightning.util.printable import printable

logger = logging.getLogger(__name__)

LogFormat = Literal["text", "json"]
FIELDS: Final = ("rollout_id", "attempt_id", "worker_id", "queue", "route", "method", "status", "seconds", "unreported")
"""Additional fields of records."""
MAX_MESSAGE: Final = 500
"""Maximum length of a message with text of an agent."""
SLOW_SECONDS: Final = 0.25
SLOW_LINES: Final = 10
"""Slow operations logged per minute; further ones are counted."""

_fields: ContextVar[Mapping[str, str]] = ContextVar("agentlightning_log_fields", default=MappingProxyType({}))
_secrets = re.compile(r"agl-[\w:-]+\.[\w:-]+\.[0-9a-f]{8,}|(?<=[Bb]earer )[^\s'\"]+|(?<=://)[^/@\s:]*:[^/@\s]+(?=@)")


@contextmanager
def about(**fields: str | None) -> Generator[None]:
    """Add these fields to all records in the context."""
    token = _fields.set({**_fields.get(), **{name: value for name, value in fields.items() if value is not None}})
    try:
        yield
    finally:
        _fields.reset(token)


def configure(kind: LogFormat = "text", *, secret: str | None = None) -> logging.Handler:
    """Log to stderr. `secret` is removed from all records. Returns the handler."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(secret) if kind == "json" else TextFormatter(secret))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("agentlightning").setLevel(logging.INFO)
    return handler


class _Formatter(logging.Formatter):
    def __init__(self, secret: str | None = None) -> None:
        super().__init__()
        self._secret = secret

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        own = {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        return {**_fields.get(), **own}

    def redact(self, text: str) -> str:
        """Replace keys, tokens and passwords in URLs."""
        if self._secret:
            text = text.replace(self._secret, "[token]")
        return _secrets.sub("[key]", text)

    def trace(self, record: logging.LogRecord) -> str:
        return self.formatException(record.exc_info) if record.exc_info else ""


class JsonFormatter(_Formatter):
    """One JSON object per line: time (UTC, ISO 8601), level, logger, message, additional fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self.fields(record),
        }
        if trace := self.trace(record):
            line["exception"] = trace
        return self.redact(orjson.dumps(line, default=repr, option=orjson.OPT_NON_STR_KEYS).decode())


class TextFormatter(_Formatter):
    """`18:05:07 WARNING message (rollout_id=...)`, always on one line. A traceback follows, indented, so that
    no text of an agent can imitate a record."""

    def format(self, record: logging.LogRecord) -> str:
        fields = ", ".join(
            f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in self.fields(record).items()
        )
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        suffix = f" ({fields})" if fields else ""
        line = f"{clock} {record.levelname:<7} {printable(record.getMessage() + suffix)}"
        return self.redact("\n    ".join([line, *map(printable, self.trace(record).split("\n"))]).rstrip())


CHANGES: Final = frozenset({"update_attempt", "cancel_rollout", "requeue_rollout", "delete_rollouts", "update_queue"})


class ChangeLog(Observer):
    """Logs failed attempts, cancelled, requeued and deleted rollouts, and limits of queues."""

    def on_end(self, call: CallRecord) -> None:
        if call.method in CHANGES and call.error is None and (text := _change(call)):
            logger.info(text, extra=ids_of(call))


def _change(call: CallRecord) -> str | None:
    match call.method, call.result:
        case "update_attempt", Attempt(status="failed" | "timeout" as status, metadata=metadata):
            error = metadata.get("error")
            what = f": {error.get('type')}: {error.get('message')}" if isinstance(error, dict) else ""
            return f"an attempt ended as {status}{what}"[:MAX_MESSAGE]
        case "cancel_rollout", Rollout(status="cancelled"):
            return "a rollout was cancelled"
        case "requeue_rollout", Rollout(status="requeuing"):
            return "a rollout was requeued"
        case "delete_rollouts", int(number) if number:
            return f"{number} rollouts were deleted"
        case "update_queue", Queue(name=name, limit=limit):
            return f"the queue {name!r} is " + ("unlimited" if limit is None else f"limited to {limit} open rollouts")
        case _:
            return None


class SlowLog(Observer):
    """Logs operations that take longer than `seconds`, at most `SLOW_LINES` per minute."""

    def __init__(self, seconds: float = SLOW_SECONDS) -> None:
        self._limit = seconds
        self._minute = 0
        self._lines = 0
        self._unreported = 0

    def on_end(self, call: CallRecord) -> None:
        if call.seconds >= self._limit and not call.waits:
            how = "" if call.error is None else f" and failed with {type(call.error).__name__}"
            self._log(
                f"slow: the store took {1000 * call.seconds:.0f} ms for {call.method}{how}",
                {"method": call.method, "seconds": round(call.seconds, 4), **ids_of(call)},
            )

    def request_ended(self, route: str, method: str, status: int, seconds: float) -> None:
        """Called for each HTTP request but model calls; `seconds` excludes the time of waiting for rollouts."""
        if seconds >= self._limit:
            self._log(
                f"slow: {method} {route} took {1000 * seconds:.0f} ms, with status {status}",
                {"route": route, "method": method, "status": status, "seconds": round(seconds, 4)},
            )

    def _log(self, message: str, fields: dict[str, Any]) -> None:
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            self._minute, self._lines = minute, 0
        self._lines += 1
        if self._lines > SLOW_LINES:
            self._unreported += 1
            return
        if self._unreported:
            fields["unreported"], self._unreported = self._unreported, 0
        logger.warning(message, extra=fields)
