"""The text that follows a known answer in the rendering of a whole conversation.

Returned only if the template is proven to write the earlier part as it did when the answer was sampled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from agentlightning.chat.base import ChatFormat, Message
from agentlightning.chat.reasoning import find_reasoning_markers, strip_opening_marker, strip_reasoning
from agentlightning.gateway.dialects.message_digest import normalized_arguments, text_of


def suffix_after(
    chat: ChatFormat,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None,
    length: int,
    ended: bool,
) -> tuple[str, str] | None:
    """(text before, text after) `messages[length - 1]`, the answer of a known path; see `_suffix`. The reasoning of
    earlier answers is in the tokens of the path, so it does not matter whether the template or the client leaves it
    out."""
    messages = [*(_without_reasoning(message) for message in messages[:length]), *messages[length:]]
    return _suffix(chat, chat.render(messages, tools), messages, tools, length, ended)


def _without_reasoning(message: Message) -> Message:
    if "reasoning_content" not in message:
        return message
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def _suffix(
    chat: ChatFormat,
    text: str,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None,
    length: int,
    ended: bool,
) -> tuple[str, str] | None:
    """The texts up to the answer `messages[length - 1]` and after it within `text`, the rendering of all messages. The
    token that ends the answer is before, if it `ended`.

    None unless the template provably writes the earlier part as before. Either the rendering up to the answer is a
    prefix of the whole rendering; or, since some templates write the last message differently, everything before the
    answer is the same, and the answer parses to the same message.
    """
    ends = _end_of_turn_texts(chat)
    parts = _by_prefix(chat, text, messages[:length], tools, ends)
    parts = parts or _by_reading(chat, text, messages[:length], tools, ends)
    if parts is None:
        return None
    start, after = parts
    return text[: after if ended else start], text[after if ended else start :]


def _end_of_turn_texts(chat: ChatFormat) -> list[str]:
    return [text for token in chat.eos_token_ids if (text := chat.decode([token]))]


def _by_prefix(
    chat: ChatFormat, text: str, history: Sequence[Message], tools: Sequence[dict[str, Any]] | None, ends: list[str]
) -> tuple[int, int] | None:
    """Where the token that ends the answer starts and ends in `text`."""
    prefix = chat.render(history, tools, add_generation_prompt=False)
    # At the first of several ends the sampler stops.
    found = re.search(rf"({'|'.join(map(re.escape, ends))}|\s)+\Z", prefix) if text.startswith(prefix) else None
    places = [(place, place + len(end)) for end in ends if found and (place := prefix.find(end, found.start())) >= 0]
    return min(places, default=None)


def _by_reading(
    chat: ChatFormat, text: str, history: Sequence[Message], tools: Sequence[dict[str, Any]] | None, ends: list[str]
) -> tuple[int, int] | None:
    markers = find_reasoning_markers(chat)
    before = strip_opening_marker(markers, chat.render(history[:-1], tools, add_generation_prompt=True))
    if not text.startswith(before):
        return None
    places = [(place, end) for end in ends if (place := text.find(end, len(before))) >= 0]
    if not places:
        return None
    place, end = min(places)
    written = chat.unescape(text[len(before) : place])
    candidates = {written, strip_reasoning(markers, written)}
    return (
        (place, place + len(end))
        if any(_reads_as(chat, candidate, history[-1], tools) for candidate in candidates)
        else None
    )


def _reads_as(chat: ChatFormat, written: str, answer: Message, tools: Sequence[dict[str, Any]] | None) -> bool:
    parsed = chat.parse(written, tools)
    calls = [(call.name, normalized_arguments(call.arguments)) for call in parsed.tool_calls]
    meant = [call["function"] for call in answer.get("tool_calls") or ()]
    if calls != [(function["name"], normalized_arguments(function["arguments"])) for function in meant]:
        return not meant and written.strip() == text_of(answer.get("content")).strip()
    return (parsed.content or "").strip() == text_of(answer.get("content")).strip()
