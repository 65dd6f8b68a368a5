"""Thoughts that their provider wants back exactly as they were.

Anthropic signs what a model thinks, or hides it (`redacted_thinking`), and goes on thinking over a tool's result only
where the blocks come back unchanged; OpenAI does the same with the `encrypted_content` of reasoning items. A caller of
another dialect has no place for them: they are remembered for its attempt, with the turn they belong to (`turn_key`),
or, of Anthropic's, travel in the `encrypted_content` of a reasoning item, which needs no memory. Pure; the memory is
`gateway.kept`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import orjson

from agentlightning.chat.base import Message
from agentlightning.gateway.dialects.message_digest import same_meaning

Block = dict[str, Any]

_MARK: Final = "agl1."
_KINDS: Final = ("thinking", "redacted_thinking")


def needs_echo(block: Mapping[str, Any]) -> bool:
    """Whether a block of content, or an item, is a thought that its provider wants back."""
    kind = block.get("type")
    if kind == "reasoning":
        return bool(block.get("encrypted_content"))
    return kind == "redacted_thinking" or (kind == "thinking" and bool(block.get("signature")))


def encode_signed_reasoning(block: Block) -> str:
    """A thought as the `encrypted_content` of a reasoning item. Nothing in it is secret from its caller."""
    return _MARK + base64.urlsafe_b64encode(orjson.dumps(block)).decode()


def decode_signed_reasoning(content: Any) -> list[Block]:
    """The thought in an `encrypted_content`; nothing of one that is not ours."""
    if not isinstance(content, str) or not content.startswith(_MARK):
        return []
    try:
        block = orjson.loads(base64.urlsafe_b64decode(content[len(_MARK) :]))
    except (binascii.Error, ValueError):
        return []
    if not isinstance(block, dict) or cast("Block", block).get("type") not in _KINDS:
        return []
    return [cast("Block", block)]


def turn_key(previous: Message | None, turn: Message) -> bytes:
    """What an assistant's turn is found by when a client sends it back: the ids of its calls, which are its own, or
    else its words and what they answered. History before that may be cut or changed meanwhile."""
    calls: Sequence[Mapping[str, Any]] = turn.get("tool_calls") or ()
    if calls:
        meaning = orjson.dumps([call.get("id") for call in calls])
    else:
        meaning = (same_meaning(previous) if previous else b"") + b"\n" + same_meaning(turn)
    return hashlib.blake2b(meaning, digest_size=16).digest()
