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
from agentlightning.gateway.offload import offload

EnforcementMode = Literal["auto", "always", "never"]
"""Which answers are held to their schema: those that nobody learns from (of rollouts in the modes val and test, and of
no rollout at all), all, or none."""


async def hold(
    engine: Engine,
    chat: ChatFormat,
    params: SamplingParams,
    constraint: Constraint,
    *,
    tools: Sequence[dict[str, Any]] | None,
    learned: bool,
    holding: EnforcementMode,
    size: int = 0,
) -> SamplingParams:
    """`params` with the schema or grammar that answers are held to, where they are to be and the engine can.

    `tools`: those the request offers. `learned`: whether somebody may learn from the answer. `size`: bytes of the
    request, by which work is done in the loop or not."""
    if holding == "never" or (holding == "auto" and learned) or not constraint:
        return params
    thought = find_reasoning_markers(chat)
    if not tools and thought is None:
        schema = constraint.content.schema if constraint.content else None
        known = schema is not None and await engine.can_enforce(schema)
        return replace(params, json_schema=schema) if known else params
    if "grammar" in engine.supported_params and _needs_grammar(chat, constraint, thought):
        for outline in await offload(size, lambda: list(_outlines(constraint, tools or (), thought))):
            grammar = await offload(size, partial(answer_grammar, chat, outline))
            if grammar is not None and await engine.can_enforce(grammar, "grammar"):
                return replace(params, grammar=grammar)
    return params


def _needs_grammar(chat: ChatFormat, constraint: Constraint, thought: ThoughtMarkers | None) -> bool:
    """Whether anything is asked for that an end of the drawing after the first call does not see to."""
    ends = chat.tool_calls.closing is not None and thought is None
    asks = constraint.requires_tool_call or constraint.names is not None or constraint.arguments or constraint.content
    return bool(asks) or (constraint.single_tool_call and not ends)


def _outlines(
    constraint: Constraint, tools: Sequence[dict[str, Any]], thought: ThoughtMarkers | None
) -> Iterator[AnswerShape]:
    """What an answer is to be; then the same with any arguments for tools that are not strict, since their schemas may
    hold what no answer can be held to."""
    schemas = _argument_schemas(constraint, tools)
    loose = {name: schema if name in constraint.arguments else "{}" for name, schema in schemas.items()}
    for each in (schemas,) if loose == schemas else (schemas, loose):
        yield AnswerShape(
            tools=tuple(each.items()),
            needs_call=constraint.requires_tool_call,
            one_call=constraint.single_tool_call,
            content=constraint.content.schema if constraint.content else None,
            thought=thought,
        )


def _argument_schemas(constraint: Constraint, tools: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Of the tools that may be called, by name. One that names no parameters has none, and one whose parameters no
    schema describes may have any."""
    found: dict[str, str] = {}
    for function in (tool["function"] for tool in tools):
        name = function["name"]
        if constraint.names is None or name in constraint.names:
            found[name] = _argument_schema(function.get("parameters"))
    return found


def _argument_schema(given: Any) -> str:
    try:
        return json_schema("tools.parameters", given or NO_PARAMETERS).schema
    except ApiError:  # Only a strict one must be a schema.
        return "{}"
