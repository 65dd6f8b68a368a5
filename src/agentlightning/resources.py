"""Resources: the tunable things an agent is given, and their versions.

An algorithm publishes a new version with `store.add_resources`; the next rollout is given it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from agentlightning.errors import ConfigError
from agentlightning.rollouts import AttemptedRollout, attempt_path

if TYPE_CHECKING:
    from jinja2.sandbox import SandboxedEnvironment


class LLM(BaseModel):
    """A model behind an OpenAI-compatible endpoint.

    >>> agl.LLM(endpoint="http://127.0.0.1:8000/v1", model="qwen").get_base_url()
    'http://127.0.0.1:8000/v1'
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    resource_type: Literal["llm"] = "llm"
    endpoint: str
    """The server's root URL; a `/v1` at its end is allowed and makes no difference."""
    model: str
    api_key: str | None = None
    sampling_parameters: dict[str, Any] = Field(default_factory=dict[str, Any])
    """These win over what the agent asks for: whoever trains decides how the policy is sampled."""
    policy_version: int | None = None

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """The OpenAI base URL; with both ids, the one whose calls are recorded under that attempt."""
        if rollout_id is None or attempt_id is None:
            return f"{self.root_url}/v1"
        return f"{self.root_url}{attempt_path(rollout_id, attempt_id)}/v1"

    @property
    def base_url(self) -> str:
        """The OpenAI base URL."""
        return self.get_base_url()

    @property
    def root_url(self) -> str:
        """The server's root, without `/v1` and without a slash at its end."""
        return self.endpoint.rstrip("/").removesuffix("/v1").rstrip("/")


class ProxyLLM(LLM):
    """A model behind a proxy that records calls by their URL: an attempt is given its own address there.

    >>> agl.ProxyLLM(endpoint="http://proxy:4000/v1", model="m").get_base_url("ro-1", "at-1")
    'http://proxy:4000/rollout/ro-1/attempt/at-1/v1'
    """

    resource_type: Literal["proxy_llm"] = "proxy_llm"  # pyright: ignore[reportIncompatibleVariableOverride]

    def with_attempted_rollout(self, rollout: AttemptedRollout) -> LLM:
        """A plain LLM whose endpoint is the one of this attempt."""
        return LLM(
            endpoint=self.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id),
            model=self.model,
            api_key=self.api_key,
            sampling_parameters=self.sampling_parameters,
            policy_version=self.policy_version,
        )


class PromptTemplate(BaseModel):
    """A prompt with blanks.

    >>> agl.PromptTemplate(template="Say {word}.").format(word="hello")
    'Say hello.'
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    resource_type: Literal["prompt_template"] = "prompt_template"
    template: str
    engine: Literal["f-string", "jinja", "plain"] = "f-string"

    def format(self, **values: Any) -> str:
        """The prompt with its blanks filled. Raises KeyError or jinja2.UndefinedError where a value is missing, and
        ConfigError where a blank reaches for what is private to a value (`{task.__class__}`): who writes prompts,
        a model maybe, is not who wrote the program."""
        if self.engine == "plain":
            return self.template
        from jinja2.exceptions import SecurityError
        from jinja2.sandbox import SandboxedFormatter

        try:
            if self.engine == "f-string":
                return SandboxedFormatter(_sandbox()).vformat(self.template, (), values)
            return _sandbox().from_string(self.template).render(**values)
        except SecurityError as error:
            raise ConfigError(f"the prompt template {self.template[:80]!r} may not do that: {error}") from error


@cache
def _sandbox() -> SandboxedEnvironment:
    from jinja2.runtime import StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    return SandboxedEnvironment(undefined=StrictUndefined)


Resource = Annotated[LLM | ProxyLLM | PromptTemplate, Field(discriminator="resource_type")]
NamedResources = dict[str, LLM | ProxyLLM | PromptTemplate]

named_resources: TypeAdapter[NamedResources] = TypeAdapter(dict[str, Resource])
"""Reads and writes named resources as JSON."""


@dataclass(frozen=True, slots=True)
class ResourcesUpdate:
    """One version of the named resources.

    >>> agl.ResourcesUpdate("prompts", version=1, create_time=0.0).resources
    {}
    """

    resources_id: str
    version: int
    """1 for the first; a higher one was published later."""
    create_time: float
    resources: NamedResources = field(default_factory=dict[str, LLM | ProxyLLM | PromptTemplate])
    update_time: float | None = None
    """When its content was last replaced; None: never."""
