"""Methods of classes as agents and rewards: `path/to/file.py:Class.method` is called on a new instance each time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from agentlightning.errors import AgentError
from agentlightning.runner.agents.arguments import Signature
from agentlightning.runner.agents.spec import resolve


def resolve_method(module: ModuleType, name: str, role: str) -> Any:
    """The object at a dotted name inside a module; a method of a class as a function that makes the instance itself.

    Raises AttributeError, and AgentError if the constructor of the class requires arguments.
    """
    found = resolve(module, name)
    parent, _, last = name.rpartition(".")
    owner = resolve(module, parent) if parent else None
    if not isinstance(owner, type) or not _is_method(inspect.getattr_static(owner, last, None)):
        return found
    check_constructor(owner, role)
    return _on_new_instance(owner, found)


def _is_method(found: Any) -> bool:
    """Generators are left as they are: the adapter of functions refuses them by name."""
    return inspect.isfunction(found) and not (inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found))


def check_constructor(kind: type[Any], role: str) -> None:
    """Raise AgentError if a class cannot be instantiated without arguments."""
    required = [p.name for p in Signature.of(kind).parameters if p.default is p.empty]
    if required:
        raise AgentError(
            f"the constructor of {kind.__qualname__} requires {', '.join(required)}; the class of the {role} is "
            "instantiated without arguments: read them from os.environ, or pass a function that makes the instance"
        )


def _on_new_instance(kind: type[Any], method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(kind(), *args, **kwargs)

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        return await method(kind(), *args, **kwargs)

    function = functools.wraps(method)(call_async if inspect.iscoroutinefunction(method) else call)
    signature = inspect.signature(method)
    without_self = list(signature.parameters.values())[1:]
    function.__signature__ = signature.replace(parameters=without_self)  # type: ignore[attr-defined]
    return function
