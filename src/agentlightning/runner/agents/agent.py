"""Agents as callables: how an agent or reward function is given, sent to the process that runs it, and loaded there.

An agent is given as

- `module:name` or `path/to/file.py:name`: Python, imported by the process that runs it;
- any other text, or a list of words: a command in any language (see `command.py`);
- a `JobTemplate`: a command in a Kubernetes Job for each attempt (`plugins/kubernetes`);
- an object: a function, sync or async; a `LitAgent`, instance or class; or a class with a `run` method and a
  constructor without arguments, instantiated for each attempt (it reads `os.environ` and posts its reward to
  `AGL_EVENT_URL`).

An object is sent as a reference if another process can import it by name, and is pickled otherwise.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pickle
import re
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial, wraps
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, cast

import cloudpickle
from msgspec import Struct

from agentlightning.errors import AgentError, AgentLightningError, ConfigError
from agentlightning.runner.agents.arguments import Invocation, Signature
from agentlightning.runner.agents.command import Command, import_advice
from agentlightning.runner.agents.litagent import FunctionAgent, LitAgent, method_for, overridden
from agentlightning.util.plugins import Registry, announced, find_module, load_file, load_plugin

FORMS = "`module:name` and `path/to/file.py:name` are Python; any other text is a command"
_REFERENCE = re.compile(r"^(.+\.py|[A-Za-z_][\w.]*):([A-Za-z_][\w.]*)$")
_MAIN_GUARD = re.compile(r"^if __name__ == ['\"]__main__['\"]:", re.MULTILINE)


REWARDS = Registry(
    "rewards", "reward function", known={"reasoning_gym": "agentlightning.integrations.reasoning_gym:score"}
)


class Reference(Struct, frozen=True, tag=True):
    """An object in a module, by name."""

    module: str
    """A module's dotted name, or the path of a Python file."""
    name: str

    @property
    def is_file(self) -> bool:
        return self.module.endswith(".py")

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


class Pickled(Struct, frozen=True, tag=True):
    """An object that cannot be imported by name."""

    data: bytes
    label: str

    def __str__(self) -> str:
        return self.label


