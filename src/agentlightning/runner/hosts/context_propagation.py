"""In one process with many attempts: pools carry the context of a call, and queues remember who has put an item.

`install()` patches the standard library, and joblib and anyio where the agent uses them:

- `threading.Thread` inherits the context it is started in, and `ThreadPoolExecutor`, `multiprocessing.pool` (its
  `ThreadPool` too) and joblib's threads make each call in the context it was submitted in, callbacks included;
- `ProcessPoolExecutor`, `multiprocessing.Pool` and joblib's processes make each call in the attempt it was
  submitted in, with its environment variables; what is emitted there is posted to the server;
- `queue.Queue`, `queue.SimpleQueue`, `asyncio.Queue` and anyio's memory streams remember which attempt has put an item.
  Whoever inherited the scope of one attempt and takes an item of another is in no scope from then on: what it does is
  not recorded under the attempt that happened to start it. A last-in-first-out queue is not followed, since such are
  used to keep connections and clients.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import multiprocessing.pool
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, Final

from agentlightning.rollouts import trace_id_of
from agentlightning.runner import attempt_environ
from agentlightning.span import new_trace_id
from agentlightning.tracing import client_headers
from agentlightning.tracing.process_scope import PostingSink
from agentlightning.tracing.scope import (
    Scope,
    current_agent,
    current_scope,
    entered,
    foreign_work,
    inherited_scope,
    origin_of_work,
    take_work,
    track_agent,
)

_ORIGINS: Final = "_agentlightning_origins"
"""Attribute of a queue: id of an item -> the attempts that have put it, in order."""


def install() -> None:
    """Patch this process. Harmless when repeated."""
    if queue.SimpleQueue is _SimpleQueue:
        return
    _wrap(threading.Thread, "start", _start_thread)
    _wrap(ThreadPoolExecutor, "submit", _submit_to_threads)
    _wrap(ProcessPoolExecutor, "submit", _submit_to_processes)
    for method in ("apply_async", "_map_async", "imap", "imap_unordered"):
        _wrap(multiprocessing.pool.Pool, method, _submit_to_pool)
    _wrap(queue.Queue, "put", _put)
    _wrap(queue.Queue, "get", _get)
    queue.SimpleQueue = _SimpleQueue  # pyright: ignore[reportAttributeAccessIssue]
    _wrap(asyncio.Queue, "put_nowait", _put)
    _wrap(asyncio.Queue, "get_nowait", _get)
    client_headers.when_imported("anyio.streams.memory", _patch_anyio)
    _wrap(Future, "add_done_callback", _add_callback)
    client_headers.when_imported("joblib.parallel", _patch_joblib)
    client_headers.when_imported("joblib.externals.loky.process_executor", _patch_loky)
    client_headers.when_imported("loky.process_executor", _patch_loky)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(self, original, *args, **kwargs)

    setattr(owner, name, method)


# -- threads -----------------------------------------------------------------------------------------------------------


def _start_thread(thread: threading.Thread, original: Callable[..., None]) -> None:
    run, context = thread.run, copy_context()
    thread.run = lambda: context.run(run)
    original(thread)


def _submit_to_threads(
    pool: ThreadPoolExecutor, original: Callable[..., Any], function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    return original(pool, InThread(function), *args, **kwargs)


def _add_callback(future: Future[Any], original: Callable[..., None], callback: Callable[..., Any]) -> None:
    original(future, InThread(callback))


class InThread:
    """A function that runs in the context in which this was made, in whatever thread. May run many times at once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._context = copy_context()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = self._context.run(copy_context)
        try:
            return context.run(self._function, *args, **kwargs)
        finally:
            self._note_foreign_work(context)

    def _note_foreign_work(self, context: Context) -> None:
        """It may have returned what it took from a queue: whoever called it then has that work."""
        if context.run(foreign_work) is not None and self._context.run(foreign_work) is None:
            _mix(self._context.run(inherited_scope))


def _mix(scope: Scope | None) -> None:
    if scope is not None:
        scope.lifetime.mix()


# -- processes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Carried:
    """An attempt, as it travels to another process with a call."""

    rollout_id: str
    attempt_id: str
    address: str
    key: str
    agent: str | None
    variables: Mapping[str, str]

    @classmethod
    def of_here(cls) -> Carried | None:
        """None outside of any attempt."""
        scope = current_scope()
        if scope is None or not scope.key:
            return None
        variables = attempt_environ.current_variables()
        return cls(scope.rollout_id, scope.attempt_id, scope.address, scope.key, current_agent(), variables)

    def scope(self) -> Scope:
        trace_id = trace_id_of(self.attempt_id) or new_trace_id()
        sink = _posting_sink(self.address, self.key)
        return Scope(self.rollout_id, self.attempt_id, sink, trace_id=trace_id, address=self.address, key=self.key)


@functools.lru_cache(maxsize=64)
def _posting_sink(address: str, key: str) -> PostingSink:
    return PostingSink(address, key)


