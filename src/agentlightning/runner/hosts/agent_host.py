"""An agent host: the process in which a Python agent, or the supervisor of a command, runs its attempts.

A host is forked by the zygote, runs many attempts at once (async agents as tasks, sync ones and commands in threads),
sends what they emit to the runner at once, and each attempt's end after all of its spans. Whatever an agent raises
becomes a record here, and nowhere else. The host lives as long as the runner holds the other end of its socket.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, cast

import orjson
from opentelemetry.sdk.trace import ReadableSpan

from agentlightning.errors import Failure
from agentlightning.resources import named_resources
from agentlightning.rollouts import in_process_environment
from agentlightning.runner import attempt_environ
from agentlightning.runner.agents.agent import Agent, Contract, users_traceback
from agentlightning.runner.agents.arguments import Call, bind_resources
from agentlightning.runner.agents.command import CommandError, task_variable
from agentlightning.runner.agents.reward import Reward, RewardFunction, check_reward, looks_like_reward
from agentlightning.runner.hosts.messages import (
    Done,
    Frames,
    FromHost,
    Job,
    Ready,
    Spans,
    Started,
    Stopping,
    ToHost,
    WireError,
    encode,
)
from agentlightning.span import JUDGE, Span
from agentlightning.tracing.emit import emit_exception, emit_reward
from agentlightning.tracing.otlp.otel_span import to_span
from agentlightning.tracing.process_scope import PostingSink
from agentlightning.tracing.sanitize import storable
from agentlightning.tracing.scope import current_scope, enter_main, scope
from agentlightning.tracing.tracer import flush

OUTPUT_CHARACTERS = 16_384
"""How much of an output is kept with the attempt."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What every host of a zygote shares."""

    agent: Agent
    reward: RewardFunction | None
    slots: int
    fields: Mapping[str, str]
    """Environment variable -> the field of a dict task it holds."""
    hidden: Sequence[str]
    """Fields of a dict task that the agent is not given."""


def serve(sock: socket.socket, setup: Setup) -> None:
    """Run attempts until the runner goes away. The process has `environ` and the tracer installed already."""
    asyncio.run(Host(sock, setup).serve())


@dataclass(frozen=True, slots=True)
class _Sink:
    """Where the spans of one attempt go."""

    job_id: int
    send: Callable[[Spans], None]
    remote: PostingSink
    """For processes that were forked from this one: two cannot write to one socket."""
    process: int

    def put(self, spans: Sequence[Span]) -> None:
        if os.getpid() == self.process:
            self.send(Spans(self.job_id, tuple(spans)))
        else:
            self.remote.put(spans)


@dataclass(frozen=True, slots=True)
class _JudgeSink:
    """Where the spans of a reward function go: into the attempt it judges, marked as no part of what the agent did."""

    sink: _Sink

    def put(self, spans: Sequence[Span]) -> None:
        self.sink.put([replace(span, attributes={**span.attributes, JUDGE: True}) for span in spans])


