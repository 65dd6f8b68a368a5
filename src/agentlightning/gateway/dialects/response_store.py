"""Stores the replies that later requests of an attempt may refer to, by `previous_response_id`, item or retrieval.

It also stores the turns that a provider wants back unchanged (`answer.needs_echo`). Conversations are stored as a tree
of messages, each message once, so that a client that sends its whole history with every call costs no more than one
that sends only what is new. Nothing outlives its attempt, or the server.

The replies are in SQLite: in memory, or in a folder that several processes of one server share.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agentlightning.chat.base import Message
from agentlightning.gateway.dialects.content_parts import extend_digest
from agentlightning.gateway.errors import ApiError, bad_request
from agentlightning.util.json_values import Json, dumps, loads
from agentlightning.util.shared_cache import open_cache

Attempt = tuple[str, str]
"""(rollout_id, attempt_id)."""
Entry = tuple[Any, Any, Any]
"""The columns parent, first and value."""
_SCHEMA: Final = """
PRAGMA recursive_triggers = ON; -- an entry that is replaced is one that was deleted
CREATE TABLE IF NOT EXISTS attempts (
    key INTEGER PRIMARY KEY, rollout_id TEXT, attempt_id TEXT, used INTEGER, UNIQUE (rollout_id, attempt_id)
);
CREATE TABLE IF NOT EXISTS entries (
    attempt INTEGER, kind TEXT, id BLOB, parent BLOB, first BLOB, value BLOB, PRIMARY KEY (attempt, kind, id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS total (key INTEGER PRIMARY KEY CHECK (key = 1), size INTEGER);
INSERT OR IGNORE INTO total VALUES (1, 0);
-- A provider's entry has little or no content, and counts as 100 bytes more.
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON entries BEGIN
    UPDATE total SET size = size + ifnull(length(new.value), 0) + 100 * (new.kind = 'provider');
END;
CREATE TRIGGER IF NOT EXISTS deleted AFTER DELETE ON entries BEGIN
    UPDATE total SET size = size - ifnull(length(old.value), 0) - 100 * (old.kind = 'provider');
END;
CREATE TRIGGER IF NOT EXISTS dropped AFTER DELETE ON attempts BEGIN
    DELETE FROM entries WHERE attempt = old.key;
END;
"""
# Entries by kind:
# reply: id of a reply -> digest of its conversation including the answer; digest of the messages that belonged to the
#   request alone, after which the conversation starts; the body as sent, None if the caller asked not to store it
# message: digest of a conversation -> digest without its last message; that message
# item: id of an item of a reply -> the item
# turn: key of a turn -> the turn as its provider wrote it
# provider: id of a reply that its provider stores -> the provider's name; its call while it is not complete


@dataclass(frozen=True, slots=True)
class ResponseLookup:
    """What the requests of one attempt can refer to; nothing without an attempt."""

    store: ResponseStore | None = None
    attempt: Attempt | None = None

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

    def item(self, item_id: str) -> Json:
        """An item of a reply. Raises ApiError 400 for an item that is not stored."""
        if (item := self._find("item", item_id)) is None:
            raise bad_request("input", f"the item {item_id!r} is not stored here; send the item itself")
        return loads(item[2])

    def turn(self, turn: bytes) -> list[Json]:
        """A turn as its provider wrote it (`ResponseStore.add_turn`); empty if it is not stored."""
        found = self._find("turn", turn)
        return loads(found[2]) if found else []

    def _find(self, kind: str, entry: str | bytes) -> Entry | None:
        if self.store is None or self.attempt is None:
            return None
        return self.store.find(self.attempt, kind, entry)


class ResponseStore:
    """The replies of recently active attempts; above `max_bytes`, the least recently used attempts are evicted."""

    def __init__(self, shared: Path | None = None, max_bytes: int = 256 * 1024 * 1024) -> None:
        self._max_bytes = max_bytes
        self._run = open_cache(shared, "replies.db", _SCHEMA).execute
        self._lock = threading.RLock()
        """Large requests are read in threads."""

    def __len__(self) -> int:
        return self._number("SELECT count(*) FROM attempts")

    @property
    def size(self) -> int:
        """Approximate bytes stored."""
        return self._number("SELECT size FROM total")

    def find(self, attempt: Attempt, kind: str, entry: str | bytes) -> Entry | None:
        """An entry of an attempt; None if there is none."""
        with self._lock:
            return self._run(
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
        items: Sequence[Json],
        num_instructions: int = 0,
    ) -> None:
        """Keep a reply; the first `num_instructions` messages belonged to its request alone. Without a `body` it can be
        continued and not retrieved."""
        conversation = (*messages, answer)
        chain = (*digests, extend_digest(digests[-1], answer))
        with self._change(attempt) as key:
            for index in range(len(messages), num_instructions - 1, -1):
                message = "message", chain[index + 1], chain[index], None, dumps(conversation[index])
                if not self._put(key, *message, instead="IGNORE"):
                    break  # it is stored, and so are the messages before it
            self._put(key, "reply", response_id, chain[-1], chain[num_instructions], body)
            for item in items:
                self._put(key, "item", item["id"], None, None, dumps(item))

    def add_turn(self, attempt: Attempt, turn: bytes, blocks: list[Json]) -> None:
        """Store a turn as its provider wrote it and wants it back, by its key (`content_parts.turn_key`)."""
        with self._change(attempt) as key:
            self._put(key, "turn", turn, None, None, dumps(blocks))

    def note_provider(self, attempt: Attempt, response_id: str, provider: str, pending: Any = None) -> None:
        """Note that a forwarded reply is stored by its provider; `pending` is its call as JSON values, if it is not
        complete."""
        with self._change(attempt) as key:
            self._put(key, "provider", response_id, provider, None, dumps(pending) if pending else None)

    def take_pending(self, attempt: Attempt, response_id: str) -> Any:
        """The call whose reply was not complete, once; None if there is none."""
        with self._change(attempt) as key:
            found = self.find(attempt, "provider", response_id)
            if found is None or found[2] is None:
                return None
            self._put(key, "provider", response_id, found[0], None, None)
        return loads(found[2])

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
        with self._change(attempt) as key:
            self._run("DELETE FROM entries WHERE attempt = ? AND kind = 'reply' AND id = ?", (key, response_id))

    def forget(self, attempt: Attempt) -> None:
        """Drop everything of an attempt, once it has ended."""
        known = "FROM attempts WHERE rollout_id = ? AND attempt_id = ?"
        if self._number(f"SELECT count(*) {known}", *attempt):
            with self._transaction():
                self._run(f"DELETE {known}", attempt)

    def _put(
        self, key: int, kind: str, entry: str | bytes, *columns: str | bytes | None, instead: str = "REPLACE"
    ) -> bool:
        """Add an entry (parent, first, value) to those of an attempt. `instead`: what to do if there is one. Whether it
        was added."""
        put = f"INSERT OR {instead} INTO entries VALUES (?, ?, ?, ?, ?, ?)"
        return self._run(put, (key, kind, entry, *columns)).rowcount > 0

    @contextmanager
    def _change(self, attempt: Attempt) -> Generator[int]:
        """A transaction that changes what is stored of an attempt, whose key it yields, and makes room for it."""
        with self._transaction():
            touch = (
                "INSERT INTO attempts (rollout_id, attempt_id, used) VALUES (?, ?, ?)"
                " ON CONFLICT DO UPDATE SET used = excluded.used RETURNING key"
            )
            ((key,),) = self._run(touch, (*attempt, time.monotonic_ns())).fetchall()
            yield key
            while self.size > self._max_bytes:
                self._run("DELETE FROM attempts WHERE key = (SELECT key FROM attempts ORDER BY used LIMIT 1)")

    @contextmanager
    def _transaction(self) -> Generator[None]:
        with self._lock:
            self._run("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._run("ROLLBACK")
                raise
            self._run("COMMIT")

    def _number(self, query: str, *values: Any) -> int:
        with self._lock:
            return self._run(query, values).fetchone()[0]
