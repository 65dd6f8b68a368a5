"""What an agent says of itself: `emit_*`, one span for each call; `operation`, a span with a duration; and
`track_agent`, which says who speaks.

Each call creates one OpenTelemetry span, which the store records with the current attempt (see `scope.py`). The agent's
behaviour does not change; a value that cannot be recorded raises where it was emitted. `attributes` are further
attributes of the span; nested ones are flattened with dots. With `propagate=False`, which those of 0.x take, a value is
validated and not recorded.

A prompt and the response that follows it become one span of the operation `chat`, with the messages of both in OTel's
form, as if the gateway had seen the call; only its tokens are unknown. A prompt waits for the response of the same
agent in the same task or thread, or, where that has none, for the only one of the agent in the attempt. A tool call
that follows a prompt is its response, and what comes next may be the response to the result of the tool. A prompt that
nothing answers, and a response to nothing, are recorded as such and counted (`recording_status`).
"""

from __future__ import annotations

import functools
import inspect
import json
import reprlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Final, ParamSpec, Self, TypeAlias, TypeVar, cast, overload

from opentelemetry.trace import INVALID_SPAN
from opentelemetry.trace import Span as OtelSpan

from agentlightning import span as names
from agentlightning.errors import ConfigError, Failure, RewardError
from agentlightning.tracing import client_headers
from agentlightning.tracing.conventions import REWARD_FAMILY
from agentlightning.tracing.messages import (
    Message,
    ModelResult,
    field,
    is_message,
    json_text,
    message_text,
    messages_json,
    parse_json,
    read_messages,
    read_result,
    read_tool_call,
    split_conversation,
    to_jsonable,
    tool_call_part,
    tool_response_part,
)
from agentlightning.tracing.outbox import counters
from agentlightning.tracing.rewards import check_reward
from agentlightning.tracing.scope import (
    Scope,
    WaitingPrompt,
    agent_in,
    current_location,
    recording_scope,
    tracked_agent,
)
from agentlightning.tracing.tracer import record, tracer
from agentlightning.util.json_values import Json

Attributes: TypeAlias = Mapping[str, Any]
"""By name; nested ones are flattened with dots."""


def bound_arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Attributes) -> Json:
    """The arguments by name; those of an invalid call, which the function itself will reject, by position."""
    try:
        return dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:
        return {"args": args, "kwargs": dict(kwargs)}


