"""Constraints that a request puts on the form of its answer, and whether an answer meets them.

Constrained sampling changes probabilities: tokens that a grammar forbids are never sampled, and the others become more
likely. The recorded log-probabilities are those of the constrained distribution, whereas a trainer computes the
policy's own, and the two cannot be compared: a token that the grammar forces has probability 1, however unlikely the
policy finds it. A policy that is always constrained also never learns the form by itself. So answers that may be
trained on are sampled freely and then checked; all others are constrained where the engine supports it
(`gateway.sampling`). Constrained answers carry `agentlightning.reshaped` on their span, and losses reject
them by that attribute. The span also has the verdict (`agentlightning.constraint`):

    enforced    the answer could not violate it: sampling was constrained, or ended with the first tool call
    checked     the answer was free to violate it, and meets it
    violated    it does not; `agentlightning.constraint.violations` names the fields of the request that it violates

The caller gets the answer whatever the verdict. The content of an answer that calls tools is not checked: the content
that the constraint requires is still to come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Literal

import jsonschema_rs
import orjson

from agentlightning.chat.tool_calls.format import Tools
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.errors import bad_request
from agentlightning.util.json_values import dumps, loads

Verdict = Literal["enforced", "checked", "violated"]
Check = Callable[[str], bool]
"""Whether a text meets a constraint."""

NO_PARAMETERS: Final[dict[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
MAX_SCHEMA_BYTES: Final = 120_000
"""Limit in bytes for a JSON schema: compiling one holds the interpreter lock. OpenAI has the same limit."""
_MATCHING: Final = jsonschema_rs.FancyRegexOptions(backtrack_limit=100_000)


@dataclass(frozen=True, slots=True)
class OutputSchema:
    """A JSON schema that the content must match."""

    schema: str
    """The schema as JSON text."""
    check: Check
    given: Mapping[str, Any] = field(default_factory=lambda: {"type": "json_object"})
    """As the request has it."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """The constraints on one answer; by default none."""

    requires_tool_call: bool = False
    names: frozenset[str] | None = None
    """The only tools that may be called; None: any."""
    single_tool_call: bool = False
    """At most one tool call."""
    arguments: Mapping[str, Check] = field(default_factory=dict[str, Check])
    """The checks of strict tools, by name."""
    content: OutputSchema | None = None
    content_field: str = "response_format"
    """The field of the request that sets `content`."""

    def __bool__(self) -> bool:
        return bool(
            self.requires_tool_call or self.names is not None or self.single_tool_call or self.arguments or self.content
        )

    def evaluate(self, answer: Answer) -> tuple[Verdict, list[str]]:
        """(verdict, fields of the request that the answer violates)."""
        failed = [name for name, holds in self._checks(answer) if not holds]
        if failed:
            return "violated", failed
        free = self.requires_tool_call or self.names is not None or self.arguments or self.content is not None
        free = free or (self.single_tool_call and not answer.stops_after_tool_call)
        return ("checked" if free and not answer.is_constrained else "enforced"), failed

    def _checks(self, answer: Answer) -> list[tuple[str, bool]]:
        calls = answer.tool_calls
        chosen = (calls or not self.requires_tool_call) and all(
            self.names is None or call.name in self.names for call in calls
        )
        strict = all(self.arguments[call.name](call.arguments) for call in calls if call.name in self.arguments)
        return [
            ("tool_choice", bool(chosen)),
            ("parallel_tool_calls", not self.single_tool_call or len(calls) <= 1),
            ("tools", strict),
            (
                self.content_field,
                bool(calls) or self.content is None or self.content.check(answer.prefill + answer.content),
            ),
        ]


def _is_object(text: str) -> bool:
    return isinstance(_parse(text), dict)


JSON_OBJECT: Final = OutputSchema('{"type":"object"}', _is_object)
"""Any JSON object."""


def json_schema(where: str, schema: Any) -> OutputSchema:
    """Compile a JSON schema. Raises ApiError 400, naming `where`, if it is none."""
    if not isinstance(schema, dict):
        raise bad_request(where, f"{where} must be a JSON schema, which is an object")
    try:
        # Unsorted: a constrained answer has its keys in this order.
        written = dumps(schema).decode()
        if len(written) > MAX_SCHEMA_BYTES:
            raise ValueError(f"it has {len(written)} bytes, and at most {MAX_SCHEMA_BYTES} can be compiled")
        valid = _validator(dumps(schema, option=orjson.OPT_SORT_KEYS)).is_valid
    except (ValueError, TypeError, jsonschema_rs.ReferencingError) as error:
        reason = str(error).partition("\n")[0]
        raise bad_request(where, f"{where} is no JSON schema that can be checked: {reason}") from None

    def check(text: str) -> bool:
        value = _parse(text)
        return value is not _NOT_JSON and valid(value)

    return OutputSchema(written, check)


@lru_cache(maxsize=512)
def _validator(schema: bytes) -> jsonschema_rs.Validator:
    """Cached, since agents send the same schema with every call. References to other documents are never fetched."""
    return jsonschema_rs.validator_for(loads(schema), offline=True, pattern_options=_MATCHING)


_NOT_JSON: Final = object()


def _parse(text: str) -> Any:
    try:
        return loads(text)
    except orjson.JSONDecodeError:
        return _NOT_JSON


def strict_arguments(tools: Tools) -> dict[str, Check]:
    """The checks of the tools with `strict`, by name. Raises ApiError 400 for a schema that cannot be checked."""
    functions = [tool["function"] for tool in tools or ()]
    return {
        function["name"]: json_schema("tools.parameters", function["parameters"]).check
        for function in functions
        if function.get("strict") is True and function.get("parameters") is not None
    }
