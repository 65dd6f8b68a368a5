"""What a request asks of the shape of an answer, and whether the answer has it.

Tokens drawn under a grammar have other probabilities than the policy gives them: those it forbids are not drawn, the
others are all the likelier. What is recorded are the probabilities drawn from, but a trainer computes the policy's
own, and the two cannot be compared: a token that the grammar forced was drawn with probability 1, however unlikely the
policy finds it. Worse, a policy that is always held never learns to do it by itself. So an answer that may be learned
from is drawn freely and then checked; any other is held to what was asked for where the engine can (`hold`): to a JSON
schema, or to a grammar of calls as the model writes them. It then carries `agentlightning.reshaped` on its span, and
losses refuse it by that name. The span says how it went (`agentlightning.constraint`):

    enforced    the answer could not be otherwise: it was held to its form, or no second tool call could be drawn
    checked     it was free to be otherwise, and has the shape that was asked for
    violated    it has not; `agentlightning.constraint.violations` names the fields of the request it fails

The caller gets the answer as it is, whatever the verdict. An answer that calls tools is not held to the shape of
content: the content is still to come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Literal

import jsonschema_rs
import orjson

from agentlightning.gateway.dialects.content import AnswerView
from agentlightning.gateway.errors import bad_request

Verdict = Literal["enforced", "checked", "violated"]
Check = Callable[[str], bool]
"""Whether a text is what was asked for."""

NO_PARAMETERS: Final[dict[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
LONGEST_SCHEMA: Final = 120_000
"""Bytes of a JSON schema: compiling one holds the interpreter's lock. OpenAI takes no longer ones either."""
_MATCHING: Final = jsonschema_rs.FancyRegexOptions(backtrack_limit=100_000)


@dataclass(frozen=True, slots=True)
class OutputSchema:
    """What content must be."""

    schema: str
    """As JSON."""
    check: Check


@dataclass(frozen=True, slots=True)
class Constraint:
    """The shape of one answer. As made, it asks for nothing."""

    requires_tool_call: bool = False
    names: frozenset[str] | None = None
    """The only tools that may be called; None: any."""
    one_call: bool = False
    """At most one tool call."""
    arguments: Mapping[str, Check] = field(default_factory=dict[str, Check])
    """Of strict tools, by name."""
    content: OutputSchema | None = None
    content_field: str = "response_format"
    """What the request calls the shape of content."""

    def __bool__(self) -> bool:
        return bool(
            self.requires_tool_call or self.names is not None or self.one_call or self.arguments or self.content
        )

    def evaluate(self, answer: AnswerView) -> tuple[Verdict, list[str]]:
        """(how the answer met it, the fields of the request it fails)."""
        failed = [name for name, holds in self._checks(answer) if not holds]
        if failed:
            return "violated", failed
        free = self.requires_tool_call or self.names is not None or self.arguments or self.content is not None
        free = free or (self.one_call and not answer.stops_after_call)
        return ("checked" if free and not answer.is_constrained else "enforced"), failed

    def _checks(self, answer: AnswerView) -> list[tuple[str, bool]]:
        calls = answer.tool_calls
        chosen = (calls or not self.requires_tool_call) and all(
            self.names is None or call.name in self.names for call in calls
        )
        strict = all(self.arguments[call.name](call.arguments) for call in calls if call.name in self.arguments)
        return [
            ("tool_choice", bool(chosen)),
            ("parallel_tool_calls", not self.one_call or len(calls) <= 1),
            ("tools", strict),
            (
                self.content_field,
                bool(calls) or self.content is None or self.content.check(answer.prefill + answer.content),
            ),
        ]


def _is_object(text: str) -> bool:
    return isinstance(_parsed(text), dict)


JSON_OBJECT: Final = OutputSchema('{"type":"object"}', _is_object)
"""Any JSON object."""


def json_schema(where: str, schema: Any) -> OutputSchema:
    """What a JSON schema asks for. Raises ApiError 400, naming `where`, on what is none."""
    if not isinstance(schema, dict):
        raise bad_request(where.partition(".")[0], f"{where} must be a JSON schema, which is an object")
    try:
        # Unsorted: an answer that is held to it has its keys in this order.
        written = orjson.dumps(schema).decode()
        if len(written) > LONGEST_SCHEMA:
            raise ValueError(f"it has {len(written)} bytes, and at most {LONGEST_SCHEMA} can be compiled")
        valid = _validator(orjson.dumps(schema, option=orjson.OPT_SORT_KEYS)).is_valid
    except (ValueError, TypeError, jsonschema_rs.ReferencingError) as error:
        reason = str(error).partition("\n")[0]
        raise bad_request(where.partition(".")[0], f"{where} is no JSON schema that can be checked: {reason}") from None

    def check(text: str) -> bool:
        value = _parsed(text)
        return value is not _NOT_JSON and valid(value)

    return OutputSchema(written, check)


@lru_cache(maxsize=512)
def _validator(schema: bytes) -> jsonschema_rs.Validator:
    """Agents send the same schema with every call. What a schema refers to is never fetched."""
    return jsonschema_rs.validator_for(orjson.loads(schema), offline=True, pattern_options=_MATCHING)


_NOT_JSON: Final = object()


def _parsed(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return _NOT_JSON


def strict_arguments(tools: Sequence[dict[str, Any]] | None) -> dict[str, Check]:
    """The checks of the tools that say `strict`, by name. Raises ApiError 400 on a schema that cannot be checked."""
    functions = [tool["function"] for tool in tools or ()]
    return {
        function["name"]: json_schema("tools.parameters", function["parameters"]).check
        for function in functions
        if function.get("strict") is True and function.get("parameters") is not None
    }
