"""Stores the replies that later requests of an attempt may refer to, by `previous_response_id`, item or retrieval.

It also stores the turns that a provider wants back unchanged (`answer.needs_echo`). Conversations are stored as a tree
of messages, each message once, so that a client that sends its whole history with every call costs no more than one
that sends only what is new. Nothing outlives its attempt, or the server.

The replies are in SQLite: in memory, or in a folder that several processes of one server share.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentlightning.chat.base import Message
from agentlightning.gateway.dialects.content_parts import extend_digest
from agentlightning.gateway.errors import ApiError, bad_request
from agentlightning.util.json_values import dumps, loads
from agentlightning.util.shared_cache import open_cache

if TYPE_CHECKING:
    import sqlite3

Attempt = tuple[str, str]
"""(rollout_id, attempt_id)."""
Entry = tuple[Any, Any, Any]
"""The columns parent, first and value."""
_ENTRY_BYTES: Final = 100
"""Approximate size of an entry without content."""
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS attempts (
    key INTEGER PRIMARY KEY, rollout_id TEXT, attempt_id TEXT, size INTEGER DEFAULT 0, used INTEGER,
    UNIQUE (rollout_id, attempt_id)
);
CREATE TABLE IF NOT EXISTS entries (
    attempt INTEGER, kind TEXT, id BLOB, parent BLOB, first BLOB, value BLOB, PRIMARY KEY (attempt, kind, id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS total (key INTEGER PRIMARY KEY CHECK (key = 1), size INTEGER);
INSERT OR IGNORE INTO total VALUES (1, 0);
"""
# Entries by kind:
# reply: id of a reply -> digest of its conversation including the answer; digest of the messages that belonged to the
#   request alone, after which the conversation starts; the body as sent, None if the caller asked not to store it
# message: digest of a conversation -> digest without its last message; that message
# item: id of an item of a reply -> the item
# turn: key of a turn -> the turn as its provider wrote it
# provider: id of a reply that its provider stores -> the provider's name; its call while it is not complete


class ResponseLookup:
    """What the requests of one attempt can refer to."""

    def __init__(self, store: ResponseStore | None = None, attempt: Attempt | None = None) -> None:
        self._store, self._attempt = store, attempt

    def messages(self, response_id: str) -> list[Message]:
        """The conversation up to and including a reply. Raises ApiError 400 for a reply that is not stored."""
        entry = self._find("reply", response_id)
        first, messages = entry and entry[1], list[Message]()
        while entry is not None and entry[0] != first:
            entry = self._find("message", entry[0])
            messages += [loads(entry[2])] if entry else []
        if entry is None:
            message = (
                f"previous_response_id={response_id!r} is not stored here: replies are stored while their attempt runs;"
                " send the whole conversation as input"
            )
            raise ApiError(400, message, code="previous_response_not_found", param="previous_response_id")
        return messages[::-1]

    def item(self, item_id: str) -> dict[str, Any]:
        """An item of a reply. Raises ApiError 400 for an item that is not stored."""
        if (item := self._find("item", item_id)) is None:
            raise bad_request("input", f"the item {item_id!r} is not stored here; send the item itself")
        return loads(item[2])

    def turn(self, turn: bytes) -> list[dict[str, Any]]:
        """A turn as its provider wrote it (`ResponseStore.add_turn`); empty if it is not stored."""
        found = self._find("turn", turn)
        return loads(found[2]) if found else []

    def _find(self, kind: str, entry: str | bytes) -> Entry | None:
        if self._store is None or self._attempt is None:
            return None
        return self._store.find(self._attempt, kind, entry)


