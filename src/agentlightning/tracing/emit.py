"""What an agent says about itself: rewards, messages, objects, exceptions, operations; and how rewards are read back.

Each call makes one OpenTelemetry span, kept by the store with the attempt it was made in (see `scope`). Nothing here
changes what the agent does: an emitted value that cannot be recorded raises at once, where it was emitted.

`attributes` are further attributes of the span; nested ones are flattened with dots. With `propagate=False` a value is
checked and nothing is recorded.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, is_dataclass
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast, overload

from opentelemetry.trace import INVALID_SPAN
from opentelemetry.trace import Span as OtelSpan
from pydantic import BaseModel

from agentlightning import span as names
from agentlightning.errors import ConfigError, Failure, RewardError
from agentlightning.span import Span
from agentlightning.tracing.conventions import REWARD_FAMILY
from agentlightning.tracing.tracer import record, tracer

P = ParamSpec("P")
R = TypeVar("R")

Reward = float | dict[str, float]
"""A plain reward, or one of several named dimensions."""

Attribute = str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]


# -- emitting --------------------------------------------------------------------------------------------------------


def emit_reward(
    reward: float | bool | Mapping[str, float],
    *,
    name: str = "reward",
    primary_key: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> None:
    """Record a reward: a finite number, or several by name, as in `{"correctness": 1.0, "format": 0.5}`.

    The last one of an attempt is its final reward; an earlier one belongs to the model call it follows. With a
    `primary_key`, the reward is that one of several, and the others are recorded beside it.
    Raises RewardError for anything else; a rollout without a reward emits none.

        >>> @agl.rollout
        ... def agent(task):
        ...     agl.emit_reward(1.0 if task["answer"] == 42 else 0.0)
    """
    _record(names.REWARD, _reward(reward, name, primary_key), attributes, propagate)


def _reward(
    reward: float | bool | Mapping[str, float], name: str, primary_key: str | None
) -> dict[str, Attribute | dict[str, float]]:
    if not isinstance(reward, Mapping):
        if primary_key is not None:
            raise RewardError(f"primary_key={primary_key!r} chooses among several rewards; {reward!r} is one")
        return {names.EVALUATION_NAME: name, names.SCORE_VALUE: _number(reward)}
    values = _dimensions(reward)
    if primary_key is None:
        return {names.EVALUATION_NAME: name, names.REWARD_VALUES: values}
    if primary_key not in values:
        raise RewardError(f"primary_key={primary_key!r} is none of the rewards: {', '.join(values)}")
    found: dict[str, Attribute | dict[str, float]] = {names.EVALUATION_NAME: name}
    found[names.SCORE_VALUE] = values[primary_key]
    for place, each in enumerate(sorted(values, key=lambda each: each != primary_key)):
        found |= {f"{REWARD_FAMILY}{place}.name": each, f"{REWARD_FAMILY}{place}.value": values[each]}
    return found


def emit_message(message: str, attributes: Mapping[str, Any] | None = None, propagate: bool = True) -> None:
    """Record a line of text.

    >>> agl.emit_message("searching", {"step": 2})
    """
    if not isinstance(message, str):
        raise ConfigError(f"emit_message takes text, not {type(message).__name__}; use emit_object for data")
    _record(names.MESSAGE, {names.MESSAGE_BODY: message}, attributes, propagate)


def emit_object(obj: Any, attributes: Mapping[str, Any] | None = None, propagate: bool = True) -> None:
    """Record any JSON value, pydantic model or dataclass. Raises ConfigError where there is no JSON for it.

    >>> agl.emit_object({"plan": ["search", "answer"]})
    """
    try:
        text = json.dumps(obj, allow_nan=False, ensure_ascii=False, default=_jsonable)
    except (TypeError, ValueError) as error:
        shown = reprlib.repr(obj)
        raise ConfigError(f"emit_object({shown}) cannot be written as JSON: {error}; emit plain values") from error
    kind = type(obj)
    own = {names.OBJECT_TYPE: f"{kind.__module__}.{kind.__qualname__}", names.OBJECT_JSON: text}
    _record(names.OBJECT, own, attributes, propagate)


def emit_exception(
    exception: BaseException, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> None:
    """Record an exception the agent has handled, with its traceback.

    >>> try:
    ...     int("seven")
    ... except ValueError as error:
    ...     agl.emit_exception(error)
    """
    if not isinstance(exception, BaseException):
        kind = type(exception).__name__
        raise ConfigError(f"emit_exception takes an exception, not {kind}; use emit_message for text")
    failure = Failure.of(exception)
    own = {
        names.EXCEPTION_TYPE: failure.type,
        names.EXCEPTION_MESSAGE: failure.message,
        names.EXCEPTION_STACKTRACE: failure.traceback,
    }
    _record(names.EXCEPTION, own, attributes, propagate, error=f"{failure.type}: {failure.message}")


def emit_annotation(annotation: Mapping[str, Any], propagate: bool = True) -> None:
    """Record attributes of your own choice. Nested values are flattened with dots: `{"a": {"b": 1}}` is `a.b`.

    >>> agl.emit_annotation({"user": {"plan": "free"}})
    """
    if not isinstance(annotation, Mapping) or not annotation:
        raise ConfigError(f"emit_annotation({annotation!r}) says nothing; give it a dict with at least one key")
    _record(names.ANNOTATION, {}, annotation, propagate)


def _record(
    name: str,
    own: Mapping[str, Any],
    attributes: Mapping[str, Any] | None,
    propagate: bool,
    error: str | None = None,
) -> None:
    """What is emitted keeps its meaning: of attributes of one name, its own win."""
    further = dict(_flat(attributes, "")) if attributes else {}
    if propagate:
        record(name, {**further, **own} if further else own, error=error)


def _number(value: Any, dimension: str | None = None) -> float:
    """The value as a finite float; numbers of NumPy and one-element tensors are numbers too."""
    try:
        number = value.__float__()
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise RewardError(
            f"{_call(value, dimension)}: a reward is a finite number or a dict of them; "
            "emit none where there is no reward"
        ) from error
    if not math.isfinite(number):
        raise RewardError(f"{_call(value, dimension)}: a reward must be finite; emit none where no score is known")
    if abs(number) > names.MAX_REWARD:
        raise RewardError(f"{_call(value, dimension)}: a reward is at most {names.MAX_REWARD:g} either way; scale it")
    return number


def _call(value: Any, dimension: str | None) -> str:
    shown = reprlib.repr(value)
    return f"emit_reward({shown})" if dimension is None else f"emit_reward({{{dimension!r}: {shown}}})"


def _dimensions(values: Mapping[str, float]) -> dict[str, float]:
    if not values:
        raise RewardError("emit_reward({}) has no dimension; name at least one")
    for name in values:
        if not isinstance(name, str):
            raise RewardError(f"emit_reward: the dimension {name!r} is not named by a string")
    return {name: _number(value, name) for name, value in values.items()}


def _flat(values: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, Attribute]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(cast(Mapping[str, Any], value), f"{prefix}{key}.")
        elif isinstance(value, str | bool | int | float):
            yield f"{prefix}{key}", value
        else:
            yield f"{prefix}{key}", _recorded(value)


# -- operations ------------------------------------------------------------------------------------------------------


class Operation:
    """One recorded step. Made by `operation`."""

    def __init__(
        self, name: str | None = None, attributes: Mapping[str, Any] | None = None, propagate: bool = True
    ) -> None:
        self._name = name
        self._attributes = dict(_flat(attributes, "")) if attributes else {}
        self._propagate = propagate
        self._entered = ExitStack()
        self._span: OtelSpan | None = None

    def set_input(self, /, *args: Any, **kwargs: Any) -> None:
        """What went in: one value as it is, several as a list, named ones as an object."""
        given = [*args, kwargs] if kwargs else list(args)
        self._open_span().set_attribute(names.OPERATION_INPUT, _recorded(given[0] if len(given) == 1 else given))

    def set_output(self, value: Any) -> None:
        """What came out."""
        self._open_span().set_attribute(names.OPERATION_OUTPUT, _recorded(value))

    def _open_span(self) -> OtelSpan:
        if self._span is None:
            raise ConfigError(f"operation {self._name!r} is not open; set its input and output inside the with block")
        return self._span

    def __enter__(self) -> Operation:
        if self._span is not None:
            raise ConfigError(f"operation {self._name!r} is open already; make one for each with block")
        if not self._propagate:
            self._span = INVALID_SPAN
            return self
        attributes = self._attributes | {names.OPERATION_LABEL: self._name or "operation"}
        opening = tracer().start_as_current_span(names.OPERATION, attributes=attributes)
        self._span = self._entered.enter_context(opening)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is not None:
            self._open_span().set_attribute(names.ERROR_TYPE, type(error).__qualname__)
        self._span = None
        self._entered.__exit__(kind, error, where)

    async def __aenter__(self) -> Operation:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, where)

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        """As a decorator: each call is one step."""
        name = self._name or fn.__qualname__
        attributes, propagate = self._attributes, self._propagate
        signature = inspect.signature(fn)

        if inspect.iscoroutinefunction(fn):

            @functools.wraps(fn)
            async def recorded_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                with Operation(name, attributes, propagate) as step:
                    step.set_input(_arguments(signature, args, kwargs))
                    output = await fn(*args, **kwargs)
                    step.set_output(output)
                    return output

            return cast(Callable[P, R], recorded_async)

        @functools.wraps(fn)
        def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
            with Operation(name, attributes, propagate) as step:
                step.set_input(_arguments(signature, args, kwargs))
                output = fn(*args, **kwargs)
                step.set_output(output)
                return output

        return recorded


@overload
def operation(fn: Callable[P, R], /, *, propagate: bool = True, **attributes: Any) -> Callable[P, R]: ...
@overload
def operation(name: str | None = None, *, propagate: bool = True, **attributes: Any) -> Operation: ...
def operation(name: Any = None, *, propagate: bool = True, **attributes: Any) -> Any:
    """Record a step of the agent: its name, what went in, what came out, how long it took, how it failed.

    As a decorator of a function, sync or async, with or without a name, and as a block:

        >>> @agl.operation
        ... def search(query):
        ...     return ["a page about " + query]
        >>> search("tea")
        ['a page about tea']
        >>> with agl.operation("plan", kind="draft") as step:
        ...     step.set_input("a question")
        ...     step.set_output(["search", "answer"])

    Other keywords are attributes of the span. What is recorded inside becomes its child. An exception is recorded and
    passed on. Values with no JSON form are recorded by their `repr`, shortened; the function gets and returns them
    untouched.
    """
    if callable(name):
        return Operation(None, attributes, propagate)(name)
    return Operation(name, attributes, propagate)


_short = reprlib.Repr()
_short.maxother = _short.maxstring = 1000


def _arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name. A call that does not fit is recorded as made; the function itself will complain."""
    try:
        return dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:
        return {"args": args, "kwargs": dict(kwargs)}


