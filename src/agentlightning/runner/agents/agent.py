"""Agents as callables: adapts functions, `LitAgent`s, classes with a `run` method and commands to one interface.

An agent is given as

- `module:name` or `path/to/file.py:name`: Python, imported by the process that runs it;
- any other text, or a list of words: a command in any language (see `command.py`);
- a `JobTemplate`: a command in a Kubernetes Job for each attempt (`plugins/kubernetes`);
- an object: a function, sync or async; a `LitAgent`, instance or class; or a class with a `run` method and a
  constructor without arguments, instantiated for each attempt (it reads `os.environ` and posts its reward to
  `AGL_EVENT_URL`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, cast

from agentlightning.errors import AgentError, ConfigError
from agentlightning.runner.agents.arguments import Invocation, Signature
from agentlightning.runner.agents.command import Command, check_executable
from agentlightning.runner.agents.litagent import FunctionAgent, LitAgent, method_for, overridden
from agentlightning.runner.agents.loading import check_constructor, load_object, on_new_instance
from agentlightning.runner.agents.spec import (
    FORMS,
    AgentLike,
    AgentSpec,
    CommandLine,
    JobTemplate,
    Pickled,
    Reference,
    agent_spec,
    not_callable_message,
)
from agentlightning.util.plugins import load_plugin

Agent: TypeAlias = Callable[[Invocation], Callable[[], Any]]
"""Gives the function that runs an attempt: a coroutine function, or one that may block and return an awaitable."""


def load_agent(agent: AgentLike | AgentSpec, *, grace: float = 2.0) -> Agent:
    """Load an agent into this process. A stopped command has `grace` seconds to exit. Raises AgentError."""
    spec = agent if isinstance(agent, Reference | Pickled | CommandLine) else agent_spec(agent)
    if isinstance(spec, JobTemplate):
        try:
            return load_plugin("agents", "kubernetes")(spec)
        except ConfigError as error:
            raise AgentError(f"agent {spec}: {error}") from error
    if isinstance(spec, CommandLine):
        check_executable(spec.words, FORMS)
        return Command(spec.words, grace)
    return as_agent(load_object(spec, "agent"))


def as_agent(found: Any) -> Agent:
    """Adapt a Python object. Raises AgentError if it is not an agent."""
    if isinstance(found, FunctionAgent):
        return _function(found.function)
    if isinstance(found, LitAgent):
        return _methods(cast(LitAgent[Any], found))
    if isinstance(found, type):
        return _class(found)
    if callable(found):
        return _function(found)
    raise AgentError(not_callable_message(found, "agent"))


def _function(function: Callable[..., Any]) -> Agent:
    inner = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise AgentError(f"the agent {function!r} is a generator; return the result instead of yielding it")
    return Signature.of(function).bind


def _methods(agent: LitAgent[Any]) -> Agent:
    if not overridden(type(agent)):
        raise AgentError(f"{type(agent).__name__} overrides no method of LitAgent; define rollout or rollout_async")

    def bind(invocation: Invocation) -> Callable[[], Any]:
        method = method_for(agent, invocation.rollout.mode)
        return partial(method, invocation.task, invocation.resources, invocation.rollout)

    return bind


def _class(kind: type[Any]) -> Agent:
    check_constructor(kind, "agent")
    if issubclass(kind, LitAgent):
        return _methods(kind())
    if not callable(getattr(kind, "run", None)):
        raise AgentError(f"the class {kind.__qualname__} has no run method; define `async def run(self)`")
    return _function(on_new_instance(kind, "run", "agent"))
