"""Signed and encrypted reasoning, which its provider wants back unchanged.

Anthropic signs or redacts what a model thinks, and continues thinking over a tool's result only if the blocks come back
unchanged; OpenAI does the same with the `encrypted_content` of reasoning items. Callers of other dialects have no place
for them: `response_store` stores them for the attempt, by the turn they belong to (`turn_key`). Anthropic's blocks can
also travel in the `encrypted_content` of a reasoning item, which needs no memory. Pure.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final, cast

from agentlightning.util.json_values import dumps, loads

Block = dict[str, Any]

_MARK: Final = "agl1."
_KINDS: Final = ("thinking", "redacted_thinking")


def needs_echo(block: Mapping[str, Any]) -> bool:
    """Whether a content block or an output item is reasoning that its provider wants back."""
    kind = block.get("type")
    if kind == "reasoning":
        return bool(block.get("encrypted_content"))
    return kind == "redacted_thinking" or (kind == "thinking" and bool(block.get("signature")))


def encode_signed_reasoning(block: Block) -> str:
    """A reasoning block as the `encrypted_content` of a reasoning item. It hides nothing from the caller."""
    return _MARK + base64.urlsafe_b64encode(dumps(block)).decode()


def decode_signed_reasoning(content: Any) -> list[Block]:
    """The reasoning block in an `encrypted_content`; none if we did not encode it."""
    if not isinstance(content, str) or not content.startswith(_MARK):
        return []
    try:
        block = loads(base64.urlsafe_b64decode(content[len(_MARK) :]))
    except (binascii.Error, ValueError):
        return []
    if not isinstance(block, dict) or cast("Block", block).get("type") not in _KINDS:
        return []
    return [cast("Block", block)]