class InProcess:
    """A function that runs in the attempt in which this was made, in whatever process; in none, if it was made in
    none."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.carried = Carried.of_here()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Context().run(self._run, *args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.carried is None:
            return self.function(*args, **kwargs)
        _prepare_process()
        with ExitStack() as stack:
            stack.enter_context(entered(self.carried.scope()))
            stack.enter_context(attempt_environ.overlay(self.carried.variables))
            if self.carried.agent is not None:
                stack.enter_context(track_agent(self.carried.agent))
            return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_process, (self.function, self.carried)


def _in_process(function: Callable[..., Any], carried: Carried | None) -> InProcess:
    found = InProcess.__new__(InProcess)
    found.function, found.carried = function, carried
    return found


@functools.cache
def _prepare_process() -> None:
    """One that was not forked from a host is prepared as a host is."""
    client_headers.install()
    attempt_environ.install()
    install()


def _submit_to_processes(
    pool: Executor, original: Callable[..., Any], function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    return original(pool, InProcess(function), *args, **kwargs)


def _submit_to_pool(
    pool: multiprocessing.pool.Pool,
    original: Callable[..., Any],
    func: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    given = inspect.signature(original).bind(pool, func, *args, **kwargs).arguments
    given["func"] = InThread(func) if isinstance(pool, multiprocessing.pool.ThreadPool) else InProcess(func)
    for name in ("callback", "error_callback"):  # called in a thread of the pool's own
        if given.get(name) is not None:
            given[name] = InThread(given[name])
    return original(**given)


def _patch_joblib(module: Any) -> None:
    """It submits what is left from a thread of its pool's, when something is done."""
    call, dispatch_next = module.Parallel.__call__, module.Parallel.dispatch_next

    @functools.wraps(call)
    def called(parallel: Any, iterable: Any) -> Any:
        parallel._agentlightning_dispatch = InThread(functools.partial(dispatch_next, parallel))
        return call(parallel, iterable)

    @functools.wraps(dispatch_next)
    def dispatched(parallel: Any) -> Any:
        return parallel._agentlightning_dispatch()

    module.Parallel.__call__, module.Parallel.dispatch_next = called, dispatched


def _patch_loky(module: Any) -> None:
    _wrap(module.ProcessPoolExecutor, "submit", _submit_to_processes)


# -- queues ------------------------------------------------------------------------------------------------------------


def _put(target: Any, original: Callable[..., None], item: Any, *args: Any, **kwargs: Any) -> None:
    taken_back = _remember(target, item)
    try:
        original(target, item, *args, **kwargs)
    except BaseException:
        taken_back()
        raise


def _get(target: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    item = original(target, *args, **kwargs)
    _recall(target, item)
    return item


def _remember(target: Any, item: Any) -> Callable[[], object]:
    """Keep with a queue who puts the item; what is returned undoes it."""
    origin = None if isinstance(target, queue.LifoQueue | asyncio.LifoQueue) else origin_of_work()
    if origin is None:
        return _nothing
    origins: dict[int, deque[Scope]] = target.__dict__.setdefault(_ORIGINS, {})
    putters = origins.setdefault(id(item), deque())
    putters.append(origin)
    return putters.pop


def _nothing() -> None:
    return


def _recall(target: Any, item: Any) -> None:
    origins: dict[int, deque[Scope]] | None = target.__dict__.get(_ORIGINS)
    if not origins or not (putters := origins.get(id(item))):
        return
    origin = putters.popleft()
    if not putters:
        origins.pop(id(item), None)
    if take_work(origin):
        _look_whether_it_is_handed_on()


def _look_whether_it_is_handed_on() -> None:
    """A task that ends as soon as it has taken something, as that of `wait_for(queue.get(), ...)` does, has taken it
    for somebody else."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return
    if task is not None:
        task.get_loop().call_soon(_look, task, inherited_scope())


def _look(task: asyncio.Task[Any], scope: Scope | None) -> None:
    if task.done():
        _mix(scope)


class _SimpleQueue(queue.SimpleQueue[Any]):
    """`queue.SimpleQueue`, which cannot be patched, with the same memory."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        _remember(self, item)
        super().put(item, block, timeout)

    def put_nowait(self, item: Any) -> None:
        self.put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        item = super().get(block, timeout)
        _recall(self, item)
        return item

    def get_nowait(self) -> Any:
        return self.get(False)


_streaming: ContextVar[bool] = ContextVar("agentlightning_streaming", default=False)
"""Inside `send` and `receive`, which use their counterparts that do not wait."""


def _patch_anyio(module: Any) -> None:
    """Here an item may go from a sender to a receiver that waits, without ever being in the stream: both ends are
    followed where their user sees them, and the state they share has the memory."""
    sender, receiver = module.MemoryObjectSendStream, module.MemoryObjectReceiveStream
    send, send_nowait = sender.send, sender.send_nowait
    receive, receive_nowait = receiver.receive, receiver.receive_nowait

    @functools.wraps(send_nowait)
    def sent_nowait(stream: Any, item: Any) -> Any:
        if _streaming.get():
            return send_nowait(stream, item)
        taken_back = _remember(stream._state, item)
        try:
            return send_nowait(stream, item)
        except BaseException:
            taken_back()
            raise

    @functools.wraps(send)
    async def sent(stream: Any, item: Any) -> None:
        taken_back = _remember(stream._state, item)
        try:
            await _inside(send, stream, item)
        except BaseException:
            taken_back()
            raise

    @functools.wraps(receive_nowait)
    def received_nowait(stream: Any) -> Any:
        item = receive_nowait(stream)
        if not _streaming.get():
            _recall(stream._state, item)
        return item

    @functools.wraps(receive)
    async def received(stream: Any) -> Any:
        item = await _inside(receive, stream)
        _recall(stream._state, item)
        return item

    sender.send, sender.send_nowait = sent, sent_nowait
    receiver.receive, receiver.receive_nowait = received, received_nowait


async def _inside(function: Callable[..., Any], *args: Any) -> Any:
    token = _streaming.set(True)
    try:
        return await function(*args)
    finally:
        _streaming.reset(token)
