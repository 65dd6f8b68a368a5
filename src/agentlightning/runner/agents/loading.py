"""Loads the Python object that an agent or reward specification refers to: imports, unpickles, explains failures.

Every failure is an AgentError with what was looked for, the cause and the closest name.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import pickle
import re
import shlex
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from agentlightning.errors import AgentError, AgentLightningError
from agentlightning.runner.agents.arguments import Signature
from agentlightning.runner.agents.spec import Pickled, Reference, resolve
from agentlightning.util.plugins import load_file

# -- import advice ---------------------------------------------------------------------------------------------------

# What to install where an agent could not be imported: a package is missing, or its version lacks what is imported.
#
# Reads the error as Python or Node.js prints it, because a command's own interpreter has raised it. Imports nothing.

_MISSING: Final = re.compile(r"^ModuleNotFoundError: No module named '([\w.]+)'", re.MULTILINE)
_LACKING: Final = re.compile(r"^ImportError: cannot import name '(\w+)' from '([\w.]+)'", re.M)
_NODE: Final = re.compile(r"Cannot find (?:package|module) '((?:@[\w.-]+/)?[\w-][\w.-]*)'")

_DISTRIBUTIONS: Final = {
    "agent_framework": "agent-framework-core agent-framework-openai",
    "agents": "openai-agents",
    "autogen_agentchat": "autogen-agentchat",
    "autogen_ext": "'autogen-ext[openai]'",
    "google": "google-adk litellm",
    "llama_index": "llama-index-core llama-index-llms-openai",
    "pydantic_ai": "'pydantic-ai-slim[openai]'",
    "strands": "'strands-agents[openai]'",
}
"""What pip calls a module, where that is not the module's name with hyphens."""


def import_advice(errors: str, program: str) -> str | None:
    """What to install, from the last import error in what `program` (the first word of its command) has printed; None
    if it printed none.

    >>> import_advice("ModuleNotFoundError: No module named 'agents'", "python3")
    "the package 'agents' is not installed for python3; run: python3 -m pip install openai-agents"
    """
    if found := _MISSING.findall(errors):
        module = name = found[-1]
    elif found := _LACKING.findall(errors):
        name, module = found[-1]
        name = f"{module}.{name}"
    else:
        found = _NODE.findall(errors)
        advice = "the package {0!r} is not installed; run in the folder of the agent: npm install {0}"
        return advice.format(found[-1]) if found else None
    top = module.partition(".")[0]
    package = _DISTRIBUTIONS.get(top, top.replace("_", "-"))
    pip = f"{shlex.quote(program)} -m pip" if Path(program).name.startswith("python") else "pip"
    if name == top or (name == module and top == "google"):  # a namespace of many packages
        return f"the package {top!r} is not installed for {program}; run: {pip} install {package}"
    return (
        f"the version of {top!r} installed for {program} has no {name}, so it is too old for this agent, or too new;"
        f" for the newest, run: {pip} install --upgrade {package}"
    )


# -- methods ---------------------------------------------------------------------------------------------------------

# Methods of classes as agents and rewards: `path/to/file.py:Class.method` is called on a new instance each time.


def resolve_method(module: ModuleType, name: str, role: str) -> Any:
    """The object at a dotted name inside a module; a method of a class as a function that makes the instance itself.

    Raises AttributeError, and AgentError if the constructor of the class requires arguments.
    """
    parent, _, last = name.rpartition(".")
    owner = resolve(module, parent) if parent else module
    return on_new_instance(owner, last, role) if isinstance(owner, type) else resolve(module, name)


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

    function = functools.wraps(method)(call_async if inspect.iscoroutinefunction(method) else call)
    signature = inspect.signature(method)
    _, *parameters = signature.parameters.values()  # without self
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


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
        return resolve_method(module, spec.name, role)
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
