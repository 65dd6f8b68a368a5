"""`emit_*`: rewards, messages, objects, exceptions and annotations that an agent records.

Each call creates one OpenTelemetry span, which the store records with the current attempt (see `scope.py`). The agent's
behaviour does not change; a value that cannot be recorded raises where it was emitted.

`attributes` are further attributes of the span; nested ones are flattened with dots. With `propagate=False` a value is
validated and not recorded.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any

from agentlightning import span as names
from agentlightning.errors import ConfigError, Failure, RewardError
from agentlightning.tracing.conventions import REWARD_FAMILY
from agentlightning.tracing.emit.framework_messages import is_message, message_text, read_messages
from agentlightning.tracing.tracer import record
from agentlightning.tracing.values import Attribute, flatten, json_text, to_jsonable


def emit_reward(
    reward: float | bool | Mapping[str, float],
    *,
    name: str = "reward",
    primary_key: str | None = None,
    agent: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> None:
    """Record a reward: a finite number, or several by name, such as `{"correctness": 1.0, "format": 0.5}`.

    The last reward of an attempt is its final reward; an earlier one belongs to the model call it follows. With a
    `primary_key`, that dimension is the reward, and the others are recorded beside it. With an `agent`, a name as in
    `track_agent`, it belongs to the calls of that agent and is neither final nor intermediate; several add up
    (`LightningRL(agent_rewards=)`). Raises RewardError for other values. If a rollout has no reward, emit none.

        >>> @agl.rollout
        ... def agent(task):
        ...     agl.emit_reward(1.0 if task["answer"] == 42 else 0.0)
    """
    own = _reward(reward, name, primary_key)
    if agent is not None:
        if not isinstance(agent, str) or not agent:
            raise RewardError(f"emit_reward(..., agent={agent!r}): name the agent as track_agent does")
        own[names.REWARD_AGENT] = agent
    record_event(names.REWARD, own, attributes, propagate)


def _reward(
    reward: float | bool | Mapping[str, float], name: str, primary_key: str | None
) -> dict[str, Attribute | dict[str, float]]:
    if not isinstance(reward, Mapping):
        if primary_key is not None:
            raise RewardError(f"primary_key={primary_key!r} chooses one of several dimensions; {reward!r} has none")
        return {names.EVALUATION_NAME: name, names.SCORE_VALUE: _number(reward)}
    values = _dimensions(reward)
    if primary_key is None:
        return {names.EVALUATION_NAME: name, names.REWARD_VALUES: values}
    if primary_key not in values:
        raise RewardError(f"primary_key={primary_key!r} is not one of the dimensions: {', '.join(values)}")
    found: dict[str, Attribute | dict[str, float]] = {names.EVALUATION_NAME: name}
    found[names.SCORE_VALUE] = values[primary_key]
    for place, each in enumerate(sorted(values, key=lambda each: each != primary_key)):
        found |= {f"{REWARD_FAMILY}{place}.name": each, f"{REWARD_FAMILY}{place}.value": values[each]}
    return found


def emit_message(message: Any, attributes: Mapping[str, Any] | None = None, propagate: bool = True) -> None:
    """Record a line of text, or a message of a framework or several, as LangChain, OpenAI, Anthropic and AutoGen have
    them. Raises ConfigError for data that is no message.

        >>> agl.emit_message("searching", {"step": 2})
        >>> agl.emit_message({"role": "user", "content": "6 x 7?"})
    """
    if isinstance(message, str):
        record_event(names.MESSAGE, {names.MESSAGE_BODY: message}, attributes, propagate)
        return
    if not is_message(message):
        kind = type(message).__name__
        raise ConfigError(f"emit_message takes text or a message, not {kind}; use emit_object for data")
    for each in read_messages(message, "user"):
        own = {names.MESSAGE_BODY: message_text([each]), names.MESSAGE_JSON: json_text(each)}
        record_event(names.MESSAGE, own, attributes, propagate)


def emit_object(obj: Any, attributes: Mapping[str, Any] | None = None, propagate: bool = True) -> None:
    """Record a JSON value, pydantic model or dataclass. Raises ConfigError for values without a JSON form.

    >>> agl.emit_object({"plan": ["search", "answer"]})
    """
    try:
        text = json.dumps(obj, allow_nan=False, ensure_ascii=False, default=to_jsonable)
    except (TypeError, ValueError) as error:
        shown = reprlib.repr(obj)
        raise ConfigError(f"emit_object({shown}) cannot be written as JSON: {error}; emit plain values") from error
    kind = type(obj)
    own = {names.OBJECT_TYPE: f"{kind.__module__}.{kind.__qualname__}", names.OBJECT_JSON: text}
    record_event(names.OBJECT, own, attributes, propagate)


def emit_exception(
    exception: BaseException, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> None:
    """Record an exception that the agent has handled, with its traceback.

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
    record_event(names.EXCEPTION, own, attributes, propagate, error=f"{failure.type}: {failure.message}")


def emit_annotation(annotation: Mapping[str, Any], propagate: bool = True) -> None:
    """Record any attributes. Nested values are flattened with dots: `{"a": {"b": 1}}` becomes `a.b`.

    >>> agl.emit_annotation({"user": {"plan": "free"}})
    """
    if not isinstance(annotation, Mapping) or not annotation:
        raise ConfigError(f"emit_annotation({annotation!r}) is empty; pass a dict with at least one key")
    record_event(names.ANNOTATION, {}, annotation, propagate)


def record_event(
    name: str,
    own: Mapping[str, Any],
    attributes: Mapping[str, Any] | None,
    propagate: bool,
    error: str | None = None,
    start_time: float | None = None,
) -> None:
    """Record a span. Where names collide, its own attributes take precedence over the user's."""
    further = dict(flatten(attributes)) if attributes else {}
    if propagate:
        record(name, {**further, **own} if further else own, error, start_time)


def _number(value: Any, dimension: str | None = None) -> float:
    """The value as a finite float; NumPy scalars and one-element tensors are accepted."""
    try:
        number = value.__float__()
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise RewardError(
            f"{_call(value, dimension)}: a reward is a finite number or a dict of them; emit none if there is no reward"
        ) from error
    if not math.isfinite(number):
        raise RewardError(f"{_call(value, dimension)}: a reward must be finite; emit none if there is no score")
    if abs(number) > names.MAX_REWARD:
        raise RewardError(
            f"{_call(value, dimension)}: rewards range from {-names.MAX_REWARD:g} to {names.MAX_REWARD:g}; scale it"
        )
    return number


def _call(value: Any, dimension: str | None) -> str:
    shown = reprlib.repr(value)
    return f"emit_reward({shown})" if dimension is None else f"emit_reward({{{dimension!r}: {shown}}})"


def _dimensions(values: Mapping[str, float]) -> dict[str, float]:
    if not values:
        raise RewardError("emit_reward({}) has no dimensions; pass at least one")
    for name in values:
        if not isinstance(name, str):
            raise RewardError(f"emit_reward: the dimension {name!r} is not a string")
    return {name: _number(value, name) for name, value in values.items()}
