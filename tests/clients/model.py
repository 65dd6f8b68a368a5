"""A scripted model that does what suites of clients ask of a capable one: it calls tools with arguments of the prompt,
keeps to a schema, and says something else otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from agentlightning.engine.base import ConstraintKind, Sample, SamplingParams
from agentlightning.testing import ScriptedEngine

OBJECT = '{"setup": "Why do cats sleep?", "punchline": "They can."}'
"""Where any JSON object is asked for."""
Json = dict[str, Any]
QUOTED = re.compile(r"['\"\u201c]([^'\"\u201d]+)['\"\u201d]")


class CapableEngine(ScriptedEngine):
    """Answers by `answer`, and with an instance of the schema where one is enforced."""

    def __init__(self) -> None:
        super().__init__(answer, context_length=1_000_000, tokens_per_step=8)

    async def can_enforce(self, text: str, kind: ConstraintKind = "json_schema") -> bool:
        return kind == "json_schema"

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: Callable[[Sequence[int]], None] | None = None,
        *,
        affinity: str = "",
    ) -> Sample:
        if params.constraint is None:
            return await super().sample(prompt_token_ids, params, on_tokens, affinity=affinity)
        schema = orjson.loads(params.constraint[1])
        asked = self.chat.decode(prompt_token_ids)
        text = orjson.dumps(instance(schema, asked)).decode() if schema.get("properties") else OBJECT
        return await ScriptedEngine([text], tokens_per_step=8).sample(
            prompt_token_ids, params, on_tokens, affinity=affinity
        )


def answer(messages: list[Json]) -> str:
    """A call of the tool that the last message names, or of the first one, unless it is a tool's result; else text."""
    if not messages:
        return "Text goes on."
    last = messages[-1]
    tools = _tools(messages[0]["content"])
    if tools and last["role"] == "user" and not last["content"].startswith("<tool_response>"):
        chosen = next((each for each in tools if each["name"] in last["content"]), tools[0])
        arguments = instance(chosen.get("parameters") or {}, last["content"])
        call = orjson.dumps({"name": chosen["name"], "arguments": arguments}).decode()
        return f"<tool_call>\n{call}\n</tool_call>"
    if "json" in last["content"].lower():
        return OBJECT
    return "Hello there, and thank you for asking. Here is what I know about it."


def instance(schema: Json, asked: str) -> Any:
    """A value that fits the schema, from numbers and quoted words of what was asked where there are some."""
    numbers, quoted = iter(re.findall(r"-?\d+", asked)), iter(QUOTED.findall(asked))
    root = schema

    def make(part: Json) -> Any:
        if "$ref" in part:
            found: Any = root
            for key in part["$ref"].removeprefix("#/").split("/"):
                found = found[key]
            return make(found)
        if "const" in part or "enum" in part:
            return part.get("const", (part.get("enum") or [None])[0])
        for group in ("anyOf", "oneOf", "allOf"):
            if group in part:
                return make(part[group][0])
        kind = part.get("type", "object" if "properties" in part else "string")
        kind = kind[0] if isinstance(kind, list) else kind
        if kind == "object":
            return {name: make(each) for name, each in (part.get("properties") or {}).items()}
        if kind == "array":
            return [make(part["items"])] if "items" in part else []
        if kind == "integer":
            return int(next(numbers, 1))
        return {"number": 1.5, "boolean": True, "null": None}.get(kind, next(quoted, "pirate"))

    return make(schema)


def _tools(text: str) -> list[Json]:
    if not text.startswith('[{"'):
        return []
    return [each.get("function", each) for each in orjson.loads(text)]
