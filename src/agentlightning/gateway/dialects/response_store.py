"""Replies that later requests may name, for each attempt: `previous_response_id`, item references, retrieval; and
turns that a provider wants back as it said them (`gateway.sealed`).

A conversation is kept as a tree of messages, each stored once, so that a client that sends its whole history with
every call costs no more than one that sends what is new. Nothing outlives its attempt, or the process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from agentlightning.chat.base import Message
from agentlightning.gateway.dialects.message_digest import extend_digest
from agentlightning.gateway.errors import ApiError, bad_request

Attempt = tuple[str, str]
"""(rollout_id, attempt_id)."""
_OF_AN_ENTRY: Final = 100
"""Bytes, about."""


@dataclass(frozen=True, slots=True)
class _Reply:
    tip: bytes
    """Digest of its conversation, answer included."""
    root: bytes
    """Where the conversation begins: after what belonged to the request alone."""
    body: bytes | None
    """As it was sent; None where the caller asked not to store it."""


@dataclass(slots=True)
class _Memory:
    replies: dict[str, _Reply] = field(default_factory=dict[str, _Reply])
    messages: dict[bytes, tuple[bytes, Message]] = field(default_factory=dict[bytes, tuple[bytes, Message]])
    """Digest of a conversation -> (digest without its last message, that message)."""
    items: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    blocks: dict[bytes, list[dict[str, Any]]] = field(default_factory=dict[bytes, list[dict[str, Any]]])
    providers: dict[str, str] = field(default_factory=dict[str, str])
    """Id of a reply that its provider keeps -> the provider's name."""
    size: int = 0


class ResponseLookup:
    """What the requests of one attempt can name."""

    def __init__(self, memory: _Memory | None = None) -> None:
        self._memory = memory or _Memory()

    def messages(self, response_id: str) -> list[Message]:
        """The conversation up to a reply and with it. Raises ApiError 400 for a reply that is not kept."""
        reply = self._memory.replies.get(response_id)
        if reply is None:
            message = (
                f"previous_response_id={response_id!r} is not kept here: replies are kept while their attempt goes on; "
                "send the whole conversation as input"
            )
            raise ApiError(400, message, code="previous_response_not_found", param="previous_response_id")
        messages: list[Message] = []
        digest = reply.tip
        while digest != reply.root:
            digest, message = self._memory.messages[digest]
            messages.append(message)
        return messages[::-1]

    def item(self, item_id: str) -> dict[str, Any]:
        """An item of a reply. Raises ApiError 400 for one that is not kept."""
        if (item := self._memory.items.get(item_id)) is None:
            raise bad_request("input", f"the item {item_id!r} is not kept here; send the item itself")
        return item

    def turn(self, turn: bytes) -> list[dict[str, Any]]:
        """A turn as its provider said it (`Kept.keep_blocks`); empty where it is not kept."""
        return self._memory.blocks.get(turn, [])


class ResponseStore:
    """The replies of the attempts that called lately; the least recently used are forgotten above `max_bytes`."""

    def __init__(self, max_bytes: int = 256 * 1024 * 1024) -> None:
        self._max_bytes = max_bytes
        self._attempts: OrderedDict[Attempt, _Memory] = OrderedDict()
        self.size = 0
        """Bytes kept, about."""

    def __len__(self) -> int:
        return len(self._attempts)

    def lookup(self, attempt: Attempt | None) -> ResponseLookup:
        """What an attempt can name; nothing where there is none."""
        return ResponseLookup(self._attempts.get(attempt) if attempt else None)

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
        """Keep a reply; the first `leading` messages belonged to its request alone. Without a `body` it can be
        continued and not retrieved."""
        memory = self._attempts.setdefault(attempt, _Memory())
        self._attempts.move_to_end(attempt)
        tip = extend_digest(digests[-1], answer)
        before = memory.size
        chain = zip(digests[num_instructions:], (*digests[num_instructions + 1 :], tip), strict=True)
        for (parent, digest), message in zip(chain, (*messages[num_instructions:], answer), strict=True):
            if digest not in memory.messages:
                memory.messages[digest] = parent, message
                memory.size += len(orjson.dumps(message))
        memory.replies[response_id] = _Reply(tip, digests[num_instructions], body)
        memory.size += len(body or b"")
        memory.items.update((item["id"], dict(item)) for item in items)
        self.size += memory.size - before
        self._make_room()

    def add_turn(self, attempt: Attempt, turn: bytes, blocks: list[dict[str, Any]]) -> None:
        """Keep a turn as its provider said it, and wants it back, under its key (`sealed.turn_key`)."""
        memory = self._attempts.setdefault(attempt, _Memory())
        self._attempts.move_to_end(attempt)
        before = memory.blocks.get(turn)
        grown = len(orjson.dumps(blocks)) - (len(orjson.dumps(before)) if before is not None else 0)
        memory.blocks[turn] = blocks
        memory.size += grown
        self.size += grown
        self._make_room()

    def note_provider(self, attempt: Attempt, response_id: str, provider: str) -> None:
        """A reply that was passed on is kept by its provider."""
        memory = self._attempts.setdefault(attempt, _Memory())
        self._attempts.move_to_end(attempt)
        if response_id not in memory.providers:
            memory.size += len(response_id) + _OF_AN_ENTRY
            self.size += len(response_id) + _OF_AN_ENTRY
        memory.providers[response_id] = provider
        self._make_room()

    def provider_of(self, attempt: Attempt, response_id: str) -> str | None:
        """The name of the provider that keeps a reply to this attempt; None: none that is known."""
        memory = self._attempts.get(attempt)
        return memory.providers.get(response_id) if memory else None

    def body(self, attempt: Attempt, response_id: str) -> bytes:
        """A reply as it was sent. Raises ApiError 404 for one that is not stored."""
        memory = self._attempts.get(attempt)
        reply = memory.replies.get(response_id) if memory else None
        if reply is None or reply.body is None:
            raise ApiError(404, f"no response {response_id!r} is stored for this attempt", code="response_not_found")
        return reply.body

    def delete(self, attempt: Attempt, response_id: str) -> None:
        """Forget one reply. Raises ApiError 404 as `body` does."""
        size = len(self.body(attempt, response_id))
        memory = self._attempts[attempt]
        del memory.replies[response_id]
        memory.size -= size
        self.size -= size

    def forget(self, attempt: Attempt) -> None:
        """Drop what is kept of an attempt, once it has ended."""
        if memory := self._attempts.pop(attempt, None):
            self.size -= memory.size

    def _make_room(self) -> None:
        while self._attempts and self.size > self._max_bytes:
            _, memory = self._attempts.popitem(last=False)
            self.size -= memory.size
