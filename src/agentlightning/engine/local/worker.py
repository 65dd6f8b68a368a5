"""The single thread that does all torch work of a local policy: it samples, and runs jobs between two steps.

Callers live in event loops and each awaits a future of its own loop. A step wakes each loop once, whatever the number
of rows. An idle thread sleeps. An error fails only the callers that were waiting; this module turns failures of torch
into `PolicyError`.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from agentlightning.engine.base import OnTokens, Sample, SamplingParams
from agentlightning.engine.local.scheduler import ContinuousBatcher, Request
from agentlightning.errors import AgentLightningError, PolicyError

SWITCH_SECONDS = 2e-4
"""How often this process switches between threads, or more often if it does already. torch releases the interpreter
lock at every operation. With Python's default of 5 ms its thread waits long to get the lock back from a busy event
loop: sampling beside one then takes 1.6 times as long."""
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Waiter:
    """A caller waiting for a sample or a job. Its methods are called in its event loop."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    on_tokens: OnTokens | None = None
    request: Request | None = None

    def receive(self, tokens: tuple[int, ...], *logprobs: Any) -> None:
        """Pass on new tokens; an error of the caller's own function is the caller's."""
        if self.on_tokens is not None and not self.future.done():
            try:
                self.on_tokens(tokens, *logprobs)
            except Exception as error:  # noqa: BLE001  The boundary: the other callers get their tokens.
                self.future.set_exception(error)

    def settle(self, result: Any, error: Exception | None) -> None:
        """Answer with a result, or with an error."""
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(as_policy_error(error))


Event = tuple[Waiter, Callable[[], None]]
"""A waiter, and what is to be called in its event loop."""


class EngineWorker:
    """Owns `batcher`: nobody else calls it, except for `validate`, which only reads."""

    def __init__(self, batcher: ContinuousBatcher, threads: int = 1) -> None:
        self._batcher = batcher
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiters: dict[Request, Waiter] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._main, args=(threads,), name="policy-engine", daemon=True)
        self._thread.start()

    # -- for callers, in their event loops -------------------------------------------------------------------------

    async def sample(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        on_tokens: OnTokens | None = None,
        adapter: str | None = None,
    ) -> Sample:
        """The answer. Raises as `ContinuousBatcher.validate` does; PolicyError if sampling failed."""
        self._batcher.validate(prompt, params)
        waiter = self._new_waiter(on_tokens)
        self._inbox.put(partial(self._submit, waiter, prompt, params, adapter))
        try:
            request: Request = await waiter.future
        except BaseException:  # Of its own too: of `on_tokens`, or because it was cancelled.
            self._inbox.put(partial(self._cancel, waiter))
            raise
        return request.to_sample()

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job` in the thread, between two steps. Raises PolicyError in place of foreign exceptions of `job`."""
        waiter = self._new_waiter()
        self._inbox.put(partial(self._run, waiter, job))
        return await waiter.future

    async def close(self) -> None:
        """Fail the waiters and end the thread. Idempotent."""
        if not self._closed:
            self._closed = True
            self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def _new_waiter(self, on_tokens: OnTokens | None = None) -> Waiter:
        if self._closed:
            raise PolicyError("the policy is closed; open it again with LocalPolicy.open")
        loop = asyncio.get_running_loop()
        return Waiter(loop, loop.create_future(), on_tokens)

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _main(self, threads: int) -> None:
        if sys.getswitchinterval() > SWITCH_SECONDS:
            sys.setswitchinterval(SWITCH_SECONDS)
        torch.set_num_threads(threads)  # The setting is per thread.
        while True:
            try:
                command = self._inbox.get(block=self._batcher.idle)
            except queue.Empty:
                command = self._step
            if command is None:
                break
            self._execute(command)
        while not self._inbox.empty():  # Calls that raced with `close`.
            if (command := self._inbox.get()) is not None:
                self._execute(command)
        self._fail_all(PolicyError("the policy was closed while this answer was sampled"))

    def _execute(self, command: Callable[[], None]) -> None:
        """Drop all requests where it fails, since the content of the slots is unknown then."""
        try:
            command()
        except Exception as error:  # noqa: BLE001  The boundary: without this thread all callers would wait forever.
            self._batcher.abort()
            self._fail_all(error)

    def _submit(self, waiter: Waiter, prompt: Sequence[int], params: SamplingParams, adapter: str | None) -> None:
        if waiter.future.cancelled():
            return
        try:
            waiter.request = self._batcher.submit(prompt, params, adapter)
        except Exception as error:  # noqa: BLE001  The boundary: the error belongs to the caller.
            return self._notify([(waiter, partial(waiter.settle, None, error))])
        self._waiters[waiter.request] = waiter

    def _cancel(self, waiter: Waiter) -> None:
        if waiter.request is not None and self._waiters.pop(waiter.request, None) is not None:
            self._batcher.cancel(waiter.request)

    def _run(self, waiter: Waiter, job: Callable[[], Any]) -> None:
        try:
            tell = partial(waiter.settle, job(), None)
        except Exception as error:  # noqa: BLE001  The boundary: the error belongs to the caller.
            tell = partial(waiter.settle, None, error)
        self._notify([(waiter, tell)])

    def _step(self) -> None:
        self._notify([event for request in self._batcher.step() for event in self._events(request)])

    def _events(self, request: Request) -> Generator[Event]:
        waiter = self._waiters[request]
        if request.error is None and waiter.on_tokens is not None:
            logprobs = ((request.logprobs[-1],), request.top_logprobs[-1:]) if request.params.stream_logprobs else ()
            yield waiter, partial(waiter.receive, (request.tokens[-1],), *logprobs)
        if request.done:
            del self._waiters[request]
            yield waiter, partial(waiter.settle, request, request.error)

    def _fail_all(self, error: Exception) -> None:
        waiters = list(self._waiters.values())
        self._waiters.clear()
        self._notify([(waiter, partial(waiter.settle, None, error)) for waiter in waiters])

    def _notify(self, events: Sequence[Event]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[Event]] = {}
        for event in events:
            by_loop.setdefault(event[0].loop, []).append(event)
        for loop, items in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, items)
            except RuntimeError:  # The loop is closed, so nobody waits there any more.
                for waiter, _ in items:
                    self._cancel(waiter)


def _deliver(events: Sequence[Event]) -> None:
    for _, tell in events:
        tell()


def as_policy_error(error: Exception) -> AgentLightningError:
    """`error` itself if it is one of ours, else a PolicyError that names it and has it as its cause."""
    if isinstance(error, PolicyError):
        # One per caller: an exception accumulates the tracebacks of its raisers.
        copy = error.__class__.__new__(error.__class__, *error.args)
        vars(copy).update(vars(error))
        copy.__cause__ = error.__cause__
        return copy
    if isinstance(error, AgentLightningError):
        return error
    # The CPU has no exception type of its own for it.
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
        text = f"out of memory ({error}); lower max_batch_size, kv_cache_bytes or prefix_cache_bytes, or token_budget"
    else:
        text = f"the policy engine failed with {type(error).__name__}: {error}"
    wrapped = PolicyError(text)
    wrapped.__cause__ = error
    return wrapped
