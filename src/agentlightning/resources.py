"""Resources: the tunable inputs of an agent, such as models and prompts, and their versions.

An algorithm publishes a new version with `store.add_resources`; later rollouts use it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from string import Formatter
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter, ValidationError

from agentlightning.attempt_address import attempt_path
from agentlightning.errors import ConfigError
from agentlightning.rollouts import AttemptedRollout
from agentlightning.util.settings import Section
from agentlightning.util.templates import TemplateLimitError, check_length, render, sandbox


class LLM(Section):
    """A model behind an OpenAI-compatible endpoint.

    >>> agl.LLM(endpoint="http://127.0.0.1:8000/v1", model="qwen").get_base_url()
    'http://127.0.0.1:8000/v1'
    """

    resource_type: Literal["llm"] = "llm"
    endpoint: str
    """The server's root URL, with or without a trailing `/v1`."""
    model: str
    api_key: str | None = None
    sampling_parameters: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Override the parameters of the agent's requests: the trainer decides how the policy is sampled."""
    policy_version: int | None = None
    max_calls: int | None = Field(default=None, exclude_if=lambda limit: limit is None)
    """Answers that an attempt may be given by all policies together; further calls are refused. None: any number, and
    left out on the wire, so that runners which do not know the field read the resource."""

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """The OpenAI base URL; with both ids, the URL whose calls are recorded under that attempt."""
        if rollout_id is None or attempt_id is None:
            return f"{self.root_url}/v1"
        return f"{self.root_url}{attempt_path(rollout_id, attempt_id)}/v1"

    @property
    def base_url(self) -> str:
        """The OpenAI base URL."""
        return self.get_base_url()

    @property
    def root_url(self) -> str:
        """The server's root URL, without `/v1` and trailing slash."""
        return self.endpoint.rstrip("/").removesuffix("/v1").rstrip("/")


class ProxyLLM(LLM):
    """A model behind a proxy that attributes calls by their URL: each attempt gets its own base URL.

    >>> agl.ProxyLLM(endpoint="http://proxy:4000/v1", model="m").get_base_url("ro-1", "at-1")
    'http://proxy:4000/rollout/ro-1/attempt/at-1/v1'
    """

    resource_type: Literal["proxy_llm"] = "proxy_llm"  # pyright: ignore[reportIncompatibleVariableOverride]

    def with_attempted_rollout(self, rollout: AttemptedRollout) -> LLM:
        """A plain LLM with the endpoint of this attempt."""
        endpoint = self.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)
        fields: dict[str, Any] = {**dict(self), "resource_type": "llm", "endpoint": endpoint}
        return LLM(**fields)


class PromptTemplate(Section):
    """A prompt with placeholders.

    >>> agl.PromptTemplate(template="Say {word}.").format(word="hello")
    'Say hello.'
    """

    resource_type: Literal["prompt_template"] = "prompt_template"
    """What kind of resource it is."""
    template: str
    """The text."""
    engine: Literal["f-string", "jinja", "plain"] = "f-string"
    """How placeholders are written: f-string, {word}, where a text with other braces (JSON) keeps those; jinja,
    {{ word }}; plain, there are none."""

    def format(self, **values: Any) -> str:
        """Fill in the placeholders. Raises ConfigError (f-string) or jinja2.UndefinedError for a missing value, and
        ConfigError for a placeholder that accesses private attributes (`{task.__class__}`), changes a value, or does
        not end: prompts may be written by a model, and are not trusted. They see copies of the values."""
        if self.engine == "plain":
            return self.template
        from jinja2.exceptions import SecurityError

        try:
            if self.engine == "f-string":
                return check_length(_formatter().vformat(self.template, (), values))
            return render(self.template, values)
        except (SecurityError, TemplateLimitError, RecursionError, OverflowError) as error:
            raise ConfigError(f"the prompt template {self.template[:80]!r} is not allowed: {error}") from error
        except KeyError as error:
            raise ConfigError(
                f"the prompt template {self.template[:80]!r} has the placeholder {{{error.args[0]}}}, and the values "
                f"are {', '.join(values) or 'none'}; give it one, or write braces that are text as {{{{ and }}}}"
            ) from error


_PLACEHOLDER: Final = re.compile(r"\{([A-Za-z_]\w*(?:\.\w+|\[[^][{}]+\])*)(?:!([rsa]))?(?::([^{}]*))?\}")


def f_string_fields(text: str) -> list[tuple[str, str | None, str | None, str | None]]:
    """The fields of a text as `string.Formatter.parse` gives them. Where its braces are not all those of an f-string,
    only {word} is a field, and every other brace is text."""
    try:
        fields = list(Formatter().parse(text))
        if all(name is None or name[:1].isidentifier() for _, name, _, _ in fields):
            return fields
    except ValueError:  # A single brace.
        pass
    found: list[tuple[str, str | None, str | None, str | None]] = []
    end = 0
    for match in _PLACEHOLDER.finditer(text):
        found.append((text[end : match.start()], match[1], match[3] or "", match[2]))
        end = match.end()
    return [*found, (text[end:], None, None, None)]


@cache
def _formatter() -> Formatter:
    from jinja2.sandbox import SandboxedFormatter

    class PromptFormatter(SandboxedFormatter):
        def parse(self, format_string: str) -> Any:
            return f_string_fields(format_string)

    return PromptFormatter(sandbox())


Resource = Annotated[LLM | ProxyLLM | PromptTemplate, Field(discriminator="resource_type")]
NamedResources = dict[str, LLM | ProxyLLM | PromptTemplate]


def as_resources(given: Mapping[str, Any]) -> NamedResources:
    """Resources by name, where a text is a prompt template. Raises ConfigError."""
    if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"resources are given by name, as {{'prompt': ...}}, not as {type(given).__name__}")
    found = {name: PromptTemplate(template=each) if isinstance(each, str) else each for name, each in given.items()}
    try:
        return named_resources.validate_python(found)
    except ValidationError as error:
        name = error.errors()[0]["loc"][0]
        raise ConfigError(f"the resource {name} is no text, PromptTemplate or LLM: {given[str(name)]!r}") from error


def prompts_in(resources: NamedResources) -> dict[str, PromptTemplate]:
    """The prompt templates among resources."""
    return {name: each for name, each in resources.items() if isinstance(each, PromptTemplate)}


named_resources: TypeAdapter[NamedResources] = TypeAdapter(dict[str, Resource])
"""Validates named resources and converts them to and from JSON."""


@dataclass(frozen=True, slots=True)
class ResourcesUpdate:
    """One version of the named resources.

    >>> agl.ResourcesUpdate("prompts", version=1, create_time=0.0).resources
    {}
    """

    resources_id: str
    version: int
    """1 for the first; later versions have higher numbers."""
    create_time: float
    resources: NamedResources = field(default_factory=dict[str, LLM | ProxyLLM | PromptTemplate])
    update_time: float | None = None
    """Time of the last replacement of its content; None: never."""
