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

import difflib
import importlib
import inspect
import pickle
import sys
import traceback
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeAlias, cast

from agentlightning.errors import AgentError, AgentLightningError, ConfigError
from agentlightning.runner.agents.arguments import Invocation, Signature
from agentlightning.runner.agents.command import Command, check_executable, import_advice
from agentlightning.runner.agents.litagent import FunctionAgent, LitAgent, method_for, overridden
from agentlightning.runner.agents.spec import (
    AgentLike,
    AgentSpec,
    CommandLine,
    JobTemplate,
    Pickled,
    Reference,
    agent_spec,
    not_callable_message,
    resolve,
)
from agentlightning.util.plugins import load_file, load_plugin

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
        check_executable(spec.words)
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
        rollout = invocation.rollout
        return partial(method_for(agent, rollout.mode), invocation.task, invocation.resources, rollout)

    return bind


def _class(kind: type[Any]) -> Agent:
    check_constructor(kind, "agent")
    if issubclass(kind, LitAgent):
        return _methods(kind())
    if not callable(getattr(kind, "run", None)):
        raise AgentError(f"the class {kind.__qualname__} has no run method; define `async def run(self)`")
    return _function(on_new_instance(kind, "run", "agent"))


# -- methods ---------------------------------------------------------------------------------------------------------

# Methods of classes as agents and rewards: `path/to/file.py:Class.method` is called on a new instance each time.


def check_constructor(kind: type[Any], role: str) -> None:
    """Raise AgentError if a class cannot be instantiated without arguments."""
    required = [p.name for p in Signature.of(kind).parameters if p.default is p.empty]
    if required:
        raise AgentError(
            f"the constructor of {kind.__qualname__} requires {', '.join(required)}; the class of the {role} is "
            "instantiated without arguments: read them from os.environ, or pass a function that makes the instance"
        )


def on_new_instance(kind: type[Any], name: str, role: str) -> Any:
    """A method as a function that makes the instance; what else has that name, such as a static method, as it is.
    Raises AgentError if the constructor requires arguments."""
    method, found = getattr(kind, name), inspect.getattr_static(kind, name, None)
    # Generators are left as they are: who adapts functions refuses them by name.
    if not inspect.isfunction(found) or inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        return method
    check_constructor(kind, role)

    def call(*args: Any, **kwargs: Any) -> Any:
        return method(kind(), *args, **kwargs)

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        return await method(kind(), *args, **kwargs)

    function = wraps(method)(call_async if inspect.iscoroutinefunction(method) else call)
    signature = inspect.signature(method)
    _, *parameters = signature.parameters.values()  # without self
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


# -- objects -----------------------------------------------------------------------------------------------------------

# Imports and unpickles what a specification refers to. Every failure is an AgentError with what was looked for, the
# cause and the closest name.

FRAMEWORK_MODULES = (
    "agentlightning.runner",
    "agentlightning.tracing.rewards",
    "agentlightning.util.plugins",
    "importlib",
    "concurrent.",
    "asyncio.",
    "threading",
)
"""Modules whose frames are removed from the tracebacks of users' errors."""


def load_object(spec: Reference | Pickled, role: str) -> Any:
    """The object that a specification refers to. Raises AgentError with the cause."""
    path = Path(spec.module).resolve() if isinstance(spec, Reference) and spec.is_file else None
    if path is not None and not path.is_file():
        raise AgentError(f"{role} {spec}: file not found: {path}{_suggest_file(path.name, path.parent)}")
    try:
        if isinstance(spec, Pickled):
            return pickle.loads(spec.data)
        module = importlib.import_module(spec.module) if path is None else load_file(path, f"agentlightning_{role}")
    except (Exception, SystemExit) as error:  # importing and unpickling run the user's code
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and path is None and isinstance(spec, Reference) and f"{spec.module}.".startswith(f"{missing}."):
            near = _suggest_file(f"{missing.rpartition('.')[2]}.py", Path.cwd())
            where = f"in {Path.cwd()} or on the Python path"
            raise AgentError(f"{role} {spec}: no module {missing!r} {where}{near}") from error
        raise AgentError(_import_failure(spec, role, error)) from error
    try:
        parent, _, last = spec.name.rpartition(".")
        owner = resolve(module, parent) if parent else module
        return on_new_instance(owner, last, role) if isinstance(owner, type) else resolve(module, spec.name)
    except AttributeError:
        near = difflib.get_close_matches(spec.name, [n for n in vars(module) if not n.startswith("_")], n=1)
        hint = f"; did you mean {spec.module}:{near[0]}?" if near else ""
        raise AgentError(f"{role} {spec}: {spec.module} has no {spec.name!r}{hint}") from None


def _suggest_file(file: str, folder: Path) -> str:
    files = [path.name for path in folder.glob("*.py")] if folder.is_dir() else []
    near = difflib.get_close_matches(file, files, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _import_failure(spec: Reference | Pickled, role: str, error: BaseException) -> str:
    text = "".join(traceback.format_exception(type(error), error, _user_frames(error)))
    hint = ""
    if "api_key" in str(error) or "API_KEY" in str(error):
        hint = "\nA client that is created at import time cannot know its attempt: create it inside the agent."
    elif advice := import_advice(text, sys.executable):
        hint = f"\n{advice[0].upper()}{advice[1:]}"
    return f"{role} {spec} could not be imported: {type(error).__name__}: {error}{hint}\n{text}"


def _user_frames(error: BaseException) -> Any:
    """The traceback from the user's code on; None for an error of ours that was raised before any user code ran."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(FRAMEWORK_MODULES):
        trace = trace.tb_next
    return trace or (None if isinstance(error, AgentLightningError) else error.__traceback__)


def user_traceback(error: BaseException) -> BaseException:
    """The error with its traceback starting in the user's code."""
    return error.with_traceback(_user_frames(error))
