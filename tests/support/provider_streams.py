"""Answers and streams as providers send them, for a `ScriptedProvider`: chat completions, messages, responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from tests.support.provider import Json, chat_usage


def chat_events(
    pieces: Sequence[str], calls: Sequence[Json] = (), usage: tuple[int, int] = (10, 5), thought: str = ""
) -> list[bytes]:
    """A stream of chat completions. The arguments of each call come in two parts."""
    deltas: list[Json] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": thought}] if thought else []
    deltas += [{"content": piece} for piece in pieces]
    for index, call in enumerate(calls):
        function, half = call["function"], len(call["function"]["arguments"]) // 2
        parts = function["arguments"][:half], function["arguments"][half:]
        begun = {"index": index, "id": call["id"], "type": "function"}
        deltas.append({"tool_calls": [begun | {"function": {"name": function["name"], "arguments": parts[0]}}]})
        deltas.append({"tool_calls": [{"index": index, "function": {"arguments": parts[1]}}]})
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "theirs-2026"}
    reason = "tool_calls" if calls else "stop"
    chunks: list[Json] = [head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    chunks.append(head | {"choices": [], "usage": chat_usage(usage)})
    return [*(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks), b"data: [DONE]\n\n"]


def messages_answer(blocks: Sequence[Json], usage: tuple[int, int] = (10, 5)) -> Json:
    """A whole answer of Anthropic's messages."""
    reason = "tool_use" if any(block["type"] == "tool_use" for block in blocks) else "end_turn"
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-theirs"}
    used = {"input_tokens": usage[0], "output_tokens": usage[1]}
    return head | {"content": list(blocks), "stop_reason": reason, "stop_sequence": None, "usage": used}


def messages_events(blocks: Sequence[Json], usage: tuple[int, int] = (10, 5)) -> list[bytes]:
    """A stream of Anthropic's messages; texts, thoughts and arguments come in two parts."""
    whole = messages_answer(blocks, usage)
    begun = whole | {"content": [], "stop_reason": None, "usage": {"input_tokens": usage[0], "output_tokens": 1}}
    events: list[Json] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(blocks):
        empty, deltas = _block_events(block)
        events.append({"type": "content_block_start", "index": index, "content_block": empty})
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    stop = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    events.append({"type": "message_delta", "delta": stop, "usage": {"output_tokens": usage[1]}})
    events.append({"type": "message_stop"})
    return [b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events]


def _block_events(block: Json) -> tuple[Json, list[Json]]:
    if block["type"] == "redacted_thinking":
        return block, []
    if block["type"] == "tool_use":
        arguments = orjson.dumps(block["input"]).decode()
        return block | {"input": {}}, [
            {"type": "input_json_delta", "partial_json": part} for part in _halves(arguments)
        ]
    kind = block["type"]
    deltas: list[Json] = [{"type": f"{kind}_delta", kind: part} for part in _halves(block[kind])]
    if block.get("signature"):
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
    return block | {kind: ""} | ({"signature": ""} if "signature" in block else {}), deltas


def _halves(text: str) -> list[str]:
    half = len(text) // 2
    return [part for part in (text[:half], text[half:]) if part]


def response_answer(items: Sequence[Json], usage: tuple[int, int] = (10, 5), **more: Any) -> Json:
    """A whole answer of OpenAI's responses. `items` are its output on the wire."""
    used = {"input_tokens": usage[0], "output_tokens": usage[1], "total_tokens": sum(usage)}
    head = {"id": "resp_1", "object": "response", "created_at": 1, "model": "theirs-2026", "status": "completed"}
    return head | {"error": None, "incomplete_details": None, "output": list(items), "usage": used} | more


def response_events(items: Sequence[Json], usage: tuple[int, int] = (10, 5)) -> list[bytes]:
    """A stream of OpenAI's responses; texts, summaries of thoughts and arguments come in two parts."""
    whole = response_answer(items, usage)
    begun = whole | {"status": "in_progress", "output": [], "usage": None}
    events: list[Json] = [{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")]
    for index, item in enumerate(items):
        growing, deltas = _item_events(item)
        place = {"output_index": index, "item_id": item["id"]}
        events.append({"type": "response.output_item.added", "output_index": index, "item": growing})
        events += [place | delta for delta in deltas]
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": "response.completed", "response": whole})
    numbered: list[Json] = [event | {"sequence_number": number} for number, event in enumerate(events)]
    return [b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in numbered]


def _item_events(item: Json) -> tuple[Json, list[Json]]:
    """(an item as it begins, the events that show it growing)."""
    if item["type"] == "function_call":
        arguments = item["arguments"]
        done = {"arguments": arguments, "name": item["name"]}
        return item | {"arguments": ""}, _growing("function_call_arguments", arguments, {}, done)
    if item["type"] == "reasoning":
        events: list[Json] = []
        for index, part in enumerate(item["summary"]):
            events += _part_events("reasoning_summary", "reasoning_summary_text", part, {"summary_index": index})
        return item | {"summary": []}, events
    (part,) = item["content"]
    return item | {"content": []}, _part_events("content", "output_text", part, {"content_index": 0}, {"logprobs": []})


def _part_events(part_kind: str, kind: str, part: Json, place: Json, more: Json | None = None) -> list[Json]:
    """A part of an item, from its beginning to its end."""
    text, more = part["text"], more or {}
    return [
        {"type": f"response.{part_kind}_part.added", "part": part | {"text": ""}} | place,
        *_growing(kind, text, place | more, {"text": text}),
        {"type": f"response.{part_kind}_part.done", "part": part} | place,
    ]


def _growing(kind: str, text: str, more: Json, done: Json) -> list[Json]:
    deltas: list[Json] = [{"type": f"response.{kind}.delta", "delta": half} | more for half in _halves(text)]
    return [*deltas, {"type": f"response.{kind}.done"} | done | more]
