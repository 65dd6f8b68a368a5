"""Propagates the attempt's context through pools and queues, in a process that runs many attempts at once.

`install()` patches the standard library, and joblib and anyio where the agent uses them:

- `threading.Thread` inherits the context it is started in, and `ThreadPoolExecutor`, `multiprocessing.pool` (its
  `ThreadPool` too) and joblib's threads make each call in the context it was submitted in, callbacks included;
- `ProcessPoolExecutor`, `multiprocessing.Pool` and joblib's processes make each call in the attempt it was
  submitted in, with its environment variables; what is emitted there is posted to the server;
- `queue.Queue`, `queue.SimpleQueue`, `asyncio.Queue` and anyio's memory streams record which attempt put each item.
  A worker that inherited the scope of one attempt and takes an item of another leaves its scope, so that its work is
  not recorded under the attempt that happened to start it. A task that takes an answer to its own request from a queue
  that it made itself keeps its scope. Last-in-first-out queues are not tracked: they usually hold pooled connections
  and clients;
- Python 3.11's `asyncio.wait_for` waits in a task of its own: an item that this took counts as taken by its caller.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import multiprocessing.pool
import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, Final

from agentlightning.attempt_address import trace_id_of
from agentlightning.runner import attempt_environ
from agentlightning.span import new_trace_id
from agentlightning.tracing import client_headers
from agentlightning.tracing.emit import track_agent
from agentlightning.tracing.posting_sink import PostingSink
from agentlightning.tracing.scope import (
    Origin,
    Scope,
    continue_work,
    current_agent,
    current_location,
    current_scope,
    current_work,
    enter_scope,
    foreign_work,
    inherited_scope,
    origin_of_work,
    take_work,
)

_ORIGINS: Final = "_agentlightning_origins"
"""Attribute of a queue: id of an item -> who has put it, in order."""
_MAKER: Final = "_agentlightning_maker"
"""Attribute of a queue: the thread and a reference to the task that made it."""


def install() -> None:
    """Patch this process. Idempotent."""
    if queue.SimpleQueue is _SimpleQueue:
        return
    _wrap(threading.Thread, "start", _start_thread)
    _wrap(ThreadPoolExecutor, "submit", _submit_to_threads)
    _wrap(ProcessPoolExecutor, "submit", _submit_to_processes)
    for method in ("apply_async", "_map_async", "imap", "imap_unordered"):
        _wrap(multiprocessing.pool.Pool, method, _submit_to_pool)
    _wrap(queue.Queue, "__init__", _make)
    _wrap(asyncio.Queue, "__init__", _make)
    _wrap(queue.Queue, "put", _put)
    _wrap(queue.Queue, "get", _get)
    queue.SimpleQueue = _SimpleQueue  # pyright: ignore[reportAttributeAccessIssue]
    _wrap(asyncio.Queue, "put_nowait", _put)
    _wrap(asyncio.Queue, "get_nowait", _get)
    client_headers.when_imported("anyio.streams.memory", _patch_anyio)
    _wrap(Future, "add_done_callback", _add_callback)
    if sys.version_info < (3, 12):
        asyncio.wait_for = asyncio.tasks.wait_for = _wait_for(asyncio.wait_for)
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
    return original(pool, InCallerContext(function), *args, **kwargs)


def _add_callback(future: Future[Any], original: Callable[..., None], callback: Callable[..., Any]) -> None:
    original(future, InCallerContext(callback))


class InCallerContext:
    """A function that runs in the context of its creator, in any thread. May run concurrently."""

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
        """If the function took another attempt's item from a queue, its caller now works for that attempt."""
        if context.run(foreign_work) is not None and self._context.run(foreign_work) is None:
            _mark_mixed(self._context.run(inherited_scope))


def _mark_mixed(scope: Scope | None) -> None:
    if scope is not None:
        scope.lifetime.mark_ambiguous()


# -- processes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PropagatedAttempt:
    """What another process needs to run a call in this attempt."""

    rollout_id: str
    attempt_id: str
    address: str
    key: str
    agent: str | None
    variables: Mapping[str, str]

    @classmethod
    def current(cls) -> PropagatedAttempt | None:
        """The current attempt; None outside of any."""
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


