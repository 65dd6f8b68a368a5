"""Digests of conversations: equal for messages that mean the same, however a client spells them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from agentlightning.chat.base import Message
from agentlightning.util.json_values import dumps, loads


def same_meaning(message: Message) -> bytes:
    """A message as bytes that are equal for messages with the same meaning.

    Content None equals "", a list of text parts equals their text, and tool-call arguments compare as JSON. The `name`
    that clients add to an assistant's message and unknown keys are ignored.
    """
    role = message["role"]
    calls = [_call_meaning(call) for call in message.get("tool_calls") or ()]
    name = None if role == "assistant" else message.get("name")
    return dumps([role, _content_meaning(message.get("content")), calls, message.get("tool_call_id"), name])


def _content_meaning(content: Any) -> Any:
    """Content of text parts as one string; content with images or files as its parts."""
    if isinstance(content, list) and any(part.get("type", "text") != "text" for part in content):
        return content
    return text_of(content)


def text_of(content: Any) -> str:
    """The text of a message's content, which is None, a string or a list of text parts."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def _call_meaning(call: dict[str, Any]) -> list[Any]:
    function = call["function"]
    return [call.get("id"), function["name"], normalized_arguments(function["arguments"])]


def normalized_arguments(arguments: str) -> str:
    """Arguments as canonical JSON with sorted keys; unchanged if they are not JSON."""
    try:
        return dumps(loads(arguments), option=orjson.OPT_SORT_KEYS).decode()
    except orjson.JSONDecodeError:
        return arguments


def extend_digest(digest: bytes, message: Message) -> bytes:
    """The digest of a conversation once `message` is appended."""
    return hashlib.blake2b(same_meaning(message), digest_size=16, key=digest).digest()


def message_digests(messages: Sequence[Message]) -> tuple[bytes, ...]:
    """The digest of each prefix of a conversation, from the empty one to the whole."""
    digests = [b"agentlightning"]
    for message in messages:
        digests.append(extend_digest(digests[-1], message))
    return tuple(digests)


def turn_key(previous: Message | None, turn: Message) -> bytes:
    """The key to look up a turn of the assistant that a client sends back: the ids of its tool calls, which are unique,
    or else its text and the message before it. Earlier history may be cut or changed meanwhile."""
    calls: Sequence[Mapping[str, Any]] = turn.get("tool_calls") or ()
    if calls:
        meaning = dumps([call.get("id") for call in calls])
    else:
        meaning = (same_meaning(previous) if previous else b"") + b"\n" + same_meaning(turn)
    return hashlib.blake2b(meaning, digest_size=16).digest()
