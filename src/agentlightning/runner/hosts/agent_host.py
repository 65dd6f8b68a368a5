"""An agent host: the process that runs attempts of a Python agent, or supervises those of a command.

Forked by the fork server, it runs many attempts concurrently (async agents as tasks, sync agents and commands in
threads), or one at a time on its main thread, where it may change the working directory and handle signals. An attempt
that does so beside others is interrupted, and the runner repeats it in a process of its own. A host sends emitted spans
to the runner immediately, and the end of an attempt after all of its spans. This is the only place where an exception
of an agent becomes a record. The host exits when the runner closes its socket.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, cast

import orjson
from opentelemetry.sdk.trace import ReadableSpan

from agentlightning.attempt_variables import in_process_environment
from agentlightning.errors import Failure, MissingRewardError
from agentlightning.resources import named_resources
from agentlightning.runner import attempt_environ
from agentlightning.runner.agents.agent import Agent, AgentClass
from agentlightning.runner.agents.arguments import Invocation, OwnProcessNeededError, bind_resources
from agentlightning.runner.agents.command import CommandError, task_variable
from agentlightning.runner.agents.loading import user_traceback
from agentlightning.runner.agents.reward import Reward, RewardFunction, check_reward, looks_like_reward
from agentlightning.runner.hosts.messages import (
    Done,
    FrameDecoder,
    FromHost,
    Job,
    MessageError,
    Ready,
    Spans,
    Started,
    Stopping,
    ToHost,
    encode,
)
from agentlightning.span import JUDGE, REWARD_MISSING, Span
from agentlightning.tracing.emit import emit_annotation, emit_exception, emit_reward
from agentlightning.tracing.otlp.otel_span import to_span
from agentlightning.tracing.posting_sink import PostingSink
from agentlightning.tracing.sanitize import sanitize_span
from agentlightning.tracing.scope import current_scope, forbid_implicit, inherited_scope, mark_owner, scope
from agentlightning.tracing.tracer import flush
from agentlightning.util.json_values import dumps, loads

OUTPUT_CHARACTERS = 16_384
"""Maximum length of the output that is stored with the attempt."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What all hosts of a fork server share."""

    agent: Agent
    reward: RewardFunction | None
    slots: int
    fields: Mapping[str, str]
    """Environment variable -> the field of a dict task it holds."""
    hidden: Sequence[str]
    """Fields of a dict task that are hidden from the agent."""


def serve(sock: socket.socket, setup: Setup, single: bool) -> None:
    """Run attempts until the runner disconnects. `attempt_environ` and the tracer are installed already."""
    forbid_implicit()
    if not single:
        asyncio.run(Host(sock, setup, ThreadPoolExecutor(setup.slots, thread_name_prefix="agent")).serve())
        return
    attempt_environ.process_state.save()
    main = MainThread()
    threading.Thread(target=main.finish_with, args=(Host(sock, setup, main).serve,), daemon=True).start()
    main.run()


class MainThread:
    """An executor that runs functions on the main thread, where signals and libraries that insist on it work."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future, context = Future[Any](), copy_context()
        self._calls.put(lambda: future.set_result(context.run(function, *args)))
        return future

    def run(self) -> None:
        """Run what is submitted, until `finish_with` ends."""
        while (call := self._calls.get()) is not None:
            call()

    def finish_with(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine in an event loop of the current thread."""
        try:
            asyncio.run(work())
        finally:
            self._calls.put(None)


@dataclass(frozen=True, slots=True)
class _Sink:
    """Sends the spans of one attempt to the runner."""

    job_id: int
    send: Callable[[Spans], None]
    remote: PostingSink
    """Used in processes forked from this one: two processes cannot write to one socket."""
    process: int

    def put(self, spans: Sequence[Span]) -> None:
        if os.getpid() == self.process:
            self.send(Spans(self.job_id, tuple(spans)))
        else:
            self.remote.put(spans)


@dataclass(frozen=True, slots=True)
class _RewardSink:
    """Records the spans of a reward function in the attempt it scores, marked as not the agent's own."""

    sink: _Sink

    def put(self, spans: Sequence[Span]) -> None:
        self.sink.put([replace(span, attributes={**span.attributes, JUDGE: True}) for span in spans])


