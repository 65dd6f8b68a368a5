"""Writes replies of OpenAI's `/v1/responses`: output items, whole or as stream events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning.gateway.dialects.anthropic.signed_reasoning import encode_signed_reasoning
from agentlightning.gateway.dialects.base import ReplyMetadata, Request, num_output_tokens
from agentlightning.gateway.dialects.output import (
    AnswerView,
    OutputEvent,
    ReasoningDelta,
    RefusalDelta,
    SignedReasoning,
    ToolCall,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    custom_input,
)
from agentlightning.gateway.dialects.sse import encode_event
from agentlightning.util.json_values import dumps

ID_PREFIX: Final = "resp_"
_INCOMPLETE: Final = {"stop": None, "tool_calls": None, "length": "max_output_tokens"}
"""Finish reasons -> why a response is incomplete, where they differ; None: it is complete."""
_ENCRYPTED: Final = "reasoning.encrypted_content"


@dataclass(slots=True)
class ResponsesReplyWriter:
    """Writes the reply to one request; a `ReplyWriter`."""

    head: ReplyMetadata
    request: Request
    items: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]], init=False)
    """The output items; all but the last are complete."""
    _open: str | None = field(default=None, init=False)
    """Type of the open item, if it takes deltas."""
    _number: int = field(default=0, init=False)
    """Sequence number of the next event."""

    def body(self, answers: Sequence[AnswerView]) -> bytes:
        (answer,) = answers
        if not self.items:
            self._add_items(answer)
        return dumps(self._final(answer))

    def start(self, answers: Sequence[AnswerView]) -> bytes:
        started = self._response("in_progress")
        return self._event("response.created", response=started) + self._event("response.in_progress", response=started)

    def event(self, answer: AnswerView, event: OutputEvent) -> bytes:
        logprobs = answer.next_logprobs() if self.request.logprobs else []
        match event:
            case str():
                return self._add_text(answer, event, logprobs)
            case ReasoningDelta():
                return self._add_reasoning(answer, event.text)
            case SignedReasoning():
                return self._sign(answer, event)
            case RefusalDelta():
                return self._add_refusal(answer, event.text)
            case ToolCall():
                started = self._start_call(answer, ToolCallStart(event.index, event.id, event.name))
                return started + self._add_arguments(event.arguments) + self._end_call(event)
            case ToolCallStart():
                return self._start_call(answer, event)
            case ToolCallDelta():
                return self._add_arguments(event.text)
            case ToolCallEnd():
                return self._end_call(event.call)

    def end(self, answers: Sequence[AnswerView]) -> bytes:
        (answer,) = answers
        started = b""
        if all(item["type"] == "reasoning" for item in self.items):  # A turn without text is still a message.
            started = self._close(answer) + self._start_message(_text_part(""))
        closed = self._close(answer, last=True)
        final = self._final(answer)
        return started + closed + self._event(f"response.{final['status']}", response=final)

    def _add_items(self, answer: AnswerView) -> None:
        """Add the items of an answer that was not streamed."""
        for part in answer.parts():
            match part:
                case ReasoningDelta():
                    self.items.append(self._reasoning(part.text, "completed"))
                case SignedReasoning():
                    self._sign(answer, part)
                case str() | RefusalDelta():
                    content = _text_part(part) if isinstance(part, str) else _refusal_part(part.text)
                    self.items.append(self._message(content, "completed"))
                case ToolCall():
                    self.items.append(self._call(part, "completed"))
                case _:
                    pass
        if all(item["type"] == "reasoning" for item in self.items):
            self.items.append(self._message(_text_part(""), "completed"))
        self._finish_last(answer)

    def _finish_last(self, answer: AnswerView) -> None:
        last = self.items[-1]
        if last["type"] in ("message", "reasoning") and answer.finish_reason == "length":
            last["status"] = "incomplete"
        parts = [item["content"][0] for item in self.items if item["type"] == "message"]
        if self.request.logprobs and len(parts) == 1 and parts[0]["type"] == "output_text":
            parts[0]["logprobs"] = answer.all_logprobs()

    # -- text, refusals and reasoning --------------------------------------------------------------------------------

    def _add_text(self, answer: AnswerView, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        started = self._open_message(answer, _text_part(""))
        part = self.items[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        return started + self._event("response.output_text.delta", **self._place(), delta=text, logprobs=logprobs)

    def _add_refusal(self, answer: AnswerView, text: str) -> bytes:
        started = self._open_message(answer, _refusal_part(""))
        self.items[-1]["content"][0]["refusal"] += text
        return started + self._event("response.refusal.delta", **self._place(), delta=text)

    def _open_message(self, answer: AnswerView, part: dict[str, Any]) -> bytes:
        """Start a message with a part of one kind, unless one is open."""
        return b"" if self._open == part["type"] else self._close(answer) + self._start_message(part)

    def _start_message(self, part: dict[str, Any]) -> bytes:
        self._open = part["type"]
        item = self._message(part, "in_progress")
        self.items.append(item)
        place = self._place()
        return self._event(
            "response.output_item.added", output_index=place["output_index"], item=item | {"content": []}
        ) + self._event("response.content_part.added", **place, part=part)

    def _add_reasoning(self, answer: AnswerView, text: str) -> bytes:
        started = b"" if self._open == "reasoning" else self._close(answer) + self._start_reasoning()
        content = self.items[-1]["content"]
        if not content:
            content.append({"type": "reasoning_text", "text": ""})
        content[0]["text"] += text
        return started + self._event("response.reasoning_text.delta", **self._place(), delta=text)

    def _start_reasoning(self) -> bytes:
        self._open = "reasoning"
        self.items.append(self._reasoning("", "in_progress"))
        return self._event("response.output_item.added", output_index=len(self.items) - 1, item=self.items[-1])

    def _sign(self, answer: AnswerView, event: SignedReasoning) -> bytes:
        """Signed reasoning, which the caller can send back unchanged if it asked for encrypted content."""
        if _ENCRYPTED not in (self.request.raw.get("include") or ()):
            return self._close(answer) if self._open == "reasoning" else b""
        last = self.items[-1] if self.items else {}
        started = b""
        if last.get("type") != "reasoning" or "encrypted_content" in last:  # It has no text.
            started = self._close(answer) + self._start_reasoning()
        self.items[-1]["encrypted_content"] = encode_signed_reasoning(event.block)
        return started + self._close(answer)

    def _close(self, answer: AnswerView, last: bool = False) -> bytes:
        """Complete the open text or reasoning."""
        if self._open is None:
            if last and self.items:
                self._finish_last(answer)
            return b""
        kind, self._open = self._open, None
        item = self.items[-1]
        item["status"] = "completed"
        if last:
            self._finish_last(answer)
        whole = self._part_done(kind, item["content"][0]) if item["content"] else b""
        return whole + self._event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _part_done(self, kind: str, part: dict[str, Any]) -> bytes:
        place = self._place()
        if kind == "reasoning":
            return self._event("response.reasoning_text.done", **place, text=part["text"])
        if kind == "refusal":
            done = self._event("response.refusal.done", **place, refusal=part["refusal"])
        else:
            done = self._event("response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"])
        return done + self._event("response.content_part.done", **place, part=part)

    # -- tool calls ------------------------------------------------------------------------------------------------

    def _start_call(self, answer: AnswerView, call: ToolCallStart) -> bytes:
        closed = self._close(answer)
        item = self._call(ToolCall(call.index, call.id, call.name, ""), "in_progress")
        self.items.append(item)
        return closed + self._event("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _add_arguments(self, text: str) -> bytes:
        if "input" in self.items[-1]:  # It is sent whole: its text stands in a JSON string that is not complete.
            return b""
        return self._event("response.function_call_arguments.delta", **self._item(), delta=text)

    def _end_call(self, call: ToolCall) -> bytes:
        item = self.items[-1] = self._call(call, "completed")
        if (text := item.get("input")) is not None:
            kind = "response.custom_tool_call_input"
            done = self._event(f"{kind}.delta", **self._item(), delta=text)
            done += self._event(f"{kind}.done", **self._item(), input=text)
        else:
            fields = {"name": call.name, "arguments": call.arguments}
            done = self._event("response.function_call_arguments.done", **self._item(), **fields)
        return done + self._event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _call(self, call: ToolCall, status: str) -> dict[str, Any]:
        """The item of a call, of a function or of a custom tool."""
        is_custom, name = call.name in self.request.custom_tools, call.id.partition("_")[2] or call.id
        kind, prefix = ("custom_tool_call", "ctc_") if is_custom else ("function_call", "fc_")
        item = {"id": prefix + name, "type": kind, "call_id": call.id, "name": call.name, "status": status}
        return item | ({"input": custom_input(call.arguments)} if is_custom else {"arguments": call.arguments})

    # -- parts of events ---------------------------------------------------------------------------------------------

    def _item(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _place(self) -> dict[str, Any]:
        return self._item() | {"content_index": 0}

    def _message(self, part: dict[str, Any], status: str) -> dict[str, Any]:
        return {"id": self._name("msg_"), "type": "message", "role": "assistant", "status": status, "content": [part]}

    def _reasoning(self, text: str, status: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": text}] if text else []
        return {"id": self._name("rs_"), "type": "reasoning", "summary": [], "status": status, "content": content}

    def _name(self, prefix: str) -> str:
        """The id of the next item."""
        return f"{prefix}{self.head.id.removeprefix(ID_PREFIX)}{len(self.items)}"

    def _event(self, kind: str, **data: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **data}
        self._number += 1
        return encode_event(event, kind)

    def _final(self, answer: AnswerView) -> dict[str, Any]:
        cut = _INCOMPLETE.get(answer.finish_reason, answer.finish_reason)
        response = self._response("incomplete" if cut else "completed")
        head = self.head
        num_prompt, num_sampled = head.prompt_tokens, num_output_tokens([answer])
        cached = {"cached_tokens": head.cached_tokens or 0, "cache_write_tokens": head.cache_write_tokens or 0}
        return response | {
            "incomplete_details": {"reason": cut} if cut else None,
            "output": self.items,
            "usage": {
                "input_tokens": num_prompt,
                "input_tokens_details": cached,
                "output_tokens": num_sampled,
                "output_tokens_details": {"reasoning_tokens": head.reasoning_tokens or 0},
                "total_tokens": num_prompt + num_sampled,
            },
        }

    def _response(self, status: str) -> dict[str, Any]:
        raw, params = self.request.raw, self.request.params
        return {
            "id": self.head.id,
            "object": "response",
            "created_at": self.head.created,
            "status": status,
            "model": self.head.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": raw.get("instructions"),
            "metadata": raw.get("metadata") or {},
            "parallel_tool_calls": raw.get("parallel_tool_calls") is not False,
            "previous_response_id": raw.get("previous_response_id"),
            "store": raw.get("store") is not False,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "max_output_tokens": params.max_tokens,
            "text": raw.get("text") or {"format": {"type": "text"}},
            "tool_choice": raw.get("tool_choice") or "auto",
            "tools": raw.get("tools") or [],
            "truncation": "disabled",
            "usage": None,
        }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _refusal_part(text: str) -> dict[str, Any]:
    return {"type": "refusal", "refusal": text}
