"""`emit_tool_call` and `emit_step`: what an agent did beside its model calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from agentlightning import span as names
from agentlightning.errors import ConfigError
from agentlightning.tracing.emit.events import record_event
from agentlightning.tracing.emit.framework_messages import field, read_tool_call
from agentlightning.tracing.emit.model_calls import answer_with_tool_call
from agentlightning.tracing.values import Attribute, json_text

TOOL_OPERATION: Final = "execute_tool"


def emit_tool_call(
    name: Any,
    args: Any = None,
    result: Any = None,
    *,
    error: BaseException | str | None = None,
    call_id: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> None:
    """Record a call of a tool: its name, arguments and result, or the error it ended with.

    In place of the name, a tool call as OpenAI, Anthropic, LangChain and AutoGen have it brings its own arguments.
    After a prompt without a response, the call is what the model has answered; arguments that have no names, such as a
    text, are called `input` in it. Raises ConfigError for anything else.

        >>> agl.emit_tool_call("search", {"query": "tea"}, ["a page about tea"])
        >>> agl.emit_tool_call("search", {"query": "tea"}, error=TimeoutError("no answer"))
    """
    if not isinstance(name, str):
        call = read_tool_call(name)
        if call is None:
            raise ConfigError(f"emit_tool_call({name!r:.80}): give the name of the tool, or a tool call")
        name, own_args, own_id = call
        args, call_id = own_args if args is None else args, call_id or own_id
    if not name:
        raise ConfigError("emit_tool_call('') names no tool")
    own: dict[str, Any] = {names.OPERATION_NAME: TOOL_OPERATION, names.TOOL_NAME: name}
    if args is not None:
        own[names.TOOL_ARGUMENTS] = _text(args)
    if result is not None:
        own[names.TOOL_RESULT] = _text(result)
    if call_id is not None:
        own[names.TOOL_CALL_ID] = str(call_id)
    message: str | None = None
    if error is not None:
        kind = type(error).__qualname__
        own[names.ERROR_TYPE] = "error" if isinstance(error, str) else kind
        message = error if isinstance(error, str) else f"{kind}: {error}"
    if propagate:
        answer_with_tool_call(call_id, name, args, result if message is None else message)
    record_event(f"{TOOL_OPERATION} {name}", own, attributes, propagate, error=message)


def emit_step(
    step: Any,
    input: Any = None,
    output: Any = None,
    *,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> None:
    """Record a step that the agent has taken: its name with input and output, or a step of a framework.

    LangChain's and CrewAI's actions, alone or with what was observed, become tool calls. To record how long a step
    takes and what happens within it, use `operation`.

        >>> agl.emit_step("plan", output=["search", "answer"])
    """
    if not isinstance(step, str) and (action := _action(step)) is not None:
        tool, tool_input, observation = action
        observed = observation if output is None else output
        emit_tool_call(tool, tool_input, observed, attributes=attributes, propagate=propagate)
        return
    label = step if isinstance(step, str) else type(step).__name__
    described = step if output is None and not isinstance(step, str) else output
    own: dict[str, Attribute] = {names.OPERATION_LABEL: label}
    if input is not None:
        own[names.OPERATION_INPUT] = json_text(input)
    if described is not None:
        own[names.OPERATION_OUTPUT] = json_text(described)
    record_event(names.OPERATION, own, attributes, propagate)


def _action(step: Any) -> tuple[str, Any, Any] | None:
    """(tool, input, observation) of a framework's action; None for what is none."""
    observation: Any = None
    if isinstance(step, list | tuple) and len(cast("Sequence[Any]", step)) == 2:
        step, observation = cast("Sequence[Any]", step)
    try:
        tool, tool_input = field(step, "tool"), field(step, "tool_input")
        observation = field(step, "result") if observation is None else observation
    except Exception:  # noqa: BLE001  a property of an object of another library may raise anything
        return None
    return (tool, tool_input, observation) if isinstance(tool, str) and tool else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json_text(value)
