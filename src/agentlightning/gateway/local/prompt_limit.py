"""Prompts that no context holds: refused by their length, before they are encoded whole."""

from __future__ import annotations

from agentlightning.chat.base import ChatFormat
from agentlightning.errors import ContextLengthError


def encode_within(chat: ChatFormat, text: str, room: int | None, context: int | None = None) -> list[int]:
    """The tokens of a rendered text. Raises ContextLengthError where they are certainly more than `room`, what is left
    of a `context`."""
    if room is not None and (count := chat.min_token_count(text, room)) > room:
        raise ContextLengthError(
            f"the prompt has more than {count + (context or room) - room} tokens and the context holds "
            f"{context or room}; shorten the prompt, or use a model with a longer context"
        )
    return chat.encode(text)