class Host:
    """The single host of this process."""

    def __init__(self, sock: socket.socket, setup: Setup, threads: ThreadPoolExecutor | MainThread) -> None:
        self._sock = sock
        self._single = isinstance(threads, MainThread)
        self._process = os.getpid()
        self._setup = setup
        self._frames: FrameDecoder[ToHost] = FrameDecoder(ToHost)
        self._running: dict[int, tuple[asyncio.Task[None], Invocation]] = {}
        self._threads = threads
        self._sending = threading.Lock()
        self._end = asyncio.Event()

    async def serve(self) -> None:
        if not self._single:
            attempt_environ.process_state.on_change = self._refuse_change
        loop = asyncio.get_running_loop()
        loop.add_reader(self._sock, self._receive)
        self._send(Ready(os.getpid()))
        await self._end.wait()
        self._exit()

    def _exit(self) -> None:
        """Kill the commands and exit without waiting for threads: the runner has disconnected. What else was started
        here, such as the workers of pools, goes with the process group (`fork_server.py`)."""
        for _, invocation in self._running.values():
            invocation.cancelled = True
            if invocation.program is not None:
                invocation.program.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    # -- messages ----------------------------------------------------------------------------------------------------

    def _send(self, message: FromHost) -> None:
        # Called from any thread, sends immediately: a reward is on its way before the agent makes its next call.
        data = _encoded(message)
        try:
            with self._sending:
                self._sock.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return  # the runner has disconnected; the loop notices and ends

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
            task = without_hidden_fields(message.rollout.input, self._setup.hidden)
            invocation = Invocation(replace(message.rollout, input=task), {}, message.environment, task)
            self._running[message.job_id] = (asyncio.create_task(self._attempt(message, invocation)), invocation)
        elif message.job_id in self._running:
            task, invocation = self._running[message.job_id]
            invocation.cancelled = True
            self._send(Stopping(message.job_id))
            if invocation.cancel is not None:
                invocation.cancel()
            asyncio.get_running_loop().call_soon(task.cancel)  # after its first step: a task that never ran cannot end
            if invocation.program is not None:
                invocation.program.terminate()

    # -- one attempt -------------------------------------------------------------------------------------------------

    async def _attempt(self, job: Job, invocation: Invocation) -> None:
        """Error boundary: every exception of the agent becomes a record."""
        failure: Failure | None = None
        output: Any = None
        ids = invocation.rollout.rollout_id, invocation.rollout.attempt.attempt_id
        address, key = job.server_url, job.environment.get("AGL_KEY", "")
        sink = _Sink(job.job_id, self._send, PostingSink(address, key), os.getpid())
        with scope(*ids, sink, address=address, key=key):
            try:
                resources = named_resources.validate_python(job.resources)
                invocation.resources = bind_resources(resources, job.server_url, job.environment)
                variables = attempt_environ.task_variables(invocation.task, self._setup.fields)
                if isinstance(self._setup.agent, AgentClass):
                    variables |= task_variable(invocation.task)
                # A command overrides these by the attempt's own (`command.py`).
                shared = in_process_environment(job.environment, job.rollout.attempt.worker_id or "")
                with attempt_environ.overlay({**variables, **shared}):
                    output = await self._run(invocation)
                invocation.check_process()
                if self._setup.reward is not None:
                    given = replace(invocation, rollout=job.rollout, task=job.rollout.input, resources=resources)
                    with scope(*ids, _RewardSink(sink), "judge", address=job.server_url, role="judge"):
                        reward = await self._run_reward(self._setup.reward, given, output)
                    invocation.check_process()
                    if reward is not None:
                        emit_reward(reward)
                else:
                    output = _record_output(output)
                output = shorten_output(output)
            except BaseException as error:  # noqa: BLE001  the only place where a failure of an agent becomes a record
                error = error.with_traceback(None) if isinstance(error, CommandError) else user_traceback(error)
                output, failure = None, Failure.of(error)
                if not self._single:
                    invocation.needs_process = invocation.needs_process or _wants_main_thread(error)
                if not invocation.cancelled and not invocation.needs_process:
                    emit_exception(error)
            flush()
        if self._single:
            await self._in_thread(attempt_environ.process_state.restore)
        del self._running[job.job_id]
        self._send(Done(job.job_id, failure, output, invocation.needs_process))

    def _refuse_change(self, what: str) -> None:
        """Called before the state of this process changes. Raises where that is seen by other attempts."""
        if os.getpid() != self._process:
            return
        inside = inherited_scope()
        for _, invocation in list(self._running.values()):
            if inside is None or invocation.rollout.attempt.attempt_id == inside.attempt_id:
                invocation.needs_process = what
        raise OwnProcessNeededError(f"{what} changes the process that this attempt shares with others")

    async def _run(self, invocation: Invocation) -> Any:
        """The agent's return value."""
        agent = self._setup.agent
        return await (
            self._in_thread(agent.start, invocation)
            if agent.blocks(invocation)
            else self._in_thread(_run_async, agent, invocation)
            if self._single
            else _await_if_needed(agent.start(invocation))
        )

    async def _run_reward(self, reward: RewardFunction, invocation: Invocation, output: Any) -> Reward | None:
        """Run the reward function outside of the attempt's environment, so that its own model calls are not
        redirected. None where it has no reward; the reason is recorded."""
        try:
            return check_reward(await self._in_thread(reward.start, invocation, output), reward.source)
        except MissingRewardError as error:
            emit_annotation({REWARD_MISSING: str(error)})
            return None

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call the function in a thread and await its result. Does not return before the thread ends, even if
        cancelled."""
        future = asyncio.wrap_future(self._threads.submit(_result_or_error, function, *args))
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
        return await _await_if_needed(value)


def _encoded(message: FromHost) -> bytes:
    """Encode a message; spans with values that cannot be encoded are sanitized."""
    try:
        return encode(message)
    except MessageError as error:
        if isinstance(message, Spans):
            return encode(Spans(message.job_id, tuple(map(sanitize_span, message.spans))))
        if isinstance(message, Done):
            return encode(Done(message.job_id, Failure.of(error)))
        raise


def without_hidden_fields(task: Any, hidden: Sequence[str]) -> Any:
    """The task without its hidden fields."""
    if not hidden or not isinstance(task, Mapping):
        return task
    return {key: value for key, value in cast(Mapping[Any, Any], task).items() if key not in hidden}


def _result_or_error(function: Callable[..., Any], *args: Any) -> tuple[Any, BaseException | None]:
    # A future cannot carry every exception: StopIteration and KeyboardInterrupt would be lost.
    mark_owner()
    try:
        return function(*args), None
    except BaseException as error:  # noqa: BLE001  raised again by `_in_thread`
        return None, error


def _run_async(agent: Agent, invocation: Invocation) -> Any:
    """Run an async agent in an event loop of this thread."""

    async def run() -> Any:
        loop, task = asyncio.get_running_loop(), cast(asyncio.Task[Any], asyncio.current_task())
        invocation.cancel = lambda: loop.is_closed() or loop.call_soon_threadsafe(task.cancel)
        if invocation.cancelled:
            raise asyncio.CancelledError
        mark_owner()
        return await _await_if_needed(agent.start(invocation))

    return asyncio.run(run())


def _wants_main_thread(error: BaseException | None) -> str:
    """What an error says that a main thread would not have raised; "" for others."""
    while error is not None:
        if "main thread" in str(error) or "no current event loop in thread" in str(error):
            return f"{type(error).__name__}: {error}"
        error = error.__cause__ or error.__context__
    return ""


async def _await_if_needed(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


# -- return values ------------------------------------------------------------------------------------------


def _record_output(output: Any) -> Any:
    """Record a returned reward or returned spans, and return None for them; return any other output unchanged."""
    if _are_spans(output):
        _record_spans(output)
    elif looks_like_reward(output):
        emit_reward(check_reward(output, "the agent"))
    else:
        return output
    return None


def _are_spans(output: Any) -> bool:
    return isinstance(output, list) and bool(output) and all(isinstance(s, Span | ReadableSpan) for s in output)


def _record_spans(spans: list[Span | ReadableSpan]) -> None:
    """Record spans that an agent returned as spans of its attempt."""
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


def shorten_output(output: Any) -> Any:
    """The output as a JSON value; the beginning of its text if it exceeds OUTPUT_CHARACTERS."""
    try:
        text = dumps(output, default=repr, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        return repr(output)[:OUTPUT_CHARACTERS]
    if len(text) <= OUTPUT_CHARACTERS:
        return loads(text)
    return (output if isinstance(output, str) else text.decode())[:OUTPUT_CHARACTERS]
