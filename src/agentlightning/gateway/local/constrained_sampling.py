"""Constrained sampling: passes the JSON schema or grammar that a request asks for to the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from agentlightning.chat.answer_grammar import AnswerShape, answer_grammar
from agentlightning.chat.base import ChatFormat, ThoughtMarkers
from agentlightning.chat.reasoning import find_reasoning_markers
from agentlightning.engine.base import Engine, SamplingParams
from agentlightning.gateway.dialects.output_constraint import NO_PARAMETERS, Constraint, json_schema
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.http import offload

EnforcementMode = Literal["auto", "always", "never"]
"""Which answers are constrained to their schema: `auto` those that nobody learns from (rollouts in the modes val
and test, and calls of no rollout), `always` all, `never` none."""


async def constrain_sampling(
    engine: Engine,
    chat: ChatFormat,
    params: SamplingParams,
    constraint: Constraint,
    *,
    tools: Sequence[dict[str, Any]] | None,
    trainable: bool,
    mode: EnforcementMode,
    size: int = 0,
) -> SamplingParams:
    """`params` with the schema or grammar of the answer, if it is to be enforced and the engine can.

    `tools` are those of the request. `trainable`: the answer may become training data. Work for a request of `size`
    bytes leaves the event loop if it is large."""
    if mode == "never" or (mode == "auto" and trainable) or not constraint:
        return params
    markers = find_reasoning_markers(chat)
    if not tools and markers is None:
        schema = constraint.content.schema if constraint.content else None
        enforceable = schema is not None and await engine.can_enforce(schema)
        return replace(params, json_schema=schema) if enforceable else params
    if "grammar" in engine.supported_params and _needs_grammar(chat, constraint, markers):
        for outline in await offload(size, lambda: list(_outlines(constraint, tools or (), markers))):
            grammar = await offload(size, partial(answer_grammar, chat, outline))
            if grammar is not None and await engine.can_enforce(grammar, "grammar"):
                return replace(params, grammar=grammar)
    return params


def _needs_grammar(chat: ChatFormat, constraint: Constraint, markers: ThoughtMarkers | None) -> bool:
    """Whether the constraint needs more than to stop after the first tool call."""
    stops = chat.tool_calls.closing is not None and markers is None
    needed = constraint.requires_tool_call or constraint.names is not None or constraint.arguments or constraint.content
    return bool(needed) or (constraint.single_tool_call and not stops)


def _outlines(
    constraint: Constraint, tools: Sequence[dict[str, Any]], markers: ThoughtMarkers | None
) -> Iterator[AnswerShape]:
    """The shape of the answer; then, as a fallback, the same with any arguments for tools that are not strict, whose
    schemas may use what cannot be enforced."""
    schemas = _argument_schemas(constraint, tools)
    loose = {name: schema if name in constraint.arguments else "{}" for name, schema in schemas.items()}
    for arguments in (schemas,) if loose == schemas else (schemas, loose):
        yield AnswerShape(
            tools=tuple(arguments.items()),
            needs_call=constraint.requires_tool_call,
            one_call=constraint.single_tool_call,
            content=constraint.content.schema if constraint.content else None,
            thought=markers,
        )


def _argument_schemas(constraint: Constraint, tools: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The argument schemas of the tools that may be called, by name. A tool without parameters takes no arguments; one
    whose parameters are no schema takes any."""
    schemas: dict[str, str] = {}
    for function in (tool["function"] for tool in tools):
        name = function["name"]
        if constraint.names is None or name in constraint.names:
            schemas[name] = _argument_schema(function.get("parameters"))
    return schemas


def _argument_schema(parameters: Any) -> str:
    try:
        return json_schema("tools.parameters", parameters or NO_PARAMETERS).schema
    except ApiError:  # Only strict tools need a valid schema.
        return "{}"
