"""From a request to what is drawn for it and kept of it: one answer and one record for each that was asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence

from agentlightning.chat.base import ChatFormat, Message
from agentlightning.engine.base import Engine, SamplingParams
from agentlightning.errors import ConfigError
from agentlightning.gateway.callers.attribution import AttemptIds, Caller
from agentlightning.gateway.dialects.base import Dialect, ReplyMetadata, Request
from agentlightning.gateway.errors import bad_request
from agentlightning.gateway.local.answer import Answer
from agentlightning.gateway.local.conversation import Conversations, Prompt
from agentlightning.gateway.local.prompt_limit import encode_within
from agentlightning.gateway.local.reasoning import find_reasoning_markers
from agentlightning.gateway.local.span import SpanDraft
from agentlightning.span import new_span_id


def asked_messages(request: Request, engine: Engine) -> list[list[Message]]:
    """The messages behind each prompt, for its span: a raw prompt is one message of the user."""
    if not request.prompts:
        begun: list[Message] = [{"role": "assistant", "content": request.prefill}] if request.prefill else []
        return [request.messages + begun]
    texts = [given if isinstance(given, str) else engine.chat.decode(given) for given in request.prompts]
    return [[{"role": "user", "content": text}] for text in texts]


def chat_of(engine: Engine, request: Request) -> ChatFormat:
    """How the conversation of a request is written. Raises ApiError 400 for what the template cannot be asked."""
    if request.template:
        try:
            chat = engine.chat.with_template_kwargs(request.template)
        except ConfigError as error:
            raise bad_request("chat_template_kwargs", str(error)) from None
    else:
        chat = engine.chat
    if request.prefill and (markers := find_reasoning_markers(chat)) is not None and markers.opened:
        raise bad_request(
            "messages", f"answers of {engine.model} begin with a thought, and cannot go on with the last message"
        )
    return chat


def prompts_of(
    conversations: Conversations, attempt: AttemptIds | None, request: Request, model: str, chat: ChatFormat, room: int
) -> list[Prompt]:
    """What the engine is given; takes long for long conversations, and may be called from any thread. Raises
    ConfigError where the template cannot hold them, ContextLengthError where the context (`room`) surely cannot."""
    if attempt and request.prompts:
        return [conversations.raw_prompt(attempt, model, chat, given, room) for given in request.prompts]
    if attempt:
        asked = request.messages, request.tools
        return [conversations.prompt(attempt, model, chat, *asked, room, request.prefill)]
    if request.prompts:
        return [
            Prompt(encode_within(chat, given, room) if isinstance(given, str) else given) for given in request.prompts
        ]
    text = chat.render(request.messages, request.tools) + chat.escape(request.prefill)
    return [Prompt(encode_within(chat, text, room))]


def record_of(
    dialect: Dialect,
    caller: Caller,
    request: Request,
    head: ReplyMetadata,
    prompt: Prompt,
    asked: Sequence[Message],
    trace_id: str,
    overridden: tuple[str, ...] = (),
) -> SpanDraft:
    return SpanDraft(
        rollout_id=caller.rollout_id or "",
        attempt_id=caller.attempt_id or "",
        trace_id=caller.trace_id or trace_id,
        parent_id=caller.parent_id,
        caller_attributes=caller.attributes(),
        operation=dialect.operation,
        response_id=head.id,
        requested_model=request.model or head.model,
        served_model=head.model,
        messages=asked,
        tools=request.tools,
        prompt=prompt,
        constraint=request.constraint,
        start_time=time.time(),
        span_id=new_span_id(),
        overridden=overridden,
    )


def answer_of(
    dialect: Dialect, request: Request, chat: ChatFormat, params: SamplingParams, index: int, prompt: Prompt
) -> Answer:
    return Answer(
        index,
        chat,
        params.stop,
        prompt.token_ids,
        params.stop_token_ids,
        reads_tool_calls=request.tools is not None,
        single_tool_call=request.constraint.single_tool_call,
        call_prefix=dialect.call_prefix,
        tools=request.tools,
        is_constrained=params.constraint is not None,
        reasoning_markers=None if request.prompts or request.prefill else find_reasoning_markers(chat),
        prefill=request.prefill,
        uses_functions=request.uses_functions,
    )
