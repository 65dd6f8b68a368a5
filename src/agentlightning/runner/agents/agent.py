"""What an agent is, and how one is found.

An agent is given as

- `module:name` or `path/to/file.py:name`: Python, imported by the process that runs it;
- any other text, or a list of words: a command in any language (see `command.py`);
- a live object: a function, sync or async; a `LitAgent`, instance or class; or a class with a `run` method and a
  constructor without arguments, of which each attempt makes its own (it reads `os.environ` and posts its reward to
  `AGL_EVENT_URL`).

`load_agent` makes it something to call. Whatever is wrong with it is an AgentError that says what was looked for, the
real cause and the nearest name.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

from agentlightning.errors import AgentError, AgentLightningError
from agentlightning.runner.agents.arguments import Call, Signature
from agentlightning.runner.agents.command import Command, check_executable
from agentlightning.runner.agents.litagent import FunctionAgent, LitAgent, method_for, overridden
from agentlightning.runner.agents.spec import (
    FORMS,
    AgentLike,
    AgentSpec,
    CommandLine,
    Pickled,
    Reference,
    agent_spec,
    not_an_agent,
    resolve,
)

# -- finding it ------------------------------------------------------------------------------------------------------


def load_object(spec: Reference | Pickled, role: str) -> Any:
    """The object a spec leads to. Raises AgentError with the cause."""
    if isinstance(spec, Pickled):
        return _unpickle(spec, role)
    module = _import_file(spec, role) if spec.is_file else _import_module(spec, role)
    try:
        return resolve(module, spec.name)
    except AttributeError:
        near = difflib.get_close_matches(spec.name, [n for n in vars(module) if not n.startswith("_")], n=1)
        hint = f"; did you mean {spec.module}:{near[0]}?" if near else ""
        raise AgentError(f"{role} {spec}: {spec.module} has no {spec.name!r}{hint}") from None


def _unpickle(spec: Pickled, role: str) -> Any:
    try:
        return pickle.loads(spec.data)
    except (Exception, SystemExit) as error:  # importing and rebuilding a user's object runs the user's code
        raise AgentError(_import_failure(spec, role, error)) from error


def _import_module(spec: Reference, role: str) -> ModuleType:
    try:
        return importlib.import_module(spec.module)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        if isinstance(error, ModuleNotFoundError) and error.name and _leads_to(spec.module, error.name):
            raise AgentError(_no_module(spec, role, error.name)) from error
        raise AgentError(_import_failure(spec, role, error)) from error


def _import_file(spec: Reference, role: str) -> ModuleType:
    path = Path(spec.module).resolve()
    if not path.is_file():
        raise AgentError(f"{role} {spec}: there is no file {path}{_nearest(path.name, path.parent)}")
    name = path.stem
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(path):
        name = f"agentlightning_{role}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    return _execute(name, path, spec, role)


def _execute(name: str, path: Path, spec: Reference, role: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise AgentError(f"{role} {spec}: {path} cannot be read as Python")
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # its neighbours are importable, as they are when it is run as a script
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        del sys.modules[name]
        raise AgentError(_import_failure(spec, role, error)) from error
    return module


def _leads_to(module: str, missing: str) -> bool:
    return module == missing or module.startswith(missing + ".")


def _no_module(spec: Reference, role: str, missing: str) -> str:
    return (
        f"{role} {spec}: there is no module {missing!r} in {Path.cwd()} or on the Python path"
        f"{_nearest(missing.split('.')[-1] + '.py', Path.cwd())}"
    )


def _nearest(file: str, folder: Path) -> str:
    files = [path.name for path in folder.glob("*.py")] if folder.is_dir() else []
    near = difflib.get_close_matches(file, files, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _import_failure(spec: Reference | Pickled, role: str, error: BaseException) -> str:
    text = "".join(traceback.format_exception(type(error), error, _users_part(error)))
    hint = ""
    if "api_key" in str(error) or "API_KEY" in str(error):
        hint = "\nA client made at import time cannot know its attempt: make it inside the agent."
    return f"{role} {spec} could not be imported: {type(error).__name__}: {error}{hint}\n{text}"


def _users_part(error: BaseException) -> Any:
    """The traceback without the machinery that leads to the user's code; none where an error of ours says by itself
    what is wrong and no such code was reached."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(MACHINERY):
        trace = trace.tb_next
    return trace or (None if isinstance(error, AgentLightningError) else error.__traceback__)


