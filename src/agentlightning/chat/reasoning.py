"""Separates a model's reasoning from its answer, by the markers that its own template writes.

A template that knows `reasoning_content` shows how the model marks a thought: we let it write one and look. One that
knows none shows it by what it leaves out of an answer (DeepSeek R1), or by beginning a thought in the prompt. A
template that does neither has no markers, and then nothing is separated.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from agentlightning.chat.base import ChatFormat, Message, ThoughtMarkers
from agentlightning.errors import ConfigError

_PROBE = "agentlightning probe"
_TAG = r"(<[^<>]+>|\[[^\[\]]+\])"
_BEFORE = re.compile(_TAG + r"\s*\Z")
_CHANNEL = re.compile(r"<\|channel\|>\w+<\|message\|>")
_THINK = ThoughtMarkers("<think>", "</think>", False)
_AFTER = re.compile(r"\A\s*" + _TAG)


@lru_cache(maxsize=64)
def find_reasoning_markers(chat: ChatFormat) -> ThoughtMarkers | None:
    """The reasoning markers of a chat template; None if it has none."""
    question: Message = {"role": "user", "content": "?"}
    answer: Message = {"role": "assistant", "content": "!", "reasoning_content": _PROBE}
    written = {**answer, "content": f"{_THINK.start}{_PROBE}{_THINK.end}!"}
    del written["reasoning_content"]
    try:
        text = chat.render([question, answer], add_generation_prompt=False)
        opening = chat.render([question])
        stripped = _PROBE not in chat.render([question, written], add_generation_prompt=False)
    except ConfigError:
        return None
    before, found, after = text.partition(_PROBE)
    if not found:
        opened = opening.rstrip().endswith(_THINK.start)
        return replace(_THINK, opened=opened) if opened or stripped else None
    if before.startswith(opening) and _CHANNEL.fullmatch(before, len(opening)) and (end := _AFTER.search(after)):
        return ThoughtMarkers(before[len(opening) :], end[1], False)  # Harmony: a message of its own.
    start, end = _BEFORE.search(before), _AFTER.search(after)
    # Only a pair of tags: some templates render reasoning as a message of its own.
    if not start or not end or end[1] != f"{start[1][0]}/{start[1][1:]}":
        return None
    return ThoughtMarkers(start[1], end[1], opening.rstrip().endswith(start[1]))


def strip_reasoning(markers: ThoughtMarkers | None, text: str) -> str:
    """The text of an answer without the reasoning it may begin with."""
    begins = text.lstrip()
    if markers is None or not begins.startswith(markers.start):
        return text
    _, found, rest = begins.partition(markers.end)
    return rest.lstrip() if found else text


def strip_opening_marker(markers: ThoughtMarkers | None, text: str) -> str:
    """A prompt without the reasoning marker that the template opens for the answer."""
    return text[: text.rindex(markers.start)] if markers and markers.opened and markers.start in text else text


def split_thought(markers: ThoughtMarkers, answer: Message) -> tuple[str, str]:
    """(the thought of an assistant's message, what the model writes from after the start marker to the answer); both
    empty where it has none."""
    if thought := answer.get("reasoning_content"):
        return thought.strip(), f"\n{thought.strip()}\n{markers.end}\n\n"
    content = answer.get("content")
    begins = content.lstrip() if isinstance(content, str) else ""
    if not begins.startswith(markers.start) or markers.end not in begins:
        return "", ""
    thought, _, rest = begins.removeprefix(markers.start).partition(markers.end)
    return thought.strip(), thought + markers.end + rest[: len(rest) - len(rest.lstrip())]
