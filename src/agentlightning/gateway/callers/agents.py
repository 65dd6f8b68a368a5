"""Identifies the agent behind a call by its header, baggage, model name or system prompt, in this order.

Every model call passes here, whatever its dialect and destination. A call that names no agent still has a key, made
from its system prompt and tools, which distinguishes the agents of a program. Never rejects a call.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import takewhile
from typing import Any, Final, Self
from urllib.parse import unquote

from msgspec import Struct
from pydantic import Field, field_validator, model_validator

from agentlightning.attempt_address import AGENT_BAGGAGE
from agentlightning.errors import ConfigError
from agentlightning.gateway.answer import object_of, objects
from agentlightning.gateway.dialects.content_parts import BILLING
from agentlightning.util.settings import Section

HEADER: Final = "x-agentlightning-agent"
KEY_CHARACTERS: Final = 2048
"""The part of the system prompt in the key: what differs between calls (a date, a file) usually stands further down."""
MAX_NAME_CHARACTERS: Final = 256
_MAX_CACHED: Final = 1024


class AgentRule(Section):
    """How calls of one agent are recognized: an entry of `[[agents]]` in the configuration.

    A rule without a `name` takes it from the group `agent` of `matches`.
    """

    name: str | None = Field(default=None, min_length=1, max_length=MAX_NAME_CHARACTERS)
    """The name of the agent on spans."""
    models: tuple[str, ...] = ()
    """Model names that mean this agent."""
    serve: str | None = None
    """The model that serves these names; None: the model of that name, or else the default model."""
    contains: str | None = Field(default=None, min_length=1)
    """Text that the agent's system prompt contains."""
    matches: str | None = Field(default=None, min_length=1)
    """Regular expression that is searched for in the agent's system prompt."""

    @field_validator("matches")
    @classmethod
    def _check_pattern(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"matches={pattern!r} is not a regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _check_complete(self) -> Self:
        if self.name is None and "agent" not in re.compile(self.matches or "").groupindex:
            raise ValueError("an agent without a name needs `matches` with a group (?P<agent>...) for it")
        if not self.models and self.contains is None and self.matches is None:
            raise ValueError(f"nothing identifies the calls of agent {self.name!r}: set models, contains or matches")
        if self.serve is not None and not self.models:
            raise ValueError(f"agent {self.name!r} has serve={self.serve!r} but no models to serve")
        if self.models and self.name is None:
            raise ValueError(f"models={list(self.models)} need the name of their agent")
        return self


class Agent(Struct, frozen=True):
    """The agent behind a call, and the model it asks for."""

    name: str | None = None
    key: str | None = None
    """12 hexadecimal digits, a digest of the system prompt and the names of the tools; None if a call has neither."""
    model: str | None = None
    """The model to serve, with aliases resolved; None if the call names none."""
    ignored: tuple[str, ...] = ()
    """Other names in the call that were ignored."""


UNKNOWN: Final = Agent()


class AgentMatcher:
    """Identifies agents by their calls and by the first rule that matches. Raises ConfigError if a model name belongs
    to two agents."""

    def __init__(self, rules: Sequence[AgentRule] = ()) -> None:
        self._aliases: dict[str, AgentRule] = {}
        self._find_cached = lru_cache(_MAX_CACHED)(self._find)
        """By the identifying values of a call, which are equal in every call of an agent."""
        for rule in rules:
            for model in rule.models:
                if model in self._aliases:
                    raise ConfigError(f"the model name {model!r} belongs to two agents; leave it to one")
                self._aliases[model] = rule
        self._patterns = [
            (rule.name, rule.contains or "", re.compile(rule.matches) if rule.matches else None)
            for rule in rules
            if rule.contains is not None or rule.matches is not None
        ]

    def identify(self, headers: Mapping[str, str], body: Mapping[str, Any], served: Container[str] = ()) -> Agent:
        """The agent behind a call. `headers` have lower-case names; `body` is a request in any dialect; `served` are
        the existing model names, which distinguish `writer@policy` from a model of that name."""
        requested = body.get("model")
        system, tools = system_prompt(body), tool_names(body)
        # The meaning of the model name is not cached: runs join and leave, and their models with them.
        alias, model = self.alias(requested if isinstance(requested, str) else None, served)
        find = self._find_cached if len(system) <= KEY_CHARACTERS else self._find
        return find(alias, model, headers.get(HEADER), headers.get("baggage", ""), system, tuple(tools))

    def _find(
        self,
        alias: str | None,
        model: str | None,
        header: str | None,
        baggage: str,
        system: str,
        tools: tuple[str, ...],
    ) -> Agent:
        in_baggage = read_baggage(baggage).get(AGENT_BAGGAGE)
        candidates = [("the header", header), ("the baggage", in_baggage), ("the model name", alias)]
        names = [(source, name[:MAX_NAME_CHARACTERS]) for source, name in candidates if name]
        name = names[0][1] if names else self._by_pattern(system)
        ignored = tuple(f"agent {other!r} of {source}" for source, other in names if other != name)
        return Agent(name, agent_key(system, tools), model, ignored)

    def alias(self, model: str | None, served: Container[str] = ()) -> tuple[str | None, str | None]:
        """(agent, model) of a model name: `writer@policy` is the model `policy` for the agent `writer`, and `writer@`
        the default model, unless there is a model with the whole name."""
        if model is None:
            return None, None
        if (rule := self._aliases.get(model)) is not None:
            return rule.name, rule.serve or (model if model in served else None)
        agent, at, base = model.rpartition("@")
        if not at or not agent or model in served or (base and base not in served):
            return None, model
        return agent, base or None

    def _by_pattern(self, system: str) -> str | None:
        for name, text, pattern in self._patterns:
            if text not in system:
                continue
            if pattern is None:
                return name
            if (match := pattern.search(system)) is not None:
                agent = name or match.groupdict().get("agent")
                return agent[:MAX_NAME_CHARACTERS] if agent else None
        return None


# -- what identifies an agent ------------------------------------------------------------------------------------------


def system_prompt(body: Mapping[str, Any]) -> str:
    """The system prompt of a request in any dialect; "" if it has none."""
    if prompt := body.get("system") or body.get("instructions"):
        return _text(prompt)
    turns = objects(body.get("messages") or body.get("input"))
    first = takewhile(lambda turn: turn.get("role") in ("system", "developer"), turns)
    return "\n".join([_text(turn.get("content")) for turn in first])


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    texts = [block.get("text") for block in objects(content)]
    return "\n".join(text for text in texts if isinstance(text, str) and not text.startswith(BILLING))


def tool_names(body: Mapping[str, Any]) -> list[str]:
    """The names of the tools of a request, sorted; the type of a tool without a name."""
    tools = objects(body.get("tools"))
    found = [(object_of(tool, "function") or tool).get("name") or tool.get("type") for tool in tools]
    return sorted(name for name in found if isinstance(name, str) and name)


def agent_key(system: str, tools: Sequence[str]) -> str | None:
    """A key that is the same for every call of an agent; None without a system prompt and tools."""
    if not system and not tools:
        return None
    identity = "\0".join((system[:KEY_CHARACTERS], *tools))
    return blake2b(identity.encode(errors="replace"), digest_size=6).hexdigest()


def read_baggage(header: str) -> dict[str, str]:
    """The decoded entries of a W3C `baggage` header, without properties and malformed entries."""
    entries: dict[str, str] = {}
    for entry in header.split(","):
        key, equals, value = entry.partition(";")[0].partition("=")
        if equals and key.strip() and value.strip():
            entries[key.strip()] = unquote(value.strip())
    return entries