class Host:
    """The process' one host."""

    def __init__(self, sock: socket.socket, setup: Setup) -> None:
        self._sock = sock
        self._setup = setup
        self._frames: Frames[ToHost] = Frames(ToHost)
        self._running: dict[int, tuple[asyncio.Task[None], Call]] = {}
        self._threads = ThreadPoolExecutor(setup.slots, thread_name_prefix="agent")
        self._sending = threading.Lock()
        self._end = asyncio.Event()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._sock, self._receive)
        self._send(Ready(os.getpid()))
        await self._end.wait()
        self._leave()

    def _leave(self) -> None:
        """Nobody waits for anything here any more: stop the commands, then go without waiting for threads."""
        for _, call in self._running.values():
            call.cancelled = True
            if call.program is not None:
                call.program.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    # -- messages ----------------------------------------------------------------------------------------------------

    def _send(self, message: FromHost) -> None:
        # From whatever thread, at once: a reward is on its way before the agent can make its next call.
        data = _encoded(message)
        try:
            with self._sending:
                self._sock.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return  # the runner is gone; the loop sees it too and ends

    def _receive(self) -> None:
        try:
            data = self._sock.recv(1 << 18, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self._end.set()
        for message in self._frames.feed(data):
            self._handle(message)

    def _handle(self, message: ToHost) -> None:
        if isinstance(message, Job):
            self._send(Started(message.job_id))
            task = visible(message.rollout.input, self._setup.hidden)
            call = Call(replace(message.rollout, input=task), {}, message.environment, task)
            self._running[message.job_id] = (asyncio.create_task(self._attempt(message, call)), call)
        elif message.job_id in self._running:
            task, call = self._running[message.job_id]
            call.cancelled = True
            self._send(Stopping(message.job_id))
            asyncio.get_running_loop().call_soon(task.cancel)  # after its first step: a task that never ran has no end
            if call.program is not None:
                call.program.terminate()

    # -- one attempt -------------------------------------------------------------------------------------------------

    async def _attempt(self, job: Job, call: Call) -> None:
        """The boundary: whatever happens inside is a record afterwards."""
        failure: Failure | None = None
        output: Any = None
        ids = call.rollout.rollout_id, call.rollout.attempt.attempt_id
        address, key = job.server_url, job.environment.get("AGL_KEY", "")
        sink = _Sink(job.job_id, self._send, PostingSink(address, key), os.getpid())
        with scope(*ids, sink, address=address, key=key):
            try:
                resources = named_resources.validate_python(job.resources)
                call.resources = bind_resources(resources, job.server_url, job.environment)
                variables = attempt_environ.task_variables(call.task, self._setup.fields)
                if isinstance(self._setup.agent, Contract):
                    variables |= task_variable(call.task)
                with attempt_environ.overlay({**variables, **_shared_environment(job)}):
                    output = await self._run(call)
                if self._setup.reward is not None:
                    given = replace(call, rollout=job.rollout, task=job.rollout.input, resources=resources)
                    with scope(*ids, _JudgeSink(sink), "judge", address=job.server_url, role="judge"):
                        reward = await self._judge(self._setup.reward, given, output)
                    emit_reward(reward)
                else:
                    output = _record_returned(output)
                output = recordable(output)
            except BaseException as error:  # noqa: BLE001  the one place where an agent's failure becomes a record
                error = error.with_traceback(None) if isinstance(error, CommandError) else users_traceback(error)
                output, failure = None, Failure.of(error)
                if not call.cancelled:
                    emit_exception(error)
            flush()
        del self._running[job.job_id]
        self._send(Done(job.job_id, failure, output))

    async def _run(self, call: Call) -> Any:
        """What the agent returns."""
        agent = self._setup.agent
        return await (self._in_thread(agent.start, call) if agent.blocks(call) else _settled(agent.start(call)))

    async def _judge(self, reward: RewardFunction, call: Call, output: Any) -> Reward:
        """Run the reward function, outside of the attempt's environment: models it asks are asked where they always
        are."""
        return check_reward(await self._in_thread(reward.start, call, output), reward.source)

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """The function's result, awaited if need be. Does not end before the thread does, cancelled or not."""
        future = asyncio.wrap_future(self._threads.submit(_caught, function, *args))
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.shield(future)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        value, error = future.result()
        if error is not None:
            raise error
        return await _settled(value)


def _encoded(message: FromHost) -> bytes:
    """The message as bytes, its spans made storable where they cannot be sent as they are."""
    try:
        return encode(message)
    except WireError as error:
        if isinstance(message, Spans):
            return encode(Spans(message.job_id, tuple(map(storable, message.spans))))
        if isinstance(message, Done):
            return encode(Done(message.job_id, Failure.of(error)))
        raise


def visible(task: Any, hidden: Sequence[str]) -> Any:
    """The task without the fields that the agent is not to see."""
    if not hidden or not isinstance(task, Mapping):
        return task
    return {key: value for key, value in cast(Mapping[Any, Any], task).items() if key not in hidden}


def _shared_environment(job: Job) -> Mapping[str, str]:
    """For an agent that shares this process with other attempts. Programs get the attempt's own (see `command.py`)."""
    worker_id = job.rollout.attempt.worker_id or ""
    return in_process_environment(job.environment, worker_id)


def _caught(function: Callable[..., Any], *args: Any) -> tuple[Any, BaseException | None]:
    # A future cannot carry every exception: StopIteration and KeyboardInterrupt would not arrive.
    enter_main()
    try:
        return function(*args), None
    except BaseException as error:  # noqa: BLE001  raised again by `_in_thread`
        return None, error


async def _settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


# -- what an agent returned ------------------------------------------------------------------------------------------


def _record_returned(output: Any) -> Any:
    """The output; None where what the agent returned was its reward or its spans, which are recorded."""
    if _are_spans(output):
        _put_returned(output)
    elif looks_like_reward(output):
        emit_reward(check_reward(output, "the agent"))
    else:
        return output
    return None


def _are_spans(output: Any) -> bool:
    return isinstance(output, list) and bool(output) and all(isinstance(s, Span | ReadableSpan) for s in output)


def _put_returned(spans: list[Span | ReadableSpan]) -> None:
    """Keep spans that an agent made itself, as spans of its attempt."""
    inside = current_scope()
    if inside is None:
        raise RuntimeError("an attempt runs inside a scope")
    rollout, attempt = inside.rollout_id, inside.attempt_id
    inside.sink.put(
        [
            replace(span, rollout_id=rollout, attempt_id=attempt)
            if isinstance(span, Span)
            else to_span(span, rollout, attempt)
            for span in spans
        ]
    )


def recordable(output: Any) -> Any:
    """The output as a short JSON value: as it is where it is short, else the beginning of its text."""
    try:
        text = orjson.dumps(output, default=repr, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        return repr(output)[:OUTPUT_CHARACTERS]
    if len(text) <= OUTPUT_CHARACTERS:
        return orjson.loads(text)
    return (output if isinstance(output, str) else text.decode())[:OUTPUT_CHARACTERS]
