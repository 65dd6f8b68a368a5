"""Stores the replies that later requests of an attempt may refer to, by `previous_response_id`, item or retrieval.

It also stores the turns that a provider wants back unchanged (`answer.needs_echo`). Conversations are stored as a tree
of messages, each message once, so that a client that sends its whole history with every call costs no more than one
that sends only what is new. Nothing outlives its attempt, or the process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning.chat.base import Message
from agentlightning.gateway.dialects.content_parts import extend_digest
from agentlightning.gateway.errors import ApiError, bad_request
from agentlightning.util.json_values import dumps

Attempt = tuple[str, str]
"""(rollout_id, attempt_id)."""
_ENTRY_BYTES: Final = 100
"""Approximate size of an entry without content."""


@dataclass(frozen=True, slots=True)
class _Reply:
    last_digest: bytes
    """Digest of its conversation including the answer."""
    first_digest: bytes
    """Digest of the messages that belonged to the request alone, after which the conversation starts."""
    body: bytes | None
    """The body as sent; None if the caller asked not to store it."""


@dataclass(slots=True)
class ResponseLookup:
    """What the requests of one attempt can refer to."""

    replies: dict[str, _Reply] = field(default_factory=dict[str, _Reply])
    last_messages: dict[bytes, tuple[bytes, Message]] = field(default_factory=dict[bytes, tuple[bytes, Message]])
    """Digest of a conversation -> (digest without its last message, that message)."""
    items: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    turns: dict[bytes, list[dict[str, Any]]] = field(default_factory=dict[bytes, list[dict[str, Any]]])
    providers: dict[str, tuple[str, Any]] = field(default_factory=dict[str, tuple[str, Any]])
    """Id of a reply that its provider stores -> (the provider's name, its call while it is not complete)."""
    size: int = 0

    def messages(self, response_id: str) -> list[Message]:
        """The conversation up to and including a reply. Raises ApiError 400 for a reply that is not stored."""
        reply = self.replies.get(response_id)
        if reply is None:
            message = (
                f"previous_response_id={response_id!r} is not stored here: replies are stored while their attempt runs;"
                " send the whole conversation as input"
            )
            raise ApiError(400, message, code="previous_response_not_found", param="previous_response_id")
        messages: list[Message] = []
        digest = reply.last_digest
        while digest != reply.first_digest:
            digest, message = self.last_messages[digest]
            messages.append(message)
        return messages[::-1]

    def item(self, item_id: str) -> dict[str, Any]:
        """An item of a reply. Raises ApiError 400 for an item that is not stored."""
        if (item := self.items.get(item_id)) is None:
            raise bad_request("input", f"the item {item_id!r} is not stored here; send the item itself")
        return item

    def turn(self, turn: bytes) -> list[dict[str, Any]]:
        """A turn as its provider wrote it (`ResponseStore.add_turn`); empty if it is not stored."""
        return self.turns.get(turn, [])


class ResponseStore:
    """The replies of recently active attempts; above `max_bytes`, the least recently used attempts are evicted."""

    def __init__(self, max_bytes: int = 256 * 1024 * 1024) -> None:
        self._max_bytes = max_bytes
        self._attempts: OrderedDict[Attempt, ResponseLookup] = OrderedDict()
        self.size = 0
        """Approximate bytes stored."""

    def __len__(self) -> int:
        return len(self._attempts)

    def lookup(self, attempt: Attempt | None) -> ResponseLookup:
        """What the requests of an attempt can refer to; nothing without an attempt."""
        return (self._attempts.get(attempt) if attempt else None) or ResponseLookup()

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
        memory, grown = self._touch(attempt), len(body or b"")
        last_digest = extend_digest(digests[-1], answer)
        chain = zip(digests[num_instructions:], (*digests[num_instructions + 1 :], last_digest), strict=True)
        for (parent, digest), message in zip(chain, (*messages[num_instructions:], answer), strict=True):
            if digest not in memory.last_messages:
                memory.last_messages[digest] = parent, message
                grown += len(dumps(message))
        memory.replies[response_id] = _Reply(last_digest, digests[num_instructions], body)
        memory.items.update((item["id"], dict(item)) for item in items)
        self._grow(memory, grown)

    def add_turn(self, attempt: Attempt, turn: bytes, blocks: list[dict[str, Any]]) -> None:
        """Store a turn as its provider wrote it and wants it back, by its key (`content_parts.turn_key`)."""
        memory = self._touch(attempt)
        before = memory.turns.get(turn)
        memory.turns[turn] = blocks
        self._grow(memory, len(dumps(blocks)) - (len(dumps(before)) if before is not None else 0))

    def note_provider(self, attempt: Attempt, response_id: str, provider: str, pending: Any = None) -> None:
        """Note that a forwarded reply is stored by its provider; `pending` is its call, if it is not complete."""
        memory = self._touch(attempt)
        known = response_id in memory.providers
        memory.providers[response_id] = provider, pending
        if not known:
            self._grow(memory, len(response_id) + _ENTRY_BYTES + (len(dumps(pending.data)) if pending else 0))

    def take_pending(self, attempt: Attempt, response_id: str) -> Any:
        """The call whose reply was not complete, once; None if there is none."""
        memory = self._attempts.get(attempt)
        name, pending = memory.providers.get(response_id, ("", None)) if memory else ("", None)
        if memory and pending:
            memory.providers[response_id] = name, None
        return pending

    def provider_of(self, attempt: Attempt, response_id: str) -> str | None:
        """The name of the provider that stores a reply to this attempt; None if it is not known."""
        memory = self._attempts.get(attempt)
        return memory.providers.get(response_id, (None,))[0] if memory else None

    def body(self, attempt: Attempt, response_id: str) -> bytes:
        """The body of a reply as sent. Raises ApiError 404 for a reply that is not stored."""
        memory = self._attempts.get(attempt)
        reply = memory.replies.get(response_id) if memory else None
        if reply is None or reply.body is None:
            raise ApiError(404, f"no response {response_id!r} is stored for this attempt", code="response_not_found")
        return reply.body

    def delete(self, attempt: Attempt, response_id: str) -> None:
        """Delete one reply. Raises ApiError 404 as `body` does."""
        size = len(self.body(attempt, response_id))
        memory = self._attempts[attempt]
        del memory.replies[response_id]
        self._grow(memory, -size)

    def forget(self, attempt: Attempt) -> None:
        """Drop everything of an attempt, once it has ended."""
        if memory := self._attempts.pop(attempt, None):
            self.size -= memory.size

    def _touch(self, attempt: Attempt) -> ResponseLookup:
        memory = self._attempts.setdefault(attempt, ResponseLookup())
        self._attempts.move_to_end(attempt)
        return memory

    def _grow(self, memory: ResponseLookup, size: int) -> None:
        memory.size += size
        self.size += size
        while self._attempts and self.size > self._max_bytes:
            _, memory = self._attempts.popitem(last=False)
            self.size -= memory.size
