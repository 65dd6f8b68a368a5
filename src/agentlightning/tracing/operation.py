"""`operation`: records a step of the agent as a span with its input, output, duration and failure."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, ParamSpec, Self, TypeVar, cast, overload

from opentelemetry.trace import INVALID_SPAN
from opentelemetry.trace import Span as OtelSpan

from agentlightning import span as names
from agentlightning.errors import ConfigError
from agentlightning.tracing.emit import bound_arguments, flatten
from agentlightning.tracing.messages import json_text
from agentlightning.tracing.scope import recording_scope
from agentlightning.tracing.tracer import tracer

P = ParamSpec("P")
R = TypeVar("R")


class Block(AbstractContextManager["Block"]):
    """A block of code, `with` or `async with`."""

    def __enter__(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *error: Any) -> None:
        self.__exit__(*error)


class Operation(Block):
    """One recorded step. Created by `operation`."""

    def __init__(
        self, name: str | None = None, attributes: Mapping[str, Any] | None = None, propagate: bool = True
    ) -> None:
        self._name = name
        self._attributes = dict(flatten(attributes, "")) if attributes else {}
        self._propagate = propagate
        self._stack = ExitStack()
        self._span: OtelSpan | None = None

    def set_input(self, /, *args: Any, **kwargs: Any) -> None:
        """Record the input: a single value unchanged, several as a list, named ones as an object."""
        inputs = [*args, kwargs] if kwargs else list(args)
        self._open_span().set_attribute(names.OPERATION_INPUT, json_text(inputs[0] if len(inputs) == 1 else inputs))

    def set_output(self, value: Any) -> None:
        """Record the output."""
        self._open_span().set_attribute(names.OPERATION_OUTPUT, json_text(value))

    def _open_span(self) -> OtelSpan:
        if self._span is None:
            raise ConfigError(f"operation {self._name!r} is not open; set its input and output inside the with block")
        return self._span

    def __enter__(self) -> Self:
        if self._span is not None:
            raise ConfigError(f"operation {self._name!r} is already open; create one per with block")
        if not self._propagate:
            self._span = INVALID_SPAN
            return self
        recording_scope()  # Begins the implicit session, where there is no other.
        attributes = self._attributes | {names.OPERATION_LABEL: self._name or "operation"}
        context = tracer().start_as_current_span(names.OPERATION, attributes=attributes)
        self._span = self._stack.enter_context(context)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        if error is not None:
            self._open_span().set_attribute(names.ERROR_TYPE, type(error).__qualname__)
        self._span = None
        self._stack.__exit__(kind, error, where)

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function: each call is one step."""
        name = self._name or fn.__qualname__
        attributes, propagate = self._attributes, self._propagate
        signature = inspect.signature(fn)

        if inspect.iscoroutinefunction(fn):

            @functools.wraps(fn)
            async def recorded_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                with Operation(name, attributes, propagate) as step:
                    step.set_input(bound_arguments(signature, args, kwargs))
                    output = await fn(*args, **kwargs)
                    step.set_output(output)
                    return output

            return cast(Callable[P, R], recorded_async)

        @functools.wraps(fn)
        def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
            with Operation(name, attributes, propagate) as step:
                step.set_input(bound_arguments(signature, args, kwargs))
                output = fn(*args, **kwargs)
                step.set_output(output)
                return output

        return recorded


@overload
def operation(fn: Callable[P, R], /, *, propagate: bool = True, **attributes: Any) -> Callable[P, R]: ...
@overload
def operation(name: str | None = None, *, propagate: bool = True, **attributes: Any) -> Operation: ...
def operation(name: Any = None, *, propagate: bool = True, **attributes: Any) -> Any:
    """Record a step of the agent: its name, input, output, duration and failure.

    Decorates a function, sync or async, with or without a name, or wraps a block:

        >>> @agl.operation
        ... def search(query):
        ...     return ["a page about " + query]
        >>> search("tea")
        ['a page about tea']
        >>> with agl.operation("plan", kind="draft") as step:
        ...     step.set_input("a question")
        ...     step.set_output(["search", "answer"])

    Other keywords are attributes of the span. Spans recorded within it become its children. An exception is recorded
    and re-raised. Values without a JSON form are recorded as their shortened `repr`; arguments and results themselves
    are not changed.
    """
    if callable(name):
        return Operation(None, attributes, propagate)(name)
    return Operation(name, attributes, propagate)
