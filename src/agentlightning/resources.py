"""Resources: the tunable things an agent is given, and their versions.

An algorithm publishes a new version with `store.add_resources`; the next rollout is given it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from agentlightning.rollouts import attempt_path


class LLM(BaseModel):
    """A model behind an OpenAI-compatible endpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    resource_type: Literal["llm"] = "llm"
    endpoint: str
    """The server's root URL, without `/v1`."""
    model: str
    api_key: str | None = None
    sampling_parameters: dict[str, Any] = Field(default_factory=dict[str, Any])
    """These win over what the agent asks for: whoever trains decides how the policy is sampled."""
    policy_version: int | None = None

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """The OpenAI base URL; with both ids, the one whose calls are recorded under that attempt."""
        root = self.endpoint.rstrip("/")
        if rollout_id is None or attempt_id is None:
            return f"{root}/v1"
        return f"{root}{attempt_path(rollout_id, attempt_id)}/v1"

    @property
    def base_url(self) -> str:
        return self.get_base_url()


class PromptTemplate(BaseModel):
    """A prompt with blanks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    resource_type: Literal["prompt_template"] = "prompt_template"
    template: str
    engine: Literal["f-string", "jinja", "plain"] = "f-string"

    def format(self, **values: Any) -> str:
        """The prompt with its blanks filled. Raises KeyError or jinja2.UndefinedError where a value is missing."""
        if self.engine == "plain":
            return self.template
        if self.engine == "f-string":
            return self.template.format(**values)
        import jinja2.sandbox

        environment = jinja2.sandbox.SandboxedEnvironment(undefined=jinja2.StrictUndefined)
        return environment.from_string(self.template).render(**values)


Resource = Annotated[LLM | PromptTemplate, Field(discriminator="resource_type")]
NamedResources = dict[str, LLM | PromptTemplate]

named_resources: TypeAdapter[NamedResources] = TypeAdapter(dict[str, Resource])
"""Reads and writes named resources as JSON."""


@dataclass(frozen=True, slots=True)
class ResourcesUpdate:
    """One version of the named resources."""

    resources_id: str
    version: int
    """1 for the first; a higher one was published later."""
    create_time: float
    resources: NamedResources = field(default_factory=dict[str, LLM | PromptTemplate])