MACHINERY = ("agentlightning.runner", "importlib", "concurrent.", "asyncio.", "threading")


def users_traceback(error: BaseException) -> BaseException:
    """The same error, its traceback starting in the user's code."""
    return error.with_traceback(_users_part(error))


# -- what can be called ----------------------------------------------------------------------------------------------


class Agent(Protocol):
    """An agent, whatever it is."""

    def blocks(self, call: Call) -> bool:
        """Whether `start` is to be called in a thread."""
        ...

    def start(self, call: Call) -> Any:
        """What the agent returns, or an awaitable of it."""
        ...


@dataclass(frozen=True, slots=True)
class Function:
    """A function, its parameters injected."""

    signature: Signature
    is_async: bool

    def blocks(self, call: Call) -> bool:
        return not self.is_async

    def start(self, call: Call) -> Any:
        return self.signature.call(call)


@dataclass(frozen=True, slots=True)
class Methods:
    """A LitAgent."""

    agent: LitAgent[Any]

    def blocks(self, call: Call) -> bool:
        return not inspect.iscoroutinefunction(method_for(self.agent, call.rollout.mode))

    def start(self, call: Call) -> Any:
        return method_for(self.agent, call.rollout.mode)(call.task, call.resources, call.rollout)


@dataclass(frozen=True, slots=True)
class Contract:
    """A class of which each attempt makes its own and calls `run`."""

    kind: type[Any]

    def blocks(self, call: Call) -> bool:
        return not inspect.iscoroutinefunction(self.kind.run)

    def start(self, call: Call) -> Any:
        return self.kind().run()


def load_agent(agent: AgentLike | AgentSpec, *, grace: float = 2.0) -> Agent:
    """The agent, ready to be called in this process. A command has `grace` seconds to end when it is stopped.
    Raises AgentError."""
    spec = agent if isinstance(agent, Reference | Pickled | CommandLine) else agent_spec(agent)
    if isinstance(spec, CommandLine):
        check_executable(spec.words, FORMS)
        return Command(spec.words, grace)
    return as_agent(load_object(spec, "agent"))


def as_agent(found: Any) -> Agent:
    """What can be called about a Python object. Raises AgentError if nothing can."""
    if isinstance(found, FunctionAgent):
        return _function(found.function)
    if isinstance(found, LitAgent):
        return _methods(cast(LitAgent[Any], found))
    if isinstance(found, type):
        return _class(found)
    if callable(found):
        return _function(found)
    raise AgentError(not_an_agent(found, "agent"))


def _function(function: Callable[..., Any]) -> Function:
    inner = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise AgentError(f"the agent {function!r} is a generator; return the result instead of yielding it")
    return Function(Signature.of(function), inspect.iscoroutinefunction(_unwrap(inner)))


def _unwrap(function: Any) -> Any:
    while hasattr(function, "func") and hasattr(function, "keywords"):  # functools.partial
        function = function.func
    return function


def _methods(agent: LitAgent[Any]) -> Methods:
    if not overridden(type(agent)):
        raise AgentError(f"{type(agent).__name__} overrides no method of LitAgent; define rollout or rollout_async")
    return Methods(agent)


def _class(kind: type[Any]) -> Agent:
    required = [p.name for p in Signature.of(kind).parameters if p.default is p.empty]
    if required:
        raise AgentError(
            f"the constructor of {kind.__qualname__} needs {', '.join(required)}; an agent class is made without "
            "arguments: read them from os.environ, or pass an instance of a LitAgent or a function"
        )
    if issubclass(kind, LitAgent):
        return _methods(kind())
    if not callable(getattr(kind, "run", None)):
        raise AgentError(f"the class {kind.__qualname__} has no run method; define `async def run(self)`")
    return Contract(kind)
