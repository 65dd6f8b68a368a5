"""The dialect of OpenAI's `/v1/chat/completions`.

Fields that would change what is sampled and are not supported are rejected by name. Unknown fields are accepted,
ignored and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from agentlightning.chat.base import Message
from agentlightning.chat.messages import read_message
from agentlightning.engine.base import SamplingParams
from agentlightning.errors import DatasetError
from agentlightning.gateway.dialects.base import Body, Dialect, ReplyMetadata, Request, num_output_tokens
from agentlightning.gateway.dialects.content_parts import read_content
from agentlightning.gateway.dialects.openai import common
from agentlightning.gateway.dialects.openai.legacy_functions import with_function_call, with_tools
from agentlightning.gateway.dialects.output import (
    AnswerView,
    OutputEvent,
    ReasoningDelta,
    RefusalDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
)
from agentlightning.gateway.dialects.response_store import ResponseLookup
from agentlightning.gateway.dialects.sampling import OPENAI_PARAMS, OPENAI_UNSUPPORTED, sampling_params
from agentlightning.gateway.dialects.sse import encode_event
from agentlightning.gateway.dialects.validation import (
    integer,
    optional,
    read_json,
    reject_unsupported,
    shorten,
    top_logprobs,
    unknown_fields,
)
from agentlightning.gateway.errors import bad_request
from agentlightning.util.json_values import dumps

_KNOWN: Final = frozenset(
    {
        *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "user"),
        *("stream", "stream_options", "n", "logprobs", "top_logprobs", "chat_template_kwargs"),
        *("return_token_ids", "continue_final_message", "add_generation_prompt", *common.VLLM_FORMAT_FIELDS),
    }
)
_TOKEN_FIELDS: Final = frozenset({"return_token_ids"})
"""Fields that providers of other dialects cannot honour: ignored in a request that is translated."""
_ROLES: Final = ("assistant", "system", "tool", "user")
_MESSAGE_FIELDS: Final = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content"})
_TEXT_FIELDS: Final = {"text": "text", "refusal": "refusal"}

_UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {
    **OPENAI_UNSUPPORTED,
    "best_of": (1,),
    "chat_template": (),
    "modalities": (["text"],),
    "audio": (),
}


_LOCAL_ONLY: Final[dict[str, tuple[Any, ...]]] = {
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "chat_template_kwargs": ({},),
    **dict.fromkeys(common.VLLM_FORMAT_FIELDS, ()),
}
"""Fields that only our own engines support, for `reject_unsupported` in a request that is translated."""


def read_request(body: Body, recall: ResponseLookup | None = None, attachments: bool = False) -> Request:
    """See `ReadRequest`."""
    original = read_json(body)
    data, uses_functions = with_tools(original)
    reject_unsupported(data, _UNSUPPORTED | _LOCAL_ONLY if attachments else _UNSUPPORTED)
    tools, dropped = common.function_tools(data, lambda tool: tool.get("function"))
    choice = data.get("tool_choice")
    tools, forbidden_tools = (None, tools) if choice == "none" else (tools, None)
    constraint = common.read_constraint(
        tools,
        common.tool_choice(choice, nested=True),
        optional(data, "parallel_tool_calls", bool),
        *common.content_format(data),
    )
    common.include_usage(data)
    logprobs, top = bool(optional(data, "logprobs", bool)), top_logprobs(data)
    if top and not logprobs:
        raise bad_request("top_logprobs", f"top_logprobs={top} needs logprobs=true")
    token_ids = bool(optional(data, "return_token_ids", bool)) and not attachments
    known = _KNOWN - _TOKEN_FIELDS if attachments else _KNOWN
    messages, prefill = _split_prefill(data, _messages(data.get("messages"), attachments))
    return Request(
        model=optional(data, "model", str),
        messages=messages,
        tools=tools,
        forbidden_tools=forbidden_tools,
        params=sampling_params(
            data, OPENAI_PARAMS, SamplingParams(top_logprobs=top, stream_logprobs=logprobs or token_ids), "the request"
        ),
        n=integer(data, "n", 1, 128) or 1,
        stream=bool(optional(data, "stream", bool)),
        logprobs=logprobs,
        constraint=constraint,
        prefill=prefill,
        template=optional(data, "chat_template_kwargs", dict) or {},
        uses_functions=uses_functions,
        token_ids=token_ids,
        ignored_fields=unknown_fields(data, known, _UNSUPPORTED, OPENAI_PARAMS) + dropped,
        raw=original,
    )


# -- reading ---------------------------------------------------------------------------------------------------------


def _messages(value: Any, attachments: bool) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise bad_request("messages", "messages must be a list with at least one message")
    return [_message(index, message, attachments) for index, message in enumerate(value)]


def _split_prefill(data: Mapping[str, Any], messages: list[Message]) -> tuple[list[Message], str]:
    """(messages, prefill of the answer): with vLLM's `continue_final_message`, the answer continues the last message.
    Raises ApiError 400 if that is not text of the assistant."""
    goes_on = bool(optional(data, "continue_final_message", bool))
    generate = optional(data, "add_generation_prompt", bool)
    if goes_on and generate:
        raise bad_request("add_generation_prompt", "continue_final_message needs add_generation_prompt=false")
    if not goes_on and generate is False:
        raise bad_request("add_generation_prompt", "add_generation_prompt=false cannot be honoured here; leave it out")
    if not goes_on:
        return messages, ""
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls") or not isinstance(last["content"], str):
        raise bad_request(
            "continue_final_message", "continue_final_message asks for a last message of the assistant, of text"
        )
    return messages[:-1], last["content"]


def _message(index: int, message: Any, attachments: bool) -> Message:
    where = f"messages[{index}]"
    role = message.get("role") if isinstance(message, dict) else None
    role = "system" if role == "developer" else role
    if role not in _ROLES:
        raise bad_request("messages", f"{where} has the role {shorten(role)}; use {', '.join(_ROLES)} or developer")
    known = {key: each for key, each in message.items() if key in _MESSAGE_FIELDS}
    content = partial(read_content, text_fields=_TEXT_FIELDS, attachments=attachments)
    try:
        return read_message(where, known, content)
    except DatasetError as error:
        raise bad_request("messages", str(error)) from None


# -- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChatReplyWriter:
    """Writes the reply to one request; a `ReplyWriter`."""

    head: ReplyMetadata
    logprobs: bool = False
    uses_functions: bool = False
    token_ids: bool = False
    include_usage: bool = False
    """A stream ends with an extra chunk for the usage."""

    def body(self, answers: Sequence[AnswerView]) -> bytes:
        choices = [self._choice(answer) for answer in answers]
        reply = self._head("chat.completion") | {"choices": choices, "usage": self._usage(answers)}
        return dumps(reply | self._prompt(answers))

    def start(self, answers: Sequence[AnswerView]) -> bytes:
        opened = [self._chunk(answer, {"role": "assistant", "content": ""}) for answer in answers]
        return b"".join(encode_event(chunk | self._prompt(answers)) for chunk in opened)

    def event(self, answer: AnswerView, event: OutputEvent) -> bytes:
        logprobs = self._logprobs(answer.next_logprobs)
        delta = _delta(event)
        delta = with_function_call(delta) if delta and self.uses_functions else delta
        return b"" if delta is None else encode_event(self._chunk(answer, delta, None, logprobs))

    def end(self, answers: Sequence[AnswerView]) -> bytes:
        closing = [
            self._chunk(answer, {}, self._reason(answer), self._logprobs(answer.remaining_logprobs))
            for answer in answers
        ]
        return common.end_of_stream(closing, self._usage(answers), apart=self.include_usage)

    def _reason(self, answer: AnswerView) -> str:
        reason = answer.finish_reason
        return "function_call" if self.uses_functions and reason == "tool_calls" else reason

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.head.id, "object": kind, "created": self.head.created, "model": self.head.model}

    def _usage(self, answers: Sequence[AnswerView]) -> dict[str, Any]:
        head = self.head
        used: dict[str, Any] = common.usage(head.prompt_tokens, num_output_tokens(answers))
        if head.cached_tokens is not None:
            used["prompt_tokens_details"] = {"cached_tokens": head.cached_tokens}
        if head.reasoning_tokens is not None:
            used["completion_tokens_details"] = {"reasoning_tokens": head.reasoning_tokens}
        return used

    def _choice(self, answer: AnswerView) -> dict[str, Any]:
        message = {**answer.message, "refusal": None}
        return {
            "index": answer.index,
            "message": with_function_call(message) if self.uses_functions else message,
            "finish_reason": self._reason(answer),
            "logprobs": self._logprobs(answer.all_logprobs),
        } | self._token_ids(answer.token_ids)

    def _chunk(
        self, answer: AnswerView, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        choice = {"index": answer.index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        choice |= self._token_ids(answer.take_token_ids())
        return self._head("chat.completion.chunk") | {"choices": [choice]}

    def _logprobs(self, listed: Callable[[], list[dict[str, Any]]]) -> dict[str, Any] | None:
        content = listed() if self.logprobs or self.token_ids else []
        return {"content": content, "refusal": None} if content and self.logprobs else None

    def _token_ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": token_ids} if self.token_ids else {}

    def _prompt(self, answers: Sequence[AnswerView]) -> dict[str, Any]:
        return {"prompt_token_ids": answers[0].prompt_token_ids} if self.token_ids and answers else {}


def _delta(event: OutputEvent) -> dict[str, Any] | None:
    """The delta of an event; None if this dialect cannot express it."""
    match event:
        case str():
            return {"content": event}
        case ReasoningDelta():
            return {"reasoning_content": event.text}
        case RefusalDelta():
            return {"refusal": event.text}
        case ToolCall():
            return {"tool_calls": [{"index": event.index, **event.wire()}]}
        case ToolCallStart():
            started = ToolCall(event.index, event.id, event.name, "")
            return {"tool_calls": [{"index": event.index, **started.wire()}]}
        case ToolCallDelta():
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
        case _:
            return None


def _reply(request: Request, head: ReplyMetadata) -> ChatReplyWriter:
    return ChatReplyWriter(
        head, request.logprobs, request.uses_functions, request.token_ids, common.include_usage(request.raw)
    )


CHAT: Final = Dialect(
    operation="chat",
    id_prefix="chatcmpl-",
    call_prefix="call_",
    read=read_request,
    reply=_reply,
    error_body=common.error_body,
    error_event=common.error_event,
)
