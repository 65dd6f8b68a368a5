"""How the answers of our engines are sampled: what a training rollout overrides, and what a request constrains.

A `seed` makes all rollouts of a group equal, so that none is better than another; top_p, top_k, min_p, penalties and
biases sample from another distribution than the one a trainer computes; temperature 0 explores nothing. In rollouts of
the mode train these parameters have the neutral values below, unless the rollout's LLM resource sets them. All other
calls are sampled with the caller's parameters. Overridden parameters are logged once, recorded on the span
(`span.OVERRIDDEN`) and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

from agentlightning.chat.answer_grammar import AnswerShape, answer_grammar
from agentlightning.chat.base import ChatFormat, ThoughtMarkers
from agentlightning.chat.reasoning import find_reasoning_markers
from agentlightning.chat.tool_calls.format import Tools
from agentlightning.engine.base import Engine, SamplingParams
from agentlightning.gateway.callers.attempts import AttemptContext
from agentlightning.gateway.dialects.output_constraint import NO_PARAMETERS, Constraint, json_schema
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.http import offload
from agentlightning.gateway.record import Counters
from agentlightning.util.json_values import Json

logger = logging.getLogger(__name__)

NEUTRAL: Final[Mapping[str, Any]] = {
    "seed": None,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": (),
    "repetition_penalty": 1.0,
    "min_tokens": 0,
}
"""Fields of `SamplingParams` -> neutral values."""
_WIRE_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    **{name: () if value is None else (value,) for name, value in NEUTRAL.items()},
    "top_k": (0, -1),
    "logit_bias": ({},),
    "temperature": (),
}
"""Fields of a request -> values that need no override."""


def is_policy(context: AttemptContext, model: str) -> bool:
    """Whether a model is the policy of a rollout: its resources name this model, or none at all."""
    return not context.llms or model in context.llms


def is_training(context: AttemptContext, url_mode: str | None, model: str) -> bool:
    """Whether a call is for training. `url_mode` (1.0) counts if the rollout has no mode."""
    return (context.mode or url_mode) == "train" and is_policy(context, model)


class OnPolicySampling:
    """Overrides sampling parameters, and logs each name once."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._logged: set[str] = set()

    def neutral_params(self, params: SamplingParams) -> SamplingParams:
        """The parameters of a training rollout, before its LLM resource is applied."""
        warm = {"temperature": 1.0} if params.temperature == 0 else {}
        return replace(params, **NEUTRAL, **warm)

    def strip_request(self, request: Mapping[str, Any], forced: Mapping[str, Any]) -> Json:
        """A request without the overridden parameters. `forced` are those that the LLM resource sets."""
        stripped = dict(request)
        for name, neutral in _WIRE_NEUTRAL.items():
            value = stripped.get(name)
            warm = name == "temperature" and (name in forced or value != 0)
            if value is not None and value not in neutral and not warm:
                del stripped[name]
        self._report(tuple(name for name in request if name not in stripped))
        return stripped

    def report_overridden(self, requested: SamplingParams, used: SamplingParams) -> tuple[str, ...]:
        """Count the overridden parameters of a request, and return their names."""
        changed = tuple(
            name
            for name, default in ({"temperature": 1.0} | dict(NEUTRAL)).items()
            if getattr(requested, name) not in (getattr(used, name), default)
        )
        self._report(changed)
        return changed

    def _report(self, changed: tuple[str, ...]) -> None:
        self._counters.overridden += bool(changed)
        if new := [name for name in changed if name not in self._logged]:
            self._logged.update(new)
            logger.warning(
                "agents set %s in training rollouts; this is overridden, since learning needs samples of the policy "
                "itself (evaluation uses it); set it in the sampling_parameters of the LLM resource to force it",
                ", ".join(new),
            )


# -- constrained sampling ----------------------------------------------------------------------------------------------

EnforcementMode = Literal["auto", "always", "never"]
"""Which answers are constrained to their schema: `auto` those that nobody learns from (rollouts in the modes val
and test, and calls of no rollout), `always` all, `never` none."""


async def constrain_sampling(
    engine: Engine,
    chat: ChatFormat,
    params: SamplingParams,
    constraint: Constraint,
    *,
    tools: Tools,
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


def _outlines(constraint: Constraint, tools: Sequence[Json], markers: ThoughtMarkers | None) -> Iterator[AnswerShape]:
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


def _argument_schemas(constraint: Constraint, tools: Sequence[Json]) -> dict[str, str]:
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
