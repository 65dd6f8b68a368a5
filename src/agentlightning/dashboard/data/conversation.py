"""The model calls of an attempt as a conversation: each turn with what was new in its request, and its answer.

A request repeats the conversation so far. Shown is what it adds to the last call that it continues: one of the same
agent whose messages it begins with. A call that continues none starts a new thread, and is shown whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import orjson

from agentlightning import span as names
from agentlightning.assemble.model_calls import is_call
from agentlightning.dashboard.data.text import LONG, as_text, limited, tells_failure
from agentlightning.span import Span
from agentlightning.util.common_prefix import common_prefix_length
from agentlightning.util.json_values import Json, recorded_objects

Message = Json
IMAGE: Final = ("data:image/png;", "data:image/jpeg;", "data:image/gif;", "data:image/webp;")
"""What is shown as an image: nothing is loaded from elsewhere, and no SVG, which may hold a script."""
MOST_IMAGE: Final = 4_000_000


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call."""

    span: Span
    new: tuple[Message, ...]
    """Messages of the request that no earlier turn shows."""
    answer: tuple[Message, ...]
    starts: bool
    """Whether it starts a thread."""
    thread: int


def turns_of(spans: Iterable[Span]) -> list[Turn]:
    """The model calls among the spans of an attempt, failed ones included, in order."""
    found: list[Turn] = []
    threads: list[list[str]] = []
    """What each thread has said, a line a message, without ids and times."""
    for span in sorted((span for span in spans if is_call(span)), key=lambda span: span.sequence_id):
        request, answer = messages_of(span, names.INPUT_MESSAGES), messages_of(span, names.OUTPUT_MESSAGES)
        lines = [_line(message) for message in request]
        thread, known = _continued(threads, lines)
        if thread is None:
            thread = len(threads)
            threads.append([])
        threads[thread] = [*lines, *map(_line, answer)]
        found.append(Turn(span, tuple(request[known:]), tuple(answer), known == 0, thread))
    return found


def _continued(threads: Sequence[Sequence[str]], lines: Sequence[str]) -> tuple[int | None, int]:
    """The thread that a request continues, and how many of its messages are known."""
    best, known = None, 0
    for index, said in enumerate(threads):
        same = common_prefix_length(lines, said)
        if same > known and same >= len(said) - 1:  # an answer may come back in another form
            best, known = index, same
    if best is not None and known < len(threads[best]) and known < len(lines):
        known += _is_assistant(lines[known])
    return best, known


def _is_assistant(line: str) -> int:
    return line.startswith("assistant\0")


def _line(message: Message) -> str:
    parts = [{k: v for k, v in part.items() if k != "id"} for part in parts_of(message)]
    return f"{message.get('role')}\0{orjson.dumps(parts, default=repr, option=orjson.OPT_SORT_KEYS).decode()}"


def messages_of(span: Span, attribute: str) -> list[Message]:
    """The messages in an attribute; those that cannot be read are left out."""
    return recorded_objects(span.attributes.get(attribute))


def parts_of(message: Message) -> list[Json]:
    parts = message.get("parts")
    if isinstance(parts, list):
        return [cast(Json, each) for each in cast("list[Any]", parts) if isinstance(each, dict)]
    content = message.get("content")
    return [] if content is None else [{"type": "text", "content": content}]


def tool_results(messages: Iterable[Message]) -> list[Any]:
    """The results of tools among messages, in order."""
    return [
        part.get("response", part.get("result"))
        for message in messages
        for part in parts_of(message)
        if part.get("type") == "tool_call_response"
    ]


# -- as JSON -----------------------------------------------------------------------------------------------------------


def message_json(message: Message) -> Json:
    """A message for the page: its role and parts of kinds text, reasoning, tool_call, tool_result, image and other."""
    return {"role": str(message.get("role", "?"))[:40], "parts": [_part(each) for each in parts_of(message)]}


def _part(part: Json) -> Json:
    kind = str(part.get("type", ""))
    if kind == "tool_call":
        arguments = limited(as_text(part.get("arguments")))
        return {"kind": "tool_call", "name": str(part.get("name")), "text": arguments, "id": part.get("id")}
    if kind == "tool_call_response":
        result = part.get("response", part.get("result"))
        failed = tells_failure(result)
        return {"kind": "tool_result", "text": limited(as_text(result)), "failed": failed, "id": part.get("id")}
    if (address := _image(part)) is not None:
        return address
    content = part.get("content")
    if content is None:
        return {"kind": "other", "type": kind, "text": limited(as_text(part))}
    return {"kind": "reasoning" if kind == "reasoning" else "text", "text": limited(as_text(content))}


def _image(part: Json) -> Json | None:
    kind, mime = str(part.get("type", "")), str(part.get("mime_type", ""))
    modality = str(part.get("modality", ""))
    if kind not in ("image", "image_url", "blob", "uri") or (kind in ("blob", "uri") and modality not in ("", "image")):
        return None
    nested = part.get("image_url")
    url = part.get("uri") or part.get("url") or (nested.get("url") if isinstance(nested, dict) else nested)
    if kind == "blob" and isinstance(part.get("content"), str):
        url = f"data:{mime or 'image/png'};base64,{part['content']}"
    text = url if isinstance(url, str) else as_text(part)
    shown = text.startswith(IMAGE) and len(text) <= MOST_IMAGE
    return {"kind": "image", "source": text if shown else None, "text": "" if shown else text[: min(LONG, 500)]}