def flatten(values: Attributes | None, prefix: str = "") -> Json:
    """Attribute values by dotted names."""
    found: Json = {}
    for key, value in values.items() if values else ():
        if isinstance(value, Mapping):
            found |= flatten(cast(Attributes, value), f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value if isinstance(value, str | bool | int | float) else json_text(value)
    return found


@contextmanager
def track_agent(name: str) -> Generator[None]:
    """Spans within the block carry `gen_ai.agent.name`, the unit of selective optimisation. So do model calls made
    within it, with any HTTP client.

        >>> with agl.track_agent("writer"):
        ...     agl.emit_message("a draft")
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"track_agent({name!r}): the name is a non-empty string")
    client_headers.install()
    token = tracked_agent.set(name)
    try:
        yield
    finally:
        tracked_agent.reset(token)


def emit_reward(
    reward: float | bool | Mapping[str, float],
    *,
    name: str = "reward",
    primary_key: str | None = None,
    agent: str | None = None,
    attributes: Attributes | None = None,
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


def _reward(reward: float | bool | Mapping[str, float], name: str, primary_key: str | None) -> Json:
    values = check_reward(reward, "emit_reward")
    if not isinstance(values, Mapping):
        if primary_key is not None:
            raise RewardError(f"primary_key={primary_key!r} chooses one of several dimensions; {reward!r} has none")
        return {names.EVALUATION_NAME: name, names.SCORE_VALUE: values}
    if primary_key is None:
        return {names.EVALUATION_NAME: name, names.REWARD_VALUES: values}
    if primary_key not in values:
        raise RewardError(f"primary_key={primary_key!r} is not one of the dimensions: {', '.join(values)}")
    found: Json = {names.EVALUATION_NAME: name, names.SCORE_VALUE: values[primary_key]}
    for place, each in enumerate(sorted(values, key=lambda each: each != primary_key)):
        found |= {f"{REWARD_FAMILY}{place}.name": each, f"{REWARD_FAMILY}{place}.value": values[each]}
    return found


def emit_message(message: Any, attributes: Attributes | None = None, propagate: bool = True) -> None:
    """Record a line of text, or a message of a framework or several, as LangChain, OpenAI, Anthropic and AutoGen have
    them. Raises ConfigError for data that is no message.

        >>> agl.emit_message("searching", {"step": 2})
        >>> agl.emit_message({"role": "user", "content": "6 x 7?"})
    """
    if isinstance(message, str):
        record_event(names.MESSAGE, {names.MESSAGE_BODY: message}, attributes, propagate)
        return
    if not is_message(message):
        raise ConfigError(
            f"emit_message takes text or a message, not {type(message).__name__}; use emit_object for data"
        )
    for each in read_messages(message, "user"):
        own = {names.MESSAGE_BODY: message_text([each]), names.MESSAGE_JSON: json_text(each)}
        record_event(names.MESSAGE, own, attributes, propagate)


def emit_object(obj: Any, attributes: Attributes | None = None, propagate: bool = True) -> None:
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


def emit_exception(exception: BaseException, attributes: Attributes | None = None, propagate: bool = True) -> None:
    """Record an exception that the agent has handled, with its traceback.

    >>> try:
    ...     int("seven")
    ... except ValueError as error:
    ...     agl.emit_exception(error)
    """
    if not isinstance(exception, BaseException):
        raise ConfigError(
            f"emit_exception takes an exception, not {type(exception).__name__}; use emit_message for text"
        )
    failure = Failure.of(exception)
    own = exception_attributes(failure)
    record_event(names.EXCEPTION, own, attributes, propagate, error=f"{failure.type}: {failure.message}")


def exception_attributes(failure: Failure) -> Json:
    """A failure as a span holds it."""
    return {
        names.EXCEPTION_TYPE: failure.type,
        names.EXCEPTION_MESSAGE: failure.message,
        names.EXCEPTION_STACKTRACE: failure.traceback,
    }


def emit_annotation(annotation: Attributes, propagate: bool = True) -> None:
    """Record any attributes. Nested values are flattened with dots: `{"a": {"b": 1}}` becomes `a.b`.

    >>> agl.emit_annotation({"user": {"plan": "free"}})
    """
    if not isinstance(annotation, Mapping) or not annotation:
        raise ConfigError(f"emit_annotation({annotation!r}) is empty; pass a dict with at least one key")
    record_event(names.ANNOTATION, {}, annotation, propagate)


def record_event(
    name: str, own: Attributes, attributes: Attributes | None = None, propagate: bool = True, error: str | None = None
) -> None:
    """Record a span. Where names collide, its own attributes take precedence over the user's."""
    further = flatten(attributes)
    if propagate:
        record(name, {**further, **own} if further else own, error)


# -- actions -----------------------------------------------------------------------------------------------------------

TOOL_OPERATION: Final = "execute_tool"


def emit_tool_call(
    name: Any,
    args: Any = None,
    result: Any = None,
    *,
    error: BaseException | str | None = None,
    call_id: str | None = None,
    attributes: Attributes | None = None,
) -> None:
    """Record a call of a tool: its name, arguments and result, or the error it ended with.

    In place of the name, a tool call as OpenAI, Anthropic, LangChain and AutoGen have it brings its own arguments.
    After a prompt without a response, the call is what the model has answered; arguments that have no names, such as a
    text, are called `input` in it. Raises ConfigError for anything else.

        >>> agl.emit_tool_call("search", {"query": "tea"}, ["a page about tea"])
        >>> agl.emit_tool_call("search", {"query": "tea"}, error=TimeoutError("no answer"))
    """
    if not isinstance(name, str):
        call = read_tool_call(name)
        if call is None:
            raise ConfigError(f"emit_tool_call({name!r:.80}): give the name of the tool, or a tool call")
        name, own_args, own_id = call
        args, call_id = own_args if args is None else args, call_id or own_id
    if not name:
        raise ConfigError("emit_tool_call('') names no tool")
    own: Json = {names.OPERATION_NAME: TOOL_OPERATION, names.TOOL_NAME: name}
    given = _present({names.TOOL_ARGUMENTS: args, names.TOOL_RESULT: result, names.TOOL_CALL_ID: call_id})
    own |= {key: value if isinstance(value, str) else json_text(value) for key, value in given.items()}
    message = f"{type(error).__qualname__}: {error}" if isinstance(error, BaseException) else error
    if error is not None:
        own[names.ERROR_TYPE] = "error" if isinstance(error, str) else type(error).__qualname__
    answer_with_tool_call(call_id, name, args, result if message is None else message)
    record_event(f"{TOOL_OPERATION} {name}", own, attributes, error=message)


def emit_step(step: Any, input: Any = None, output: Any = None, *, attributes: Attributes | None = None) -> None:
    """Record a step that the agent has taken: its name with input and output, or a step of a framework.

    LangChain's and CrewAI's actions, alone or with what was observed, become tool calls. To record how long a step
    takes and what happens within it, use `operation`.

        >>> agl.emit_step("plan", output=["search", "answer"])
    """
    if not isinstance(step, str) and (action := _action(step)) is not None:
        tool, tool_input, observation = action
        return emit_tool_call(tool, tool_input, observation if output is None else output, attributes=attributes)
    label = step if isinstance(step, str) else type(step).__name__
    described = step if output is None and not isinstance(step, str) else output
    given = _present({names.OPERATION_INPUT: input, names.OPERATION_OUTPUT: described})
    own = {key: json_text(value) for key, value in given.items()}
    record_event(names.OPERATION, {names.OPERATION_LABEL: label, **own}, attributes)


def _action(step: Any) -> tuple[str, Any, Any] | None:
    """(tool, input, observation) of a framework's action; None for what is none."""
    action, observation = step if isinstance(step, list | tuple) and len(cast("Any", step)) == 2 else (step, None)
    with suppress(Exception):  # a property of an object of another library may raise anything
        tool = field(action, "tool")
        observation = field(action, "result") if observation is None else observation
        if isinstance(tool, str) and tool:
            return tool, field(action, "tool_input"), observation
    return None


def _present(values: Attributes) -> Json:
    """Values that are there."""
    return {name: value for name, value in values.items() if value is not None}


# -- model calls -------------------------------------------------------------------------------------------------------

CHAT: Final = "chat"


def emit_prompt(
    prompt: Any, response: Any = None, *, model: str | None = None, attributes: Attributes | None = None
) -> None:
    """Record what was sent to a model, with its response or before an `emit_response`.

    Both may be text, messages as dicts, or what LangChain, OpenAI, Anthropic, AutoGen and CrewAI hand over.

        >>> agl.emit_prompt("6 x 7?", "42")
        >>> agl.emit_prompt([{"role": "user", "content": "6 x 7?"}], model="gpt-x")
        >>> agl.emit_response("42")
    """
    own = _further(attributes, model)
    own[names.INPUT_MESSAGES] = messages_json(read_messages(prompt, "user"))
    scope = recording_scope()
    if response is not None:
        _record_call(own, read_result(response), None)
    elif scope is None:
        _record_unanswered(own, None)
    else:
        _wait(scope, WaitingPrompt((agent_in(scope), current_location()), time.time(), own))


def emit_response(response: Any, *, model: str | None = None, attributes: Attributes | None = None) -> None:
    """Record what a model has answered to the prompt that was emitted before.

    >>> agl.emit_prompt("6 x 7?")
    >>> agl.emit_response("42", attributes={"cached": True})
    """
    _record_response(read_result(response), None, model, attributes)


def emit_completion(
    completion: Any, prompt: Any = None, *, model: str | None = None, attributes: Attributes | None = None
) -> None:
    """Record what a framework returns for a call: the answer, its model, tokens and reason to stop.

    The prompt is the one given here, else the one that waits, else, of a result that is a whole conversation, what
    comes before its last message.

        >>> agl.emit_completion({"choices": [{"message": {"role": "assistant", "content": "42"}}]}, prompt="6 x 7?")
    """
    conversation = split_conversation(completion)
    before, last = ([], completion) if conversation is None else conversation
    given = read_messages(prompt, "user") if prompt is not None else before
    _record_response(read_result(last), given, model, attributes, given_first=prompt is not None)


def _record_response(
    result: ModelResult,
    given: Sequence[Message] | None,
    model: str | None,
    attributes: Attributes | None,
    given_first: bool = False,
) -> None:
    further = _further(attributes, model)
    waiting = None if given_first else _take_waiting()
    if waiting is not None:
        _record_call({**waiting.attributes, **further}, result, waiting.time)
    elif given:
        _record_call({**further, names.INPUT_MESSAGES: messages_json(given)}, result, None)
    else:
        counters.add("responses_unprompted")
        record_event(names.RESPONSE, {**further, **_described(result)})


def _further(attributes: Attributes | None, model: str | None) -> Json:
    found = flatten(attributes)
    return found if model is None else found | {names.REQUEST_MODEL: model}


def answer_with_tool_call(call_id: str | None, name: str, arguments: Any, result: Any) -> None:
    """Record the call whose prompt waits: its response is this tool call. The conversation with the result of the tool
    waits for the next response, or tool call, and is no prompt of the agent's own."""
    waiting = _take_waiting()
    scope = recording_scope()
    if waiting is None or scope is None:
        return
    arguments = parse_json(arguments)
    named = arguments if isinstance(arguments, Mapping | None) else {"input": arguments}
    answer = {"role": "assistant", "parts": [tool_call_part(call_id, name, named)]}
    _record_call(waiting.attributes, ModelResult([answer], finish_reasons=("tool_calls",)), waiting.time)
    response = {"role": "tool", "parts": [tool_response_part(call_id, result)]}
    messages = [*json.loads(waiting.attributes[names.INPUT_MESSAGES]), answer, response]
    attributes = {**waiting.attributes, names.INPUT_MESSAGES: messages_json(messages)}
    _wait(scope, replace(waiting, time=time.time(), attributes=attributes, emitted=False))


def _record_call(attributes: Json, result: ModelResult, start_time: float | None) -> None:
    own = {names.OPERATION_NAME: CHAT, **attributes, **_described(result)}
    model = own.get(names.REQUEST_MODEL) or own.get(names.RESPONSE_MODEL)
    record(f"{CHAT} {model}" if model else CHAT, own, start_time=start_time)


def _described(result: ModelResult) -> Json:
    return _present(
        {
            names.OUTPUT_MESSAGES: messages_json(result.messages),
            names.RESPONSE_MODEL: result.model,
            names.RESPONSE_ID: result.response_id,
            names.INPUT_TOKENS: result.input_tokens,
            names.OUTPUT_TOKENS: result.output_tokens,
            names.FINISH_REASONS: list(result.finish_reasons) or None,
        }
    )


def _record_unanswered(attributes: Attributes, start_time: float | None) -> None:
    counters.add("prompts_unanswered")
    record(names.PROMPT, attributes, start_time=start_time)


# -- prompts that wait -------------------------------------------------------------------------------------------------


def _wait(scope: Scope, waiting: WaitingPrompt) -> None:
    earlier = scope.prompts.pop(waiting.place, None)
    if earlier is not None and earlier.emitted:
        _record_unanswered(earlier.attributes, earlier.time)
    scope.prompts[waiting.place] = waiting
    scope.at_end = _record_rest


def _take_waiting() -> WaitingPrompt | None:
    scope = recording_scope()
    if scope is None or not scope.prompts:
        return None
    prompts, place = scope.prompts, (agent_in(scope), current_location())
    of_agent = [each for each in prompts if each[0] == place[0]]
    return prompts.pop(of_agent[0] if place not in prompts and len(of_agent) == 1 else place, None)


def _record_rest(scope: Scope) -> None:
    """The attempt ends: what still waits was not answered."""
    prompts, scope.prompts = scope.prompts, {}
    for (agent, _), each in prompts.items():
        if each.emitted:
            own = {} if agent is None else {names.AGENT_NAME: agent}
            _record_unanswered({**own, **each.attributes}, each.time)


# -- steps with a duration ---------------------------------------------------------------------------------------------

P = ParamSpec("P")
R = TypeVar("R")


class Block(AbstractContextManager["Block"]):
    """A block of code, `with` or `async with`; what also decorates functions uses `_run_within`."""

    def __enter__(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *error: Any) -> None:
        self.__exit__(*error)

    def _returned(self, value: R) -> R:
        """Called with what a decorated function returns."""
        return value

    @staticmethod
    def _run_within(function: Callable[P, R], open_block: Callable[[tuple[Any, ...], Json], Block]) -> Any:
        """The function, sync or async, with each call in `open_block(args, kwargs)`."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def within_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                with open_block(args, kwargs) as block:
                    return block._returned(await function(*args, **kwargs))

            return within_async

        @functools.wraps(function)
        def within(*args: P.args, **kwargs: P.kwargs) -> R:
            with open_block(args, kwargs) as block:
                return block._returned(function(*args, **kwargs))

        return within


class Operation(Block):
    """One recorded step. Created by `operation`."""

    def __init__(self, name: str | None = None, attributes: Attributes | None = None, propagate: bool = True) -> None:
        self._name = name
        self._attributes = flatten(attributes)
        self._propagate = propagate
        self._context: AbstractContextManager[OtelSpan] = nullcontext(INVALID_SPAN)
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
        if self._propagate:
            recording_scope()  # Begins the implicit session, where there is no other.
            attributes = self._attributes | {names.OPERATION_LABEL: self._name or "operation"}
            self._context = tracer().start_as_current_span(names.OPERATION, attributes=attributes)
        self._span = self._context.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        if error is not None:
            self._open_span().set_attribute(names.ERROR_TYPE, type(error).__qualname__)
        self._span = None
        self._context.__exit__(kind, error, where)

    def _returned(self, value: R) -> R:
        self.set_output(value)
        return value

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function: each call is one step."""
        name, signature = self._name or fn.__qualname__, inspect.signature(fn)

        def step(args: tuple[Any, ...], kwargs: Json) -> Operation:
            given = {names.OPERATION_INPUT: json_text(bound_arguments(signature, args, kwargs))}
            return Operation(name, self._attributes | given, self._propagate)

        return self._run_within(fn, step)


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
