"""Agents written in Python: `LitAgent` and the decorators `rollout`, `llm_rollout`, `prompt_rollout`.

Runs no agent, and imports only the standard library, because agent code imports it first.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast, overload

from agentlightning.errors import AgentError

if TYPE_CHECKING:
    from agentlightning.resources import NamedResources
    from agentlightning.rollouts import AttemptedRollout

P = ParamSpec("P")
R = TypeVar("R")
Task = TypeVar("Task")
Function = Callable[..., Any]


class LitAgent(Generic[Task]):
    """Base class of agents, with a method per mode.

    `trained_agents` is a regular expression that the names (`agl.track_agent`) of the agents to train match in full;
    None trains all. For an agent given by name (`module:name`), set `algorithm.target_agent` instead.

    Override `rollout` or `rollout_async`, or the `training_` and `validation_` variants if training and validation
    differ. Each returns a number (the final reward), None (rewards were emitted), or an output for the reward
    function.

        >>> class Agent(agl.LitAgent):
        ...     def rollout(self, task, resources, rollout):
        ...         return 1.0 if task["question"].endswith("?") else 0.0
        >>> Agent().rollout({"question": "Why?"}, {}, None)
        1.0
    """

    trained_agents: str | None = None

    def __init__(self, *, trained_agents: str | None = None) -> None:
        self.trained_agents = trained_agents

    @property
    def tracer(self) -> Any:
        """An `agl.OtelTracer`, as agents of 0.x use it: its `get_langchain_handler()` is None, as none is needed."""
        return import_module("agentlightning").OtelTracer()

    def rollout(self, task: Task, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        raise NotImplementedError(f"{type(self).__name__} defines neither rollout nor rollout_async")

    async def rollout_async(self, task: Task, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        raise NotImplementedError(f"{type(self).__name__} defines neither rollout nor rollout_async")

    def training_rollout(self, task: Task, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        return self.rollout(task, resources, rollout)

    def validation_rollout(self, task: Task, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        return self.rollout(task, resources, rollout)

    async def training_rollout_async(self, task: Task, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        return await self.rollout_async(task, resources, rollout)

    async def validation_rollout_async(self, task: Task, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        return await self.rollout_async(task, resources, rollout)


METHODS = [name for name in vars(LitAgent) if name.endswith(("rollout", "rollout_async"))]


def overridden(kind: type[LitAgent[Any]]) -> list[str]:
    """Names of the methods that a LitAgent class overrides."""
    return [name for name in METHODS if getattr(kind, name) is not getattr(LitAgent, name)]


def method_for(agent: LitAgent[Any], mode: str | None) -> Function:
    """The method for a rollout of this mode: the variant of the mode if overridden, async before sync.

    Mode "train" is training; every other mode is validation.
    """
    variant = "training" if mode == "train" else "validation"
    mine = overridden(type(agent))
    for name in (f"{variant}_rollout_async", f"{variant}_rollout", "rollout_async", "rollout"):
        if name in mine:
            return cast(Function, getattr(agent, name))
    raise AgentError(
        f"{type(agent).__name__} has no method for mode {mode!r}: it defines {', '.join(mine) or 'none'}; "
        f"define rollout, rollout_async, {variant}_rollout or {variant}_rollout_async"
    )


class FunctionAgent(LitAgent[Any], Generic[P, R]):
    """A decorated agent function. Calling it calls the function.

    >>> agent = agl.rollout(lambda task: float(len(task)))
    >>> agent("abc")
    3.0
    """

    def __init__(self, function: Callable[P, R]) -> None:
        super().__init__()
        functools.update_wrapper(cast(Function, self), function)
        self.function = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<agent {self.function.__module__}:{self.function.__qualname__}>"

    def rollout(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """Call the function with injected arguments; an async function returns an awaitable."""
        from agentlightning.runner.agents.arguments import Invocation, Signature  # keeps this module cheap to import

        return Signature.of(self.function).bind(Invocation(rollout=rollout, resources=resources, task=task))()

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        result = self.rollout(task, resources, rollout)
        return await result if inspect.isawaitable(result) else result


def rollout(function: Callable[P, R]) -> FunctionAgent[P, R]:
    """Mark a function, sync or async, as an agent. Arguments are injected by name; see `runner/agents/arguments.py`.

    >>> @agl.rollout
    ... def agent(task):
    ...     return 1.0 if task["question"].endswith("?") else 0.0
    >>> agent({"question": "Why?"})
    1.0
    """
    if not callable(function):
        raise AgentError(f"@rollout decorates a function, not {function!r}")
    return FunctionAgent(function)


@overload
def llm_rollout(function: Callable[P, R]) -> FunctionAgent[P, R]: ...
@overload
def llm_rollout(
    function: None = None, *, strip_proxy: bool = True
) -> Callable[[Callable[P, R]], FunctionAgent[P, R]]: ...


def llm_rollout(function: Callable[..., Any] | None = None, *, strip_proxy: bool = True) -> Any:
    """`rollout` for a function of `(task, llm)` or `(task, llm, rollout)`.

    `strip_proxy` is accepted for compatibility with 0.x and has no effect: `endpoint` and `get_base_url(...)` both
    return the attempt's URL.

        >>> @agl.llm_rollout
        ... def agent(task, llm):
        ...     return llm.model
        >>> agent({}, agl.LLM(endpoint="http://127.0.0.1:8000", model="qwen"))
        'qwen'
    """
    if function is None:
        return llm_rollout
    return _require_parameter("llm", function)


def prompt_rollout(function: Callable[P, R]) -> FunctionAgent[P, R]:
    """`rollout` for a function of `(task, prompt_template)` or `(task, prompt_template, rollout)`.

    >>> @agl.prompt_rollout
    ... def agent(task, prompt_template):
    ...     return prompt_template.format(**task)
    >>> agent({"drink": "tea"}, agl.PromptTemplate(template="Make {drink}."))
    'Make tea.'
    """
    return _require_parameter("prompt_template", function)


def _require_parameter(parameter: str, function: Callable[P, R]) -> FunctionAgent[P, R]:
    names = list(inspect.signature(function).parameters)
    if parameter not in names:
        raise AgentError(
            f"{function.__qualname__}({', '.join(names)}) has no parameter {parameter!r}; add it, or use @agl.rollout"
        )
    return rollout(function)
