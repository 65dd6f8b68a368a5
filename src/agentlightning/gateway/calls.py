"""From a request to what is drawn for it and kept of it: one answer and one record for each that was asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence

from agentlightning.gateway.answer import Answer
from agentlightning.gateway.attribution import Caller, Ids
from agentlightning.gateway.conversation import Conversations, Prompt
from agentlightning.gateway.dialects.base import Dialect, Head, Request
from agentlightning.gateway.lengths import encode_within
from agentlightning.gateway.record import Record
from agentlightning.gateway.thoughts import thought_markers
from agentlightning.policy.base import Engine, Message, SamplingParams
from agentlightning.span import new_span_id


def asked_messages(request: Request, engine: Engine) -> list[list[Message]]:
    """The messages behind each prompt, for its span: a raw prompt is one message of the user."""
    if not request.prompts:
        return [request.messages]
    texts = [given if isinstance(given, str) else engine.chat.decode(given) for given in request.prompts]
    return [[{"role": "user", "content": text}] for text in texts]


def prompts_of(
    conversations: Conversations, attempt: Ids | None, request: Request, model: str, engine: Engine
) -> list[Prompt]:
    """What the engine is given; takes long for long conversations, and may be called from any thread. Raises
    ConfigError where the template cannot hold them, ContextLengthError where the context surely cannot."""
    chat, room = engine.chat, engine.context_length
    if attempt and request.prompts:
        return [conversations.raw_prompt(attempt, model, chat, given, room) for given in request.prompts]
    if attempt:
        return [conversations.prompt(attempt, model, chat, request.messages, request.tools, room)]
    if request.prompts:
        return [
            Prompt(encode_within(chat, given, room) if isinstance(given, str) else given) for given in request.prompts
        ]
    return [Prompt(encode_within(chat, chat.render(request.messages, request.tools), room))]


def record_of(
    dialect: Dialect,
    caller: Caller,
    request: Request,
    head: Head,
    prompt: Prompt,
    asked: Sequence[Message],
    trace_id: str,
    overridden: tuple[str, ...] = (),
) -> Record:
    return Record(
        rollout_id=caller.rollout_id or "",
        attempt_id=caller.attempt_id or "",
        trace_id=caller.trace_id or trace_id,
        parent_id=caller.parent_id,
        whose=caller.attributes(),
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


def answer_of(dialect: Dialect, request: Request, engine: Engine, params: SamplingParams, index: int) -> Answer:
    return Answer(
        index,
        engine.chat,
        params.stop,
        reads_calls=request.tools is not None,
        one_call=request.constraint.one_call,
        call_prefix=dialect.call_prefix,
        tools=request.tools,
        held=params.held is not None,
        thinks=None if request.prompts else thought_markers(engine.chat),
    )