class CommandLine(Struct, frozen=True, tag=True):
    """A program and its arguments."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.words)


class JobTemplate(Struct, frozen=True, tag=True):
    """An agent whose attempts run in Kubernetes Jobs: `agl runner --job` from Python. Needs `plugins/kubernetes`.

    >>> from agentlightning.runner import JobTemplate
    >>> str(JobTemplate(b'{"apiVersion": "batch/v1", "kind": "Job"}', ("python", "agent.py")))
    'a Kubernetes Job running python agent.py'
    """

    manifest: bytes
    """A Job as JSON, whose image, resources and placement are used."""
    words: tuple[str, ...] = ()
    """The command of its container; empty, that of the image."""
    api: str | None = None
    """The URL of the API server; None in a pod of the cluster."""
    start_seconds: float = 600.0
    """Time in which the container has to start."""

    def __str__(self) -> str:
        return f"a Kubernetes Job running {shlex.join(self.words) or 'its image'}"


AgentSpec = Reference | Pickled | CommandLine | JobTemplate


AgentLike = Callable[..., Any] | LitAgent[Any] | type | str | Sequence[str] | JobTemplate
"""Every form in which an agent can be given."""


def agent_spec(agent: AgentLike | AgentSpec) -> AgentSpec:
    """The specification of an agent, which may be one already. Imports nothing. Raises AgentError for an object that
    cannot be an agent, and MissingExtraError for a `JobTemplate` without its plugin."""
    if isinstance(agent, JobTemplate):
        announced("agents", "kubernetes")
    if isinstance(agent, AgentSpec):
        return agent
    if isinstance(agent, str):
        return _reference(agent) or CommandLine(_split_command(agent))
    if isinstance(agent, Sequence):
        return CommandLine(tuple(str(word) for word in agent) or _split_command(""))
    return _spec_of_object(agent, "agent")


def function_spec(function: Callable[..., Any] | str, role: str = "reward") -> Reference | Pickled:
    """The specification of a plain function, such as a reward function. Raises AgentError."""
    if not isinstance(function, str):
        return _spec_of_object(function, role)
    try:
        reference = _reference(REWARDS.reference(function))
    except ConfigError as error:
        raise AgentError(f"{role} {function!r} cannot be used: {error}") from error
    if reference is None:
        raise AgentError(f"{role} {function!r} is neither `module:function` nor `path/to/file.py:function`")
    return reference


def _reference(text: str) -> Reference | None:
    match = _REFERENCE.match(text)
    return Reference(match[1], match[2]) if match else None


def _split_command(text: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise AgentError(f"agent {text!r} is not a valid command line ({error}); {FORMS}") from error
    if not words:
        raise AgentError(f"the agent is an empty string; {FORMS}")
    return words


def _spec_of_object(given: Any, role: str) -> Reference | Pickled:
    if not callable(given) and not isinstance(given, LitAgent):
        raise AgentError(not_callable_message(given, role))
    label = f"{getattr(given, '__module__', '?')}:{getattr(given, '__qualname__', type(given).__qualname__)}"
    module = getattr(given, "__module__", None)
    if isinstance(module, str) and importable(module) and (name := _name_in_module(given)):
        return Reference(module, name)
    try:
        return Pickled(_pickle(given, label, role), label)
    except AgentError:
        if script := _script_reference(given):
            return script
        raise


def _script_reference(given: Any) -> Reference | None:
    """A reference to what the script that runs defines, if importing its file does not run it again."""
    file = str(getattr(sys.modules["__main__"], "__file__", None))
    if getattr(given, "__module__", None) != "__main__" or not file.endswith(".py"):
        return None
    path = Path(file).resolve()
    name = _name_in_module(given) if _MAIN_GUARD.search(path.read_text(encoding="utf-8")) else None
    return Reference(str(path), name) if name else None


def _name_in_module(given: Any) -> str | None:
    """The name by which its module has an object, if it has it."""
    name = getattr(given, "__qualname__", None)
    if not isinstance(name, str) or "<" in name:
        return None
    try:
        return name if attrgetter(name)(sys.modules[given.__module__]) is given else None
    except AttributeError:
        return None


def importable(name: str) -> bool:
    """Whether another process with the same `sys.path` finds the same module under this name."""
    module = sys.modules.get(name)
    if module is None or name == "__main__":
        return False
    found = find_module(name)
    return found is not None and found.origin == getattr(module, "__file__", None)


def _pickle(given: Any, label: str, role: str) -> bytes:
    by_value = _modules_to_pickle_by_value(given)
    for module in by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(given)
    except Exception as error:  # pickling runs the user's code
        raise AgentError(
            f"{role} {label} cannot be sent to the processes that run it: {type(error).__name__}: {error}. "
            "Move it to a module and pass 'module:name', or make what it captures inside it"
        ) from error
    finally:
        for module in by_value:
            cloudpickle.unregister_pickle_by_value(module)


def _modules_to_pickle_by_value(given: Any) -> list[ModuleType]:
    inner = given.function if isinstance(given, FunctionAgent) else given
    homes = {getattr(thing, "__module__", None) for thing in (inner, type(inner))}
    modules = [sys.modules[home] for home in homes if isinstance(home, str) and home in sys.modules]
    elsewhere = {"__main__", *sys.builtin_module_names}
    return [module for module in modules if not (module.__name__ in elsewhere or importable(module.__name__))]


def not_callable_message(found: Any, role: str) -> str:
    """Error message for an object that cannot be called."""
    kind = type(found).__qualname__
    if role == "agent" and hasattr(found, "run"):
        return f"the agent is an instance of {kind}; pass the class {kind} itself: each attempt makes its own"
    if role == "agent" and callable(getattr(found, "invoke", None)):
        return f"the agent is a {kind}; give a function of the task that calls its invoke, and returns the answer"
    return (
        f"the {role} is {found!r}, a {kind}, which cannot be called; "
        "give a function, a LitAgent, or a class with a run method"
    )


# -- loading -----------------------------------------------------------------------------------------------------------

Agent: TypeAlias = Callable[[Invocation], Callable[[], Any]]
"""Gives the function that runs an attempt: a coroutine function, or one that may block and return an awaitable."""


def load_agent(agent: AgentLike | AgentSpec, *, grace: float = 2.0) -> Agent:
    """Load an agent into this process. A stopped command has `grace` seconds to exit. Raises AgentError."""
    spec = agent_spec(agent)
    if isinstance(spec, JobTemplate):
        try:
            return load_plugin("agents", "kubernetes")(spec)
        except ConfigError as error:
            raise AgentError(f"agent {spec}: {error}") from error
    if isinstance(spec, CommandLine):
        _check_executable(spec.words)
        return Command(spec.words, grace)
    return as_agent(load_object(spec, "agent"))


def _check_executable(words: Sequence[str]) -> None:
    """Raise AgentError if there is no such program."""
    if shutil.which(words[0]) is not None:
        return
    hint = ""
    if words[0].endswith(".py"):
        hint = f"; did you mean `python {shlex.join(words)}` or `{words[0]}:NAME`?"
    raise AgentError(f"agent {shlex.join(words)!r}: there is no program {words[0]!r} on the PATH{hint} ({FORMS})")


def as_agent(found: Any) -> Agent:
    """Adapt a Python object. Raises AgentError if it is not an agent."""
    if isinstance(found, type):
        found = _of_class(found)
    if isinstance(found, LitAgent) and not isinstance(found, FunctionAgent):
        return _methods(cast(LitAgent[Any], found))
    if callable(found):
        return _function(found.function if isinstance(found, FunctionAgent) else found)
    raise AgentError(not_callable_message(found, "agent"))


def _of_class(kind: type[Any]) -> Any:
    """An instance of a LitAgent; of another class, a function that runs a new instance each time."""
    check_constructor(kind, "agent")
    if issubclass(kind, LitAgent):
        return cast(LitAgent[Any], kind())
    if not callable(getattr(kind, "run", None)):
        raise AgentError(f"the class {kind.__qualname__} has no run method; define `async def run(self)`")
    return on_new_instance(kind, "run", "agent")


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
        owner = attrgetter(parent)(module) if parent else module
        return on_new_instance(owner, last, role) if isinstance(owner, type) else getattr(owner, last)
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
