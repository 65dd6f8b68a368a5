"""The one thread that does all torch work of a local policy: it samples, and between steps it runs jobs.

Callers live in event loops; each awaits a future of its own loop. A loop is woken once for each step, whatever the
number of rows. An idle thread sleeps. An error fails those who were waiting, and only them: this module is where a
failure of torch becomes a `PolicyError`.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from agentlightning.engine.base import SamplingParams
from agentlightning.engine.local.scheduler import Request, TokenGenerator
from agentlightning.engine.local.switch_interval import SWITCH_INTERVAL
from agentlightning.errors import AgentLightningError, PolicyError

T = TypeVar("T")
OnTokens = Callable[..., None]
"""See `Engine.sample` and `SamplingParams.tells_logprobs`."""


@dataclass(slots=True, eq=False)
class Call:
    """Someone waiting."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    on_tokens: OnTokens | None = None
    request: Request | None = None


@dataclass(frozen=True, slots=True)
class News:
    """What a call is told: new tokens, and at the end a result or an error."""

    call: Call
    tokens: tuple[int, ...] = ()
    values: tuple[Any, ...] = ()
    """Their log-probabilities and the likeliest tokens, where they are to be told."""
    result: Any = None
    error: BaseException | None = None
    final: bool = False


class EngineThread:
    """Owns `generator`: nobody else calls it, but for `check`, which only reads."""

    def __init__(self, generator: TokenGenerator, threads: int = 1) -> None:
        self._generator = generator
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._calls: dict[Request, Call] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._work, args=(threads,), name="policy-engine", daemon=True)
        self._thread.start()

    # -- for callers, in their event loops -------------------------------------------------------------------------

    async def sample(self, prompt: Sequence[int], params: SamplingParams, on_tokens: OnTokens | None = None) -> Request:
        """The finished request. Raises what `TokenGenerator.check` raises; PolicyError where sampling failed."""
        self._generator.check(prompt, params)
        call = self._call(on_tokens)
        self._inbox.put(partial(self._submit, call, prompt, params))
        try:
            return await call.future
        except asyncio.CancelledError:
            self._inbox.put(partial(self._cancel, call))
            raise

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job` in the thread, between steps. Raises PolicyError for whatever it raises that is not ours."""
        call = self._call()
        self._inbox.put(partial(self._run, call, job))
        return await call.future

    async def close(self) -> None:
        """Fail those who wait, end the thread. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def _call(self, on_tokens: OnTokens | None = None) -> Call:
        if self._closed:
            raise PolicyError("the policy is closed; open it again with LocalPolicy.open")
        loop = asyncio.get_running_loop()
        return Call(loop, loop.create_future(), on_tokens)

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _work(self, threads: int) -> None:
        with SWITCH_INTERVAL.short():
            self._main(threads)

    def _main(self, threads: int) -> None:
        torch.set_num_threads(threads)  # The setting is each thread's own.
        while True:
            try:
                command = self._inbox.get(block=self._generator.idle)
            except queue.Empty:
                self._step()
                continue
            if command is None:
                break
            self._obey(command)
        while not self._inbox.empty():  # Whoever called while the door was closing.
            command = self._inbox.get()
            if command is not None:
                self._obey(command)
        self._fail(PolicyError("the policy was closed while this answer was drawn"))

    def _obey(self, command: Callable[[], None]) -> None:
        try:
            command()
        except Exception as error:  # noqa: BLE001  The boundary: without this thread everybody would wait for ever.
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Nobody knows what the slots hold."""
        self._generator.abort()
        self._fail(error)

    def _submit(self, call: Call, prompt: Sequence[int], params: SamplingParams) -> None:
        if call.future.cancelled():
            return
        try:
            call.request = self._generator.submit(prompt, params)
        except Exception as error:  # noqa: BLE001  The boundary: the error belongs to whoever asked.
            return self._tell([News(call, error=as_policy_error(error), final=True)])
        self._calls[call.request] = call

    def _cancel(self, call: Call) -> None:
        if call.request is not None and self._calls.pop(call.request, None) is not None:
            self._generator.cancel(call.request)

    def _run(self, call: Call, job: Callable[[], Any]) -> None:
        try:
            news = News(call, result=job(), final=True)
        except Exception as error:  # noqa: BLE001  The boundary: the error belongs to whoever asked for the job.
            news = News(call, error=as_policy_error(error), final=True)
        self._tell([news])

    def _step(self) -> None:
        try:
            drawn = self._generator.step()
        except Exception as error:  # noqa: BLE001  The boundary: the error belongs to those who wait for tokens.
            return self._give_up(error)
        self._tell([news for request in drawn if (news := self._news(request)) is not None])

    def _news(self, request: Request) -> News | None:
        call = self._calls[request]
        done = request.finish_reason is not None
        if done:
            del self._calls[request]
        if not done and call.on_tokens is None:
            return None
        values = ((request.logprobs[-1],), request.top_logprobs[-1:]) if request.params.stream_logprobs else ()
        return News(call, (request.tokens[-1],), values, result=request if done else None, final=done)

    def _fail(self, error: Exception) -> None:
        calls = list(self._calls.values())
        self._calls.clear()
        self._tell([News(call, error=as_policy_error(error), final=True) for call in calls])

    def _tell(self, news: Sequence[News]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[News]] = {}
        for item in news:
            by_loop.setdefault(item.call.loop, []).append(item)
        for loop, items in by_loop.items():
            try:
                loop.call_soon_threadsafe(self._deliver, items)
            except RuntimeError:  # The loop is closed: nobody waits there any more.
                for item in items:
                    self._cancel(item.call)

    # -- in the caller's event loop --------------------------------------------------------------------------------

    def _deliver(self, items: Sequence[News]) -> None:
        for item in items:
            call = item.call
            if call.future.done():
                continue
            if call.on_tokens is not None and item.tokens:
                try:
                    call.on_tokens(item.tokens, *item.values)
                except Exception as error:  # noqa: BLE001  The caller's own function failed: the caller is told.
                    call.future.set_exception(error)
                    self._inbox.put(partial(self._cancel, call))
                    continue
            if item.error is not None:
                call.future.set_exception(item.error)
            elif item.final:
                call.future.set_result(item.result)


def as_policy_error(error: Exception) -> AgentLightningError:
    """`error` itself where it is one of ours, else a PolicyError that names it and has it as its cause."""
    if isinstance(error, PolicyError):
        mine = type(error)(*error.args)  # One for each caller: an exception collects the tracebacks of who raises it.
        mine.__cause__ = error.__cause__
        return mine
    if isinstance(error, AgentLightningError):
        return error
    if out_of_memory(error):
        text = f"out of memory ({error}); lower max_batch_size, kv_cache_bytes or prefix_cache_bytes, or token_budget"
    else:
        text = f"the policy engine failed with {type(error).__name__}: {error}"
    wrapped = PolicyError(text)
    wrapped.__cause__ = error
    return wrapped


def out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, on an accelerator or on the CPU (which has no type of its own)."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