def _recorded(value: Any) -> str:
    """JSON where there is one; else the value's `repr`, as a JSON string, shortened. Never fails."""
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False, default=_recordable)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(_short.repr(value))


def _recordable(value: Any) -> Any:
    try:
        return _jsonable(value)
    except (TypeError, ValueError):
        return _short.repr(value)


def _jsonable(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__qualname__} has no JSON form")


# -- reading ---------------------------------------------------------------------------------------------------------


def get_reward_value(span: Span) -> Reward | None:
    """The reward a span carries; None where it carries none that counts and is made of numbers.

    >>> agl.get_reward_value(agl.Span("ro-1", "at-1", "search", start_time=0.0)) is None
    True
    """
    if span.name != names.REWARD or not names.counts(span):
        return None
    values = span.attributes.get(names.REWARD_VALUES)
    if values is None:
        return names.usable_reward(span.attributes.get(names.SCORE_VALUE))
    found: dict[Any, Any] = values if isinstance(values, dict) else {}
    numbers = {str(name): names.usable_reward(value) for name, value in found.items()}
    usable = {name: number for name, number in numbers.items() if number is not None}
    return usable if len(usable) == len(numbers) > 0 else None


def find_reward_spans(spans: Sequence[Span]) -> list[Span]:
    """The spans that carry a reward, in the order given. What came too late is no reward: of a superseded attempt, or
    after its end.

        >>> agl.find_reward_spans([agl.Span("ro-1", "at-1", "search", start_time=0.0)])
        []
    """
    return [span for span in spans if get_reward_value(span) is not None]


def find_final_reward(spans: Sequence[Span]) -> Reward | None:
    """The last reward of an attempt whose spans come in the store's order. None is *missing*, never 0.0.

    >>> score = {"gen_ai.evaluation.score.value": 1.0}
    >>> agl.find_final_reward([agl.Span("ro-1", "at-1", "gen_ai.evaluation.result", 0.0, attributes=score)])
    1.0
    """
    for span in reversed(spans):
        if (reward := get_reward_value(span)) is not None:
            return reward
    return None
