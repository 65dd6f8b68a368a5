"""What a provider wants back unchanged with a turn: signed and encrypted reasoning, and signatures of tool calls.

Anthropic signs or redacts what a model thinks, and continues thinking over a tool's result only if the blocks come back
unchanged; OpenAI does the same with the `encrypted_content` of reasoning items, and servers of chat completions with
fields of the message (`openai.chat_events.ECHOED`), here a block of the type `CHAT_TURN`. `response_store` stores them
for the attempt, by the turn they belong to (`turn_key`). They also travel with what a caller sends back of its own
accord, which needs no memory: the `encrypted_content` of a reasoning item, the signature of a thinking block. Pure.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final, cast

from agentlightning.util.json_values import dumps, loads

Block = dict[str, Any]

_MARK: Final = "agl1."
CHAT_TURN: Final = "chat_turn"
"""Type of a block with what a server of chat completions wants back: `message` has fields of the assistant's message,
`calls` the `extra_content` of tool calls by id, `provider` the name of the provider that wrote it."""
THOUGHTS: Final = ("thinking", "redacted_thinking")
"""Types of Anthropic's reasoning blocks."""
_KINDS: Final = (*THOUGHTS, "reasoning", CHAT_TURN)


def needs_echo(block: Mapping[str, Any]) -> bool:
    """Whether a content block or an output item is reasoning that its provider wants back."""
    kind = block.get("type")
    if kind == "reasoning":
        return bool(block.get("encrypted_content"))
    return kind in ("redacted_thinking", CHAT_TURN) or (kind == "thinking" and bool(block.get("signature")))


def encode_signed_reasoning(*blocks: Block) -> str:
    """Blocks as an `encrypted_content` or a signature. It hides nothing from the caller."""
    return _MARK + base64.urlsafe_b64encode(dumps(blocks)).decode()


def decode_signed_reasoning(content: Any) -> list[Block]:
    """The blocks in an `encrypted_content` or a signature; none if we did not encode it."""
    if not isinstance(content, str) or not content.startswith(_MARK):
        return []
    try:
        blocks = loads(base64.urlsafe_b64decode(content[len(_MARK) :]))
    except (binascii.Error, ValueError):
        return []
    found = cast("list[Any]", blocks) if isinstance(blocks, list) else []
    return [cast("Block", block) for block in found if isinstance(block, dict) and block.get("type") in _KINDS]
