"""Which agent speaks: by the header, the baggage, the model name or the system prompt of a call, in this order.

Called for every model call, whatever its dialect and wherever it goes. A call that names nobody still has a key, made
from its system prompt and its tools, by which the agents of a program can be told apart. Never refuses a call.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, Self, cast
from urllib.parse import unquote

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from agentlightning.attempt_address import AGENT_BAGGAGE
from agentlightning.errors import ConfigError

HEADER: Final = "x-agentlightning-agent"
KEY_CHARACTERS: Final = 2048
"""How much of a system prompt makes the key: what changes from call to call (the date, a file) stands further down."""
MAX_NAME: Final = 256
_MAX_KNOWN: Final = 1024
_BILLING: Final = "x-anthropic-billing-header:"
"""Claude Code's first block, which differs between calls of one agent."""


class AgentRule(BaseModel):
    """How one agent is recognised, as `[[agents]]` of the configuration has it.

    A rule without a `name` takes it from the group `agent` of `matches`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str | None = Field(default=None, min_length=1, max_length=MAX_NAME)
    """What spans call the agent."""
    models: tuple[str, ...] = ()
    """Model names that mean this agent."""
    serve: str | None = None
    """The model that serves those names; None: the model of that name, or else the default one."""
    contains: str | None = Field(default=None, min_length=1)
    """Text that the agent's system prompt holds."""
    matches: str | None = Field(default=None, min_length=1)
    """Regular expression that is found in the agent's system prompt."""

    @field_validator("matches")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"matches={pattern!r} is no regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _says_enough(self) -> Self:
        if self.name is None and "agent" not in re.compile(self.matches or "").groupindex:
            raise ValueError("an agent without a name needs `matches` with a group (?P<agent>...) that gives it")
        if not self.models and self.contains is None and self.matches is None:
            raise ValueError(f"nothing says which calls are agent {self.name!r}'s: give models, contains or matches")
        if self.serve is not None and not self.models:
            raise ValueError(f"agent {self.name!r} has serve={self.serve!r} but no models that it could serve")
        if self.models and self.name is None:
            raise ValueError(f"models={list(self.models)} mean no agent without a name")
        return self


class Agent(Struct, frozen=True):
    """Who speaks, and the model it means."""

    name: str | None = None
    key: str | None = None
    """12 hexadecimal digits of the system prompt and the names of the tools; None where a call has neither."""
    model: str | None = None
    """The model to serve it with, once an alias is read; None where the call names none."""
    ignored: tuple[str, ...] = ()
    """What else was said, and not followed."""


UNKNOWN: Final = Agent()


