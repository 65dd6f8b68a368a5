"""How users write agents in Python: `LitAgent` and the decorators `rollout`, `llm_rollout`, `prompt_rollout`.

Nothing here runs an agent, and nothing here imports more than the standard library: users import it first.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
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
    """An agent with a method for each way it is run.

    `trained_agents` names the agents that learn, of those that take part in a rollout (`agl.track_agent`): a regular
    expression for the whole name; None: all. An agent given by name (`module:name`) says it in the settings,
    `algorithm.target_agent`.

    Override `rollout` or `rollout_async`; override the `training_` or `validation_` variants where training and
    validation differ. Each returns what any agent returns: a number (the final reward), None (rewards were emitted),
    or an output for the reward function.

        >>> class Agent(agl.LitAgent):
        ...     def rollout(self, task, resources, rollout):
        ...         return 1.0 if task["question"].endswith("?") else 0.0
        >>> Agent().rollout({"question": "Why?"}, {}, None)
        1.0
    """

    trained_agents: str | None = None

    def __init__(self, *, trained_agents: str | None = None) -> None:
        self.trained_agents = trained_agents

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


METHODS = (
    "rollout",
    "rollout_async",
    "training_rollout",
    "training_rollout_async",
    "validation_rollout",
    "validation_rollout_async",
)


def overridden(kind: type[LitAgent[Any]]) -> list[str]:
    """The names of the methods a LitAgent class defines itself."""
    return [name for name in METHODS if getattr(kind, name) is not getattr(LitAgent, name)]


def method_for(agent: LitAgent[Any], mode: str | None) -> Function:
    """The method that runs a rollout of this mode: the variant for the mode if there is one, async before sync.

    Mode "train" trains; every other mode validates.
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
    """A function that was decorated as an agent. Calling it calls the function.

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
        """Run the function with its arguments injected; an async function gives an awaitable."""
        from agentlightning.runner.agents.arguments import Call, Signature  # keeps the import of this module light

        return Signature.of(self.function).call(Call(rollout=rollout, resources=resources, task=task))

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        result = self.rollout(task, resources, rollout)
        return await result if inspect.isawaitable(result) else result


def rollout(function: Callable[P, R]) -> FunctionAgent[P, R]:
    """Mark a function, sync or async, as an agent. Its arguments are injected by name; see `runner/inject.py`.

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

    `strip_proxy` exists for code written for 0.x. Either value gives the same `llm`: its `endpoint` and its
    `get_base_url(...)` both lead to the attempt.

        >>> @agl.llm_rollout
        ... def agent(task, llm):
        ...     return llm.model
        >>> agent({}, agl.LLM(endpoint="http://127.0.0.1:8000", model="qwen"))
        'qwen'
    """
    if function is None:
        return llm_rollout
    return _requiring("llm", function)


def prompt_rollout(function: Callable[P, R]) -> FunctionAgent[P, R]:
    """`rollout` for a function of `(task, prompt_template)` or `(task, prompt_template, rollout)`.

    >>> @agl.prompt_rollout
    ... def agent(task, prompt_template):
    ...     return prompt_template.format(**task)
    >>> agent({"drink": "tea"}, agl.PromptTemplate(template="Make {drink}."))
    'Make tea.'
    """
    return _requiring("prompt_template", function)


def _requiring(parameter: str, function: Callable[P, R]) -> FunctionAgent[P, R]:
    names = list(inspect.signature(function).parameters)
    if parameter not in names:
        raise AgentError(
            f"{function.__qualname__}({', '.join(names)}) has no parameter {parameter!r}; add it, or use @agl.rollout"
        )
    return rollout(function)