class ResponseStore:
    """The replies of recently active attempts; above `max_bytes`, the least recently used attempts are evicted."""

    def __init__(self, shared: Path | None = None, max_bytes: int = 256 * 1024 * 1024) -> None:
        self._max_bytes = max_bytes
        self._database = open_cache(shared, "replies.db", _SCHEMA)
        self._lock = threading.Lock()
        """Large requests are read in threads."""

    def __len__(self) -> int:
        return self._number("SELECT count(*) FROM attempts")

    @property
    def size(self) -> int:
        """Approximate bytes stored."""
        return self._number("SELECT size FROM total")

    def lookup(self, attempt: Attempt | None) -> ResponseLookup:
        """What the requests of an attempt can refer to; nothing without an attempt."""
        return ResponseLookup(self, attempt)

    def find(self, attempt: Attempt, kind: str, entry: str | bytes) -> Entry | None:
        """An entry of an attempt; None if there is none."""
        with self._lock:
            return self._database.execute(
                "SELECT parent, first, value FROM attempts JOIN entries ON attempt = key"
                " WHERE rollout_id = ? AND attempt_id = ? AND kind = ? AND id = ?",
                (*attempt, kind, entry),
            ).fetchone()

    def add(
        self,
        attempt: Attempt,
        response_id: str,
        digests: Sequence[bytes],
        messages: Sequence[Message],
        answer: Message,
        body: bytes | None,
        items: Sequence[Mapping[str, Any]],
        num_instructions: int = 0,
    ) -> None:
        """Keep a reply; the first `num_instructions` messages belonged to its request alone. Without a `body` it can be
        continued and not retrieved."""
        conversation = (*messages, answer)
        chain = (*digests, extend_digest(digests[-1], answer))
        with self._change(attempt) as change:
            for index in range(len(messages), num_instructions - 1, -1):
                if not change.add("message", chain[index + 1], chain[index], None, dumps(conversation[index])):
                    break  # it is stored, and so are the messages before it
            change.put("reply", response_id, chain[-1], chain[num_instructions], body)
            for item in items:
                change.put("item", item["id"], None, None, dumps(item))

    def add_turn(self, attempt: Attempt, turn: bytes, blocks: list[dict[str, Any]]) -> None:
        """Store a turn as its provider wrote it and wants it back, by its key (`content_parts.turn_key`)."""
        with self._change(attempt) as change:
            change.put("turn", turn, None, None, dumps(blocks))

    def note_provider(self, attempt: Attempt, response_id: str, provider: str, pending: Any = None) -> None:
        """Note that a forwarded reply is stored by its provider; `pending` is its call as JSON values, if it is not
        complete."""
        with self._change(attempt) as change:
            change.put("provider", response_id, provider, None, dumps(pending) if pending else None)

    def take_pending(self, attempt: Attempt, response_id: str) -> Any:
        """The call whose reply was not complete, once; None if there is none."""
        if (self.find(attempt, "provider", response_id) or ("", None, None))[2] is None:
            return None
        with self._change(attempt) as change:
            provider, _, pending = change.find("provider", response_id) or ("", None, None)
            change.put("provider", response_id, provider, None, None)
        return None if pending is None else loads(pending)

    def provider_of(self, attempt: Attempt, response_id: str) -> str | None:
        """The name of the provider that stores a reply to this attempt; None if it is not known."""
        found = self.find(attempt, "provider", response_id)
        return found[0] if found else None

    def body(self, attempt: Attempt, response_id: str) -> bytes:
        """The body of a reply as sent. Raises ApiError 404 for a reply that is not stored."""
        found = self.find(attempt, "reply", response_id)
        if found is None or found[2] is None:
            raise ApiError(404, f"no response {response_id!r} is stored for this attempt", code="response_not_found")
        return found[2]

    def delete(self, attempt: Attempt, response_id: str) -> None:
        """Delete one reply. Raises ApiError 404 as `body` does."""
        self.body(attempt, response_id)
        with self._change(attempt) as change:
            change.remove("reply", response_id)

    def forget(self, attempt: Attempt) -> None:
        """Drop everything of an attempt, once it has ended."""
        if self._number("SELECT count(*) FROM attempts WHERE rollout_id = ? AND attempt_id = ?", *attempt):
            with self._transaction():
                self._drop("rollout_id = ? AND attempt_id = ?", *attempt)

    @contextmanager
    def _change(self, attempt: Attempt) -> Generator[_Change]:
        """A transaction that changes what is stored of an attempt, and makes room for it."""
        with self._transaction():
            change = _Change(self._database, attempt)
            yield change
            change.end()
            while change.grown > 0 and self._database.execute("SELECT size FROM total").fetchone()[0] > self._max_bytes:
                self._drop("key = (SELECT key FROM attempts ORDER BY used LIMIT 1)")

    def _drop(self, condition: str, *values: Any) -> None:
        run = self._database.execute
        for key, size in run(f"DELETE FROM attempts WHERE {condition} RETURNING key, size", values).fetchall():
            run("DELETE FROM entries WHERE attempt = ?", (key,))
            run("UPDATE total SET size = size - ?", (size,))

    @contextmanager
    def _transaction(self) -> Generator[None]:
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    def _number(self, query: str, *values: Any) -> int:
        with self._lock:
            return self._database.execute(query, values).fetchone()[0]


class _Change:
    """The entries of one attempt, in a transaction."""

    def __init__(self, database: sqlite3.Connection, attempt: Attempt) -> None:
        self.grown = 0
        """Bytes."""
        self._run = database.execute
        touch = (
            "INSERT INTO attempts (rollout_id, attempt_id, size, used) VALUES (?, ?, 0, ?)"
            " ON CONFLICT DO UPDATE SET used = excluded.used RETURNING key"
        )
        ((self._key,),) = self._run(touch, (*attempt, time.monotonic_ns())).fetchall()

    def find(self, kind: str, entry: str | bytes) -> Entry | None:
        query = "SELECT parent, first, value FROM entries WHERE attempt = ? AND kind = ? AND id = ?"
        return self._run(query, (self._key, kind, entry)).fetchone()

    def add(self, kind: str, entry: str | bytes, *columns: str | bytes | None) -> bool:
        """Add an entry (parent, first, value), unless there is one."""
        added = self._run("INSERT OR IGNORE INTO entries VALUES (?, ?, ?, ?, ?, ?)", (self._key, kind, entry, *columns))
        self.grown += _size(kind, columns[-1]) if added.rowcount else 0
        return bool(added.rowcount)

    def put(self, kind: str, entry: str | bytes, *columns: str | bytes | None) -> None:
        """Add an entry, or replace it."""
        if not self.add(kind, entry, *columns):
            self.remove(kind, entry)
            self.add(kind, entry, *columns)

    def remove(self, kind: str, entry: str | bytes) -> None:
        query = "DELETE FROM entries WHERE attempt = ? AND kind = ? AND id = ? RETURNING value"
        for (value,) in self._run(query, (self._key, kind, entry)).fetchall():
            self.grown -= _size(kind, value)

    def end(self) -> None:
        self._run("UPDATE attempts SET size = size + ? WHERE key = ?", (self.grown, self._key))
        self._run("UPDATE total SET size = size + ?", (self.grown,))


def _size(kind: str, value: str | bytes | None) -> int:
    return len(value or b"") + (_ENTRY_BYTES if kind == "provider" else 0)
