"""Loads the Python object that an agent or reward specification refers to: imports, unpickles, explains failures.

Every failure is an AgentError with what was looked for, the cause and the closest name.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pickle
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from agentlightning.errors import AgentError, AgentLightningError
from agentlightning.runner.agents.import_advice import import_advice
from agentlightning.runner.agents.methods import resolve_method
from agentlightning.runner.agents.spec import Pickled, Reference

FRAMEWORK_MODULES = ("agentlightning.runner", "importlib", "concurrent.", "asyncio.", "threading")
"""Modules whose frames are removed from the tracebacks of users' errors."""


def load_object(spec: Reference | Pickled, role: str) -> Any:
    """The object that a specification refers to. Raises AgentError with the cause."""
    if isinstance(spec, Pickled):
        return _unpickle(spec, role)
    module = _import_file(spec, role) if spec.is_file else _import_module(spec, role)
    try:
        return resolve_method(module, spec.name, role)
    except AttributeError:
        near = difflib.get_close_matches(spec.name, [n for n in vars(module) if not n.startswith("_")], n=1)
        hint = f"; did you mean {spec.module}:{near[0]}?" if near else ""
        raise AgentError(f"{role} {spec}: {spec.module} has no {spec.name!r}{hint}") from None


def _unpickle(spec: Pickled, role: str) -> Any:
    try:
        return pickle.loads(spec.data)
    except (Exception, SystemExit) as error:  # unpickling runs the user's code
        raise AgentError(_import_failure(spec, role, error)) from error


def _import_module(spec: Reference, role: str) -> ModuleType:
    try:
        return importlib.import_module(spec.module)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        if isinstance(error, ModuleNotFoundError) and error.name and _is_missing_part_of(spec.module, error.name):
            raise AgentError(_no_module(spec, role, error.name)) from error
        raise AgentError(_import_failure(spec, role, error)) from error


def _import_file(spec: Reference, role: str) -> ModuleType:
    path = Path(spec.module).resolve()
    if not path.is_file():
        raise AgentError(f"{role} {spec}: file not found: {path}{_suggest_file(path.name, path.parent)}")
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
        sys.path.insert(0, str(path.parent))  # modules beside it are importable, as for a script
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        del sys.modules[name]
        raise AgentError(_import_failure(spec, role, error)) from error
    return module


def _is_missing_part_of(module: str, missing: str) -> bool:
    return module == missing or module.startswith(missing + ".")


def _no_module(spec: Reference, role: str, missing: str) -> str:
    return (
        f"{role} {spec}: no module {missing!r} in {Path.cwd()} or on the Python path"
        f"{_suggest_file(missing.split('.')[-1] + '.py', Path.cwd())}"
    )


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
