"""`emit_prompt`, `emit_response` and `emit_completion`: model calls that an agent reports itself.

A prompt and the response that follows it become one span of the operation `chat`, with the messages of both in OTel's
form, as if the gateway had seen the call; only its tokens are unknown. A prompt waits for the response of the same
agent in the same task or thread, or, where that has none, for the only one of the agent in the attempt. A tool call
that follows a prompt is its response, and what comes next may be the response to the result of the tool. A prompt that
nothing answers, and a response to nothing, are recorded as such and counted (`recording_status`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from agentlightning import span as names
from agentlightning.tracing.emit.events import record_event
from agentlightning.tracing.emit.framework_messages import (
    ModelResult,
    messages_json,
    read_messages,
    read_result,
    split_conversation,
    tool_call_part,
    tool_response_part,
)
from agentlightning.tracing.genai_messages import Message, parse_json
from agentlightning.tracing.scope import Lifetime, WaitingPrompt, agent_in, current_location, recording_scope
from agentlightning.tracing.status import counters
from agentlightning.tracing.tracer import record
from agentlightning.tracing.values import flatten

CHAT: Final = "chat"


def emit_prompt(
    prompt: Any,
    response: Any = None,
    *,
    model: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> None:
    """Record what was sent to a model, with its response or before an `emit_response`.

    Both may be text, messages as dicts, or what LangChain, OpenAI, Anthropic, AutoGen and CrewAI hand over.

        >>> agl.emit_prompt("6 x 7?", "42")
        >>> agl.emit_prompt([{"role": "user", "content": "6 x 7?"}], model="gpt-x")
        >>> agl.emit_response("42")
    """
    own: dict[str, Any] = dict(flatten(attributes)) if attributes else {}
    own[names.INPUT_MESSAGES] = messages_json(read_messages(prompt, "user"))
    if model is not None:
        own[names.REQUEST_MODEL] = model
    if not propagate:
        return
    scope = recording_scope()
    if response is not None:
        _record_call(own, read_result(response), None)
    elif scope is None:
        _record_unanswered(own, None)
    else:
        waiting = WaitingPrompt(agent_in(scope), current_location(), time.time(), own)
        _wait(scope.lifetime, waiting)


def emit_response(
    response: Any,
    *,
    model: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> None:
    """Record what a model has answered to the prompt that was emitted before.

    >>> agl.emit_prompt("6 x 7?")
    >>> agl.emit_response("42", attributes={"cached": True})
    """
    result = read_result(response)
    if propagate:
        _record_response(result, None, model, attributes)


def emit_completion(
    completion: Any,
    prompt: Any = None,
    *,
    model: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> None:
    """Record what a framework returns for a call: the answer, its model, tokens and reason to stop.

    The prompt is the one given here, else the one that waits, else, of a result that is a whole conversation, what
    comes before its last message.

        >>> agl.emit_completion({"choices": [{"message": {"role": "assistant", "content": "42"}}]}, prompt="6 x 7?")
    """
    conversation = split_conversation(completion)
    before, last = ([], completion) if conversation is None else conversation
    given = read_messages(prompt, "user") if prompt is not None else before
    result = read_result(last)
    if propagate:
        _record_response(result, given, model, attributes, given_first=prompt is not None)


def _record_response(
    result: ModelResult,
    given: Sequence[Message] | None,
    model: str | None,
    attributes: Mapping[str, Any] | None,
    given_first: bool = False,
) -> None:
    further: dict[str, Any] = dict(flatten(attributes)) if attributes else {}
    if model is not None:
        further[names.REQUEST_MODEL] = model
    waiting = None if given_first else _take_waiting()
    if waiting is not None:
        _record_call({**waiting.attributes, **further}, result, waiting.time)
    elif given:
        _record_call({**further, names.INPUT_MESSAGES: messages_json(given)}, result, None)
    else:
        counters.add("responses_unprompted")
        record_event(names.RESPONSE, {**further, **_described(result)}, None, True)


def answer_with_tool_call(call_id: str | None, name: str, arguments: Any, result: Any) -> None:
    """Record the call whose prompt waits: its response is this tool call. The conversation with the result of the tool
    waits for the next response, or tool call, and is no prompt of the agent's own."""
    waiting = _take_waiting()
    scope = recording_scope()
    if waiting is None or scope is None:
        return
    arguments = parse_json(arguments)
    named = arguments if isinstance(arguments, Mapping | None) else {"input": arguments}
    answer = {"role": "assistant", "parts": [tool_call_part(call_id, name, named)]}
    _record_call(waiting.attributes, ModelResult([answer], finish_reasons=("tool_calls",)), waiting.time)
    response = {"role": "tool", "parts": [tool_response_part(call_id, result)]}
    messages = [*json.loads(waiting.attributes[names.INPUT_MESSAGES]), answer, response]
    attributes = {**waiting.attributes, names.INPUT_MESSAGES: messages_json(messages)}
    _wait(scope.lifetime, replace(waiting, time=time.time(), attributes=attributes, emitted=False))


def _record_call(attributes: dict[str, Any], result: ModelResult, start_time: float | None) -> None:
    own = {names.OPERATION_NAME: CHAT, **attributes, **_described(result)}
    model = own.get(names.REQUEST_MODEL) or own.get(names.RESPONSE_MODEL)
    record(f"{CHAT} {model}" if model else CHAT, own, start_time=start_time)


def _described(result: ModelResult) -> dict[str, Any]:
    own: dict[str, Any] = {names.OUTPUT_MESSAGES: messages_json(result.messages)}
    said = {
        names.RESPONSE_MODEL: result.model,
        names.RESPONSE_ID: result.response_id,
        names.INPUT_TOKENS: result.input_tokens,
        names.OUTPUT_TOKENS: result.output_tokens,
        names.FINISH_REASONS: list(result.finish_reasons) or None,
    }
    own.update((name, value) for name, value in said.items() if value is not None)
    return own


def _record_unanswered(attributes: Mapping[str, Any], start_time: float | None) -> None:
    counters.add("prompts_unanswered")
    record(names.PROMPT, attributes, start_time=start_time)


# -- prompts that wait -------------------------------------------------------------------------------------------------


def _wait(lifetime: Lifetime, waiting: WaitingPrompt) -> None:
    for other in lifetime.prompts[:]:
        if (other.agent, other.location) == (waiting.agent, waiting.location):
            lifetime.prompts.remove(other)
            if other.emitted:
                _record_unanswered(other.attributes, other.time)
    lifetime.prompts.append(waiting)
    if lifetime.at_end is None:
        lifetime.at_end = lambda: _record_rest(lifetime)


def _take_waiting() -> WaitingPrompt | None:
    scope = recording_scope()
    if scope is None or not scope.lifetime.prompts:
        return None
    agent, location, prompts = agent_in(scope), current_location(), scope.lifetime.prompts
    of_agent = [each for each in prompts if each.agent == agent]
    here = [each for each in of_agent if each.location == location]
    found = here[0] if here else of_agent[0] if len(of_agent) == 1 else None
    if found is not None:
        prompts.remove(found)
    return found


def _record_rest(lifetime: Lifetime) -> None:
    """The attempt ends: what still waits was not answered."""
    prompts, lifetime.prompts = lifetime.prompts, []
    for each in prompts:
        if not each.emitted:
            continue
        agent = {} if each.agent is None else {names.AGENT_NAME: each.agent}
        _record_unanswered({**agent, **each.attributes}, each.time)
