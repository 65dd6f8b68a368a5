"""What an agent function is given, by the name of each parameter.

| parameter | value |
| --- | --- |
| `task` | the rollout's input |
| `llm` | the first LLM resource; its `endpoint` and `base_url` lead to this attempt |
| `prompt_template` | the first PromptTemplate resource |
| `resources` | all resources, by name |
| `rollout` | the `AttemptedRollout` |
| `base_url`, `api_key`, `model` | where this attempt's model calls go, its key, the model's name |
| the name of a resource | that resource |
| a key of a dict task | that value |
| the first positional parameter, whatever its name | the task |

The first row that fits wins. A parameter that nothing fits keeps its default; without one it is an AgentError.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentlightning.errors import AgentError
from agentlightning.resources import LLM, NamedResources, PromptTemplate, ProxyLLM
from agentlightning.rollouts import AttemptedRollout

KNOWN = ("task", "llm", "prompt_template", "resources", "rollout", "base_url", "api_key", "model")


class Stoppable(Protocol):
    """Something that can be stopped from outside."""

    def terminate(self) -> None:
        """Ask it to end; make it end soon."""
        ...

    def kill(self) -> None:
        """End it now."""
        ...


class AttemptLLM(LLM):
    """An LLM bound to one attempt: every way to ask for its URL gives the one whose calls are recorded there."""

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        return self.endpoint


@dataclass(slots=True)
class Call:
    """One attempt, as an agent sees it."""

    rollout: AttemptedRollout
    resources: NamedResources = field(default_factory=NamedResources)
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """The attempt's variables, over those of the process."""
    task: Any = None
    cancelled: bool = False
    program: Stoppable | None = None
    """What runs for the attempt outside of this process."""

    def known(self) -> dict[str, Any]:
        """The value of each known parameter; those without one are absent."""
        llm = first_llm(self.resources)
        template = next((r for r in self.resources.values() if isinstance(r, PromptTemplate)), None)
        values: dict[str, Any] = {
            "task": self.task,
            "llm": llm,
            "prompt_template": template,
            "resources": self.resources,
            "rollout": self.rollout,
            "base_url": llm.base_url if llm else self._variable("OPENAI_BASE_URL"),
            "api_key": (llm and llm.api_key) or self._variable("OPENAI_API_KEY"),
            "model": llm.model if llm else None,
        }
        return {name: value for name, value in values.items() if value is not None or name == "task"}

    def _variable(self, name: str) -> str | None:
        return self.environment.get(name) or os.environ.get(name)


def first_llm(resources: NamedResources) -> LLM | None:
    """The LLM an agent is given where it asks for one."""
    return next((resource for resource in resources.values() if isinstance(resource, LLM)), None)


def bind_resources(resources: NamedResources, server_url: str, environment: Mapping[str, str]) -> NamedResources:
    """The resources of one attempt: an LLM served by our own server leads to this attempt, others stay as they are.
    So do all where the attempt's model calls are not redirected."""
    if "OPENAI_BASE_URL" not in environment:
        return resources
    return {name: _bind(resource, server_url, environment) for name, resource in resources.items()}


def _bind(resource: LLM | PromptTemplate, server_url: str, environment: Mapping[str, str]) -> LLM | PromptTemplate:
    if not isinstance(resource, LLM):
        return resource
    fields = dict(resource)
    del fields["resource_type"]
    if _ours(resource, server_url):
        fields["endpoint"] = environment["OPENAI_BASE_URL"]
        fields["api_key"] = resource.api_key or environment["OPENAI_API_KEY"]
    elif isinstance(resource, ProxyLLM):
        fields["endpoint"] = resource.get_base_url(environment["AGL_ROLLOUT_ID"], environment["AGL_ATTEMPT_ID"])
    else:
        return resource
    return AttemptLLM(**fields)


def _ours(llm: LLM, server_url: str) -> bool:
    """A policy in training is always reached through the server we report to, whatever name others have for it."""
    return llm.policy_version is not None or llm.root_url == server_url.rstrip("/")


PLAIN = (str, int, float, bool)


@dataclass(frozen=True, slots=True)
class Signature:
    """A function and its parameters, read once."""

    function: Callable[..., Any]
    name: str
    parameters: tuple[inspect.Parameter, ...]
    first: str | None
    """The first positional parameter."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Signature:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError) as error:
            raise AgentError(f"the parameters of {name} cannot be read: {error}; wrap it in a function") from error
        parameters = tuple(p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
        first = next((p.name for p in parameters if p.kind != p.KEYWORD_ONLY), None)
        return cls(function, name, parameters, first)

    def call(self, call: Call) -> Any:
        """The function's result, an awaitable if it is async. Raises AgentError for a parameter that nothing fits."""
        values = {**_keys(call.task), **call.resources, **call.known()}
        if self.first is not None and not (isinstance(call.task, Mapping) and self._first_is_plain):
            values.setdefault(self.first, call.task)
        return self.apply(values)

    @property
    def _first_is_plain(self) -> bool:
        """Whether the first parameter says that it takes no object: then it is meant to be a key of the task."""
        annotation = self.parameters[0].annotation
        return any(annotation is kind or annotation == kind.__name__ for kind in PLAIN)

    def apply(self, values: Mapping[str, Any]) -> Any:
        """Call with the values whose names are parameters."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for parameter in self.parameters:
            if parameter.name in values:
                if parameter.kind == parameter.POSITIONAL_ONLY:
                    args.append(values[parameter.name])
                else:
                    kwargs[parameter.name] = values[parameter.name]
            elif parameter.default is parameter.empty:
                raise AgentError(self._unfit(parameter.name, values))
        return self.function(*args, **kwargs)

    def _unfit(self, name: str, values: Mapping[str, Any]) -> str:
        hint = difflib.get_close_matches(name, [*values, *KNOWN], n=1)
        guess = f" Did you mean {hint[0]!r}?" if hint else ""
        missing = " There is none in this rollout." if name in KNOWN else ""
        return (
            f"nothing fits the parameter {name!r} of {self.name}.{missing}{guess} "
            f"Here it can be given: {', '.join(sorted(values))}"
        )


def _keys(task: Any) -> dict[str, Any]:
    return {key: value for key, value in task.items() if isinstance(key, str)} if isinstance(task, Mapping) else {}