class AgentMatcher:
    """Recognises agents by what they say and by `rules`, the first that fits. Raises ConfigError where a model name
    means two agents."""

    def __init__(self, rules: Sequence[AgentRule] = ()) -> None:
        self._aliases: dict[str, AgentRule] = {}
        self._known: dict[tuple[str | None, ...], tuple[Container[str], Agent]] = {}
        """What was shown -> (the models there were, who it was). An agent shows the same in every call."""
        for rule in rules:
            for model in rule.models:
                if model in self._aliases:
                    raise ConfigError(f"the model name {model!r} means two agents; leave it with one")
                self._aliases[model] = rule
        self._patterns = [
            (rule.name, rule.contains or "", re.compile(rule.matches) if rule.matches else None)
            for rule in rules
            if rule.contains is not None or rule.matches is not None
        ]

    @property
    def aliases(self) -> tuple[str, ...]:
        """The model names that mean an agent."""
        return tuple(self._aliases)

    def identify(self, headers: Mapping[str, str], asked: Mapping[str, Any], served: Container[str] = ()) -> Agent:
        """The agent behind a call. `headers` by lower-case name, `asked` the request as it came, in any dialect;
        `served` are the model names there are, by which `writer@policy` is told from a model of that name."""
        given = asked.get("model")
        system, tools = system_prompt(asked), tool_names(asked)
        shown = given if isinstance(given, str) else None, headers.get(HEADER), headers.get("baggage"), system, *tools
        if (known := self._known.get(shown)) is not None and known[0] is served:
            return known[1]
        agent = self._identify(shown[:3], system, tools, served)
        if len(system) <= KEY_CHARACTERS:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[shown] = served, agent
        return agent

    def _identify(
        self,
        shown: tuple[str | None, str | None, str | None],
        system: str,
        tools: Sequence[str],
        served: Container[str],
    ) -> Agent:
        """`shown`: model name, header, baggage."""
        given, header, baggage = shown
        alias, model = self.alias(given, served)
        said = [("the header", header), ("the baggage", None), ("the model name", alias)]
        if baggage is not None:
            said[1] = ("the baggage", read_baggage(baggage).get(AGENT_BAGGAGE))
        names = [(source, name[:MAX_NAME]) for source, name in said if name]
        name = names[0][1] if names else self._by_pattern(system)
        ignored = tuple(f"agent {other!r} of {source}" for source, other in names if other != name)
        return Agent(name, agent_key(system, tools), model, ignored)

    def alias(self, model: str | None, served: Container[str] = ()) -> tuple[str | None, str | None]:
        """(the agent a model name means, the model it means): `writer@policy` is the model `policy` asked for by the
        agent `writer`, and `writer@` the default model, unless there is a model of the whole name."""
        if model is None:
            return None, None
        if (rule := self._aliases.get(model)) is not None:
            return rule.name, rule.serve or (model if model in served else None)
        agent, at, base = model.rpartition("@")
        if not at or not agent or model in served or (base and base not in served):
            return None, model
        return agent, base or None

    def _by_pattern(self, system: str) -> str | None:
        for name, contained, pattern in self._patterns:
            if contained not in system:
                continue
            if pattern is None:
                return name
            if (found := pattern.search(system)) is not None:
                named = name or found.groupdict().get("agent")
                return named[:MAX_NAME] if named else None
        return None


# -- what a request shows of its agent ---------------------------------------------------------------------------------


def system_prompt(asked: Mapping[str, Any]) -> str:
    """The system prompt of a request in any dialect; "" where it has none."""
    given = asked.get("system") or asked.get("instructions")
    if given:
        return _text(given)
    turns = asked.get("messages") or asked.get("input")
    parts: list[str] = []
    for turn in cast("list[Any]", turns) if isinstance(turns, list) else ():
        if not isinstance(turn, dict) or (message := cast("dict[str, Any]", turn)).get("role") not in _SYSTEM_ROLES:
            break
        parts.append(_text(message.get("content")))
    return "\n".join(parts)


_SYSTEM_ROLES: Final = ("system", "developer")


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    blocks = cast("list[Any]", content) if isinstance(content, list) else []
    texts = [cast("dict[str, Any]", block).get("text") for block in blocks if isinstance(block, dict)]
    return "\n".join(text for text in texts if isinstance(text, str) and not text.startswith(_BILLING))


def tool_names(asked: Mapping[str, Any]) -> list[str]:
    """The names of the tools a request offers, in alphabetical order; a tool without a name has its type."""
    tools = asked.get("tools")
    names = [_tool_name(tool) for tool in cast("list[Any]", tools)] if isinstance(tools, list) else []
    return sorted(name for name in names if name)


def _tool_name(tool: Any) -> str | None:
    if not isinstance(tool, dict):
        return None
    known = cast("dict[str, Any]", tool)
    function = known.get("function")
    name = cast("dict[str, Any]", function).get("name") if isinstance(function, dict) else known.get("name")
    name = name or known.get("type")
    return name if isinstance(name, str) else None


def agent_key(system: str, tools: Sequence[str]) -> str | None:
    """The same for every call of one agent, whatever it talks about; None where there is nothing to go by."""
    if not system and not tools:
        return None
    seen = "\0".join((system[:KEY_CHARACTERS], *tools))
    return blake2b(seen.encode(errors="replace"), digest_size=6).hexdigest()


def read_baggage(header: str) -> dict[str, str]:
    """The entries of a W3C `baggage` header, decoded; properties are left out, and so is what is no entry."""
    entries: dict[str, str] = {}
    for entry in header.split(","):
        key, equals, value = entry.partition(";")[0].partition("=")
        if equals and key.strip() and value.strip():
            entries[key.strip()] = unquote(value.strip())
    return entries
