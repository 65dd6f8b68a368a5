"""Specification of an agent in a form that can be sent to the process that runs it.

`module:name` and `path/to/file.py:name` are references; any other text, or a list of words, is a command line. An
object becomes a reference if another process can import it by name, and is pickled otherwise. Imports nothing.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
from msgspec import Struct

from agentlightning.errors import AgentError, ConfigError
from agentlightning.runner.agents.litagent import FunctionAgent, LitAgent
from agentlightning.util.plugins import Registry, announced, find_module

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


def agent_spec(agent: AgentLike) -> AgentSpec:
    """The specification of an agent. Imports nothing. Raises AgentError for an object that cannot be an agent, and
    MissingExtraError for a `JobTemplate` without its plugin."""
    if isinstance(agent, JobTemplate):
        announced("agents", "kubernetes")
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
        return name if resolve(sys.modules[given.__module__], name) is given else None
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


def resolve(module: ModuleType, name: str) -> Any:
    """The object at a dotted name inside a module. Raises AttributeError."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found


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
