"""Arguments of an agent function, and of a reward function, chosen by the name of each parameter.

| parameter | value |
| --- | --- |
| `task` | the rollout's input |
| `llm` | the first LLM resource; its `endpoint` and `base_url` lead to this attempt |
| `prompt_template` | the first PromptTemplate resource |
| `resources` | all resources, by name |
| `rollout` | the `AttemptedRollout` |
| `base_url`, `api_key`, `model` | URL of this attempt's model calls, the key for it, the name of the model |
| the name of a resource | that resource |
| a key of a dict task | that value |
| the first positional parameter, whatever its name | the task |

The first matching row wins. A parameter without a match keeps its default; without a default it is an AgentError.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, Self

from agentlightning.errors import AgentError
from agentlightning.resources import LLM, NamedResources, PromptTemplate, ProxyLLM
from agentlightning.rollouts import AttemptedRollout
from agentlightning.util.json_values import Json

PARAMETERS = ("task", "llm", "prompt_template", "resources", "rollout", "base_url", "api_key", "model")


class AgentResources(dict[str, LLM | ProxyLLM | PromptTemplate]):
    """The resources of an attempt as its agent reads them: one that is missing is named beside those that are there."""

    def __missing__(self, name: str) -> LLM | ProxyLLM | PromptTemplate:
        raise KeyError(f"no resource is called {name!r}; this rollout has {', '.join(self) or 'none'}")


class Stoppable(Protocol):
    """Something elsewhere that runs for an attempt, such as a Job of Kubernetes."""

    def terminate(self) -> None:
        """Ask it to exit, and kill it after the grace."""
        ...

    def kill(self) -> None:
        """Kill it immediately."""
        ...


class AttemptLLM(LLM):
    """An LLM bound to one attempt: every way to get its URL returns the URL whose calls are recorded there."""

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        return self.endpoint


class OwnProcessNeededError(AgentError):
    """An attempt touches what all attempts in its process share."""


@dataclass(slots=True)
class Invocation:
    """One attempt as the agent sees it, with its resources and environment."""

    rollout: AttemptedRollout
    resources: NamedResources = field(default_factory=NamedResources)
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables of the attempt, which override those of the process."""
    task: Any = None
    cancelled: bool = False
    awaited: asyncio.Task[Any] | None = None
    """What is interrupted when it is cancelled."""
    program: Stoppable | None = None
    """What runs elsewhere for a blocking agent, and has to be stopped when the attempt is."""
    group: int = 0
    """The process group of a command that runs here; 0 for none."""
    on_program: Callable[[int], None] = lambda group: None
    """Called with the group of a command that has started, and with 0 when it has ended."""
    needs_process: str = ""
    """What it has touched that all attempts in its process share."""

    def named_values(self) -> Json:
        """Values of the known parameters; those without a value are absent."""
        llm = first_llm(self.resources)
        template = next((r for r in self.resources.values() if isinstance(r, PromptTemplate)), None)
        values: Json = {
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
    """The first LLM resource, which agents get as `llm`."""
    return next((resource for resource in resources.values() if isinstance(resource, LLM)), None)


def bind_resources(resources: NamedResources, server_url: str, environment: Mapping[str, str]) -> AgentResources:
    """The resources of one attempt: LLMs served by our own server get the attempt's URL. Other resources stay
    unchanged, and so do all of them if the attempt's model calls are not redirected."""
    if "OPENAI_BASE_URL" not in environment:
        return AgentResources(resources)
    return AgentResources({name: _bind(each, server_url, environment) for name, each in resources.items()})


def _bind(resource: LLM | PromptTemplate, server_url: str, environment: Mapping[str, str]) -> LLM | PromptTemplate:
    if not isinstance(resource, LLM):
        return resource
    # A policy in training is always served by our server, whatever host name its URL has.
    if resource.policy_version is not None or resource.root_url == server_url.rstrip("/"):
        endpoint, key = environment["OPENAI_BASE_URL"], environment["OPENAI_API_KEY"]
    elif isinstance(resource, ProxyLLM):
        endpoint = resource.get_base_url(environment["AGL_ROLLOUT_ID"], environment["AGL_ATTEMPT_ID"])
        key = environment["AGL_KEY"]  # the URL of such a proxy holds none
    else:
        return resource
    own: Json = {"resource_type": "llm", "endpoint": endpoint, "api_key": resource.api_key or key}
    return AttemptLLM(**{**dict(resource), **own})


SCALAR_TYPES: Final = ("str", "int", "float", "bool")


@dataclass(frozen=True, slots=True)
class Signature:
    """A function and its inspected parameters."""

    function: Callable[..., Any]
    name: str
    parameters: tuple[inspect.Parameter, ...]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Self:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError) as error:
            raise AgentError(f"the parameters of {name} cannot be read: {error}; wrap it in a function") from error
        parameters = tuple(p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
        return cls(function, name, parameters)

    def bind(self, invocation: Invocation) -> Callable[[], Any]:
        """The function with injected arguments. Raises AgentError for a parameter without a value."""
        values = {**string_keys(invocation.task), **invocation.resources, **invocation.named_values()}
        for first in self.parameters[:1]:
            # One annotated as a scalar is a key of a dict task, not the task itself.
            is_key = getattr(first.annotation, "__name__", first.annotation) in SCALAR_TYPES
            if first.kind != first.KEYWORD_ONLY and not (is_key and isinstance(invocation.task, Mapping)):
                values.setdefault(first.name, invocation.task)
        return self.bind_values(values)

    def bind_values(self, values: Mapping[str, Any]) -> Callable[[], Any]:
        """The function with those values whose names are parameters."""
        args: list[Any] = []
        kwargs: Json = {}
        for parameter in self.parameters:
            if parameter.name in values:
                if parameter.kind == parameter.POSITIONAL_ONLY:
                    args.append(values[parameter.name])
                else:
                    kwargs[parameter.name] = values[parameter.name]
            elif parameter.default is parameter.empty:
                raise AgentError(self._no_value_message(parameter.name, values))
        return partial(self.function, *args, **kwargs)

    def _no_value_message(self, name: str, values: Mapping[str, Any]) -> str:
        hint = difflib.get_close_matches(name, [*values, *PARAMETERS], n=1)
        advice = " This rollout has none." if name in PARAMETERS else f" Did you mean {hint[0]!r}?" if hint else ""
        if name == "prompt_template":
            advice += (
                " Give one: prompts.NAME=TEXT in the settings, or from Python evaluate(resources={'NAME': TEXT}),"
                " Trainer(initial_resources={'NAME': TEXT})."
            )
        return (
            f"there is no value for the parameter {name!r} of {self.name}.{advice} "
            f"Available here: {', '.join(sorted(values))}"
        )


def string_keys(task: Any) -> Json:
    """The fields of a dict task that a parameter can name."""
    return {key: value for key, value in task.items() if isinstance(key, str)} if isinstance(task, Mapping) else {}


# -- reward functions --------------------------------------------------------------------------------------------------

# A reward function gets its arguments by parameter name: `task`, `output`, `rollout`, `resources` and the keys of a
# dict task. It may be async. It returns what `check_reward` of `tracing.rewards` takes. Without a reward function, a
# number that the agent returns is its reward. Anything else fails the attempt; a missing reward never becomes 0.0.


class RewardFunction(Signature):
    """A user's reward function."""

    @classmethod
    def of(cls, function: Any) -> Self:
        """Raises AgentError for an object that cannot be called."""
        if not callable(function):
            raise AgentError(f"the reward is {function!r}, which cannot be called; pass a function")
        return super().of(function)

    @property
    def source(self) -> str:
        return f"the reward function {self.name}"

    def start(self, invocation: Invocation, output: Any, **further: Any) -> Any:
        """Call the function; an async one returns an awaitable. `further`: more arguments by parameter name."""
        known = {
            "task": invocation.task,
            "output": output,
            "rollout": invocation.rollout,
            "resources": invocation.resources,
            **further,
        }
        return self.bind_values({**string_keys(invocation.task), **known})()