class InCallerAttempt:
    """A function that runs in the attempt of its creator, in any process; in none if it was created in none."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.propagated = PropagatedAttempt.current()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Context().run(self._run, *args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.propagated is None:
            return self.function(*args, **kwargs)
        _prepare_process()
        with ExitStack() as stack:
            stack.enter_context(enter_scope(self.propagated.scope()))
            stack.enter_context(attempt_environ.overlay(self.propagated.variables))
            if self.propagated.agent is not None:
                stack.enter_context(track_agent(self.propagated.agent))
            return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_process, (self.function, self.propagated)


def _in_process(function: Callable[..., Any], propagated: PropagatedAttempt | None) -> InCallerAttempt:
    found = InCallerAttempt.__new__(InCallerAttempt)
    found.function, found.propagated = function, propagated
    return found


@functools.cache
def _prepare_process() -> None:
    """Prepare a process that was not forked from a host."""
    client_headers.install()
    attempt_environ.install()
    install()


def _submit_to_processes(
    pool: Executor, original: Callable[..., Any], function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    return original(pool, InCallerAttempt(function), *args, **kwargs)


def _submit_to_pool(
    pool: multiprocessing.pool.Pool,
    original: Callable[..., Any],
    func: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    given = inspect.signature(original).bind(pool, func, *args, **kwargs).arguments
    given["func"] = (
        InCallerContext(func) if isinstance(pool, multiprocessing.pool.ThreadPool) else InCallerAttempt(func)
    )
    for name in ("callback", "error_callback"):  # called in a thread of the pool
        if given.get(name) is not None:
            given[name] = InCallerContext(given[name])
    return original(**given)


def _patch_loky(module: Any) -> None:
    _wrap(module.ProcessPoolExecutor, "submit", _submit_to_processes)


# -- queues ------------------------------------------------------------------------------------------------------------


def _make(target: Any, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    original(target, *args, **kwargs)
    _record_maker(target)


def _make_stream(stream: Any, original: Callable[..., None]) -> None:
    original(stream)
    _record_maker(stream._state)


def _record_maker(target: Any) -> None:
    thread, task = current_location()
    target.__dict__.setdefault(_MAKER, (thread, None if task is None else weakref.ref(task)))


def _is_own(target: Any) -> bool:
    """Whether the current task, or the current thread outside of tasks, has made the queue."""
    if (maker := target.__dict__.get(_MAKER)) is None:
        return False
    thread, task = maker
    return (thread, None if task is None else task()) == current_location()


def _put(target: Any, original: Callable[..., None], item: Any, *args: Any, **kwargs: Any) -> None:
    undo = _record_origin(target, item)
    try:
        original(target, item, *args, **kwargs)
    except BaseException:
        undo()
        raise


def _get(target: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    item = original(target, *args, **kwargs)
    _restore_origin(target, item)
    return item


def _record_origin(target: Any, item: Any) -> Callable[[], object]:
    """Record who puts the item; the returned function undoes it."""
    origin = None if isinstance(target, queue.LifoQueue | asyncio.LifoQueue) else origin_of_work()
    if origin is None:
        return _nothing
    origins: dict[int, deque[Origin]] = target.__dict__.setdefault(_ORIGINS, {})
    origins_of_item = origins.setdefault(id(item), deque())
    origins_of_item.append(origin)
    return origins_of_item.pop


def _nothing() -> None:
    return


def _restore_origin(target: Any, item: Any) -> None:
    origins: dict[int, deque[Origin]] | None = target.__dict__.get(_ORIGINS)
    if not origins or not (origins_of_item := origins.get(id(item))):
        return
    origin = origins_of_item.popleft()
    if not origins_of_item:
        origins.pop(id(item), None)
    if take_work(origin, _is_own(target)) and not _reports_work.get():
        _watch_for_handover()


def _watch_for_handover() -> None:
    """A task that ends right after taking an item, as in `create_task(queue.get())`, took it for its caller."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return
    if task is not None:
        task.get_loop().call_soon(_check_handover, task, inherited_scope())


def _check_handover(task: asyncio.Task[Any], scope: Scope | None) -> None:
    if task.done():
        _mark_mixed(scope)


_reports_work: ContextVar[bool] = ContextVar("agentlightning_reports_work", default=False)
"""True in a task whose work its caller continues."""


def _wait_for(original: Callable[..., Any]) -> Callable[..., Any]:
    """`asyncio.wait_for` whose caller continues the work of the task that it waits in."""

    @functools.wraps(original)
    async def wait_for(fut: Awaitable[Any], timeout: float | None) -> Any:
        if inherited_scope() is None or not inspect.iscoroutine(fut):
            return await original(fut, timeout)
        work: list[Scope | None] = []

        async def run() -> Any:
            token = _reports_work.set(True)
            try:
                return await fut
            finally:
                work.append(current_work())
                _reports_work.reset(token)

        try:
            return await original(run(), timeout)
        finally:
            if not work:
                fut.close()  # it was cancelled before its first step
            continue_work(work[0] if work else None)

    return wait_for


class _SimpleQueue(queue.SimpleQueue[Any]):
    """Replaces `queue.SimpleQueue`, which cannot be patched, and records makers and origins too."""

    def __init__(self) -> None:
        _record_maker(self)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        _record_origin(self, item)
        super().put(item, block, timeout)

    def put_nowait(self, item: Any) -> None:
        self.put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        item = super().get(block, timeout)
        _restore_origin(self, item)
        return item

    def get_nowait(self) -> Any:
        return self.get(False)


_streaming: ContextVar[bool] = ContextVar("agentlightning_streaming", default=False)
"""True inside `send` and `receive`, which call their `nowait` counterparts."""


def _patch_anyio(module: Any) -> None:
    """An item may go straight from a sender to a waiting receiver, so both ends are wrapped at their public methods and
    the origins are stored on the state they share."""
    sender, receiver = module.MemoryObjectSendStream, module.MemoryObjectReceiveStream
    _wrap(receiver, "__post_init__", _make_stream)
    send, send_nowait = sender.send, sender.send_nowait
    receive, receive_nowait = receiver.receive, receiver.receive_nowait

    @functools.wraps(send_nowait)
    def sent_nowait(stream: Any, item: Any) -> Any:
        if _streaming.get():
            return send_nowait(stream, item)
        undo = _record_origin(stream._state, item)
        try:
            return send_nowait(stream, item)
        except BaseException:
            undo()
            raise

    @functools.wraps(send)
    async def sent(stream: Any, item: Any) -> None:
        undo = _record_origin(stream._state, item)
        try:
            await _inside(send, stream, item)
        except BaseException:
            undo()
            raise

    @functools.wraps(receive_nowait)
    def received_nowait(stream: Any) -> Any:
        item = receive_nowait(stream)
        if not _streaming.get():
            _restore_origin(stream._state, item)
        return item

    @functools.wraps(receive)
    async def received(stream: Any) -> Any:
        item = await _inside(receive, stream)
        _restore_origin(stream._state, item)
        return item

    sender.send, sender.send_nowait = sent, sent_nowait
    receiver.receive, receiver.receive_nowait = received, received_nowait


async def _inside(function: Callable[..., Any], *args: Any) -> Any:
    token = _streaming.set(True)
    try:
        return await function(*args)
    finally:
        _streaming.reset(token)
