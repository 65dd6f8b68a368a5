"""Requests whose results are fetched later: what runs, in which order, and the results until they are fetched.

Requests of one model run one after the other in the order of their sequence numbers, in whichever order they arrive. A
request that is sent again, because its answer was lost, is the same request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final
from uuid import uuid4

import orjson

from agentlightning.errors import AgentLightningError, ConfigError, ContextLengthError, NotFoundError

logger = logging.getLogger(__name__)

FETCHED_BYTES: Final = 64 << 20
"""Results that were fetched stay up to this size together, for a client that lost the answer."""
PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"


@dataclass(frozen=True, slots=True)
class Result:
    body: bytes
    media_type: str = JSON

    @classmethod
    def of(cls, **content: object) -> Result:
        return cls(orjson.dumps(content))

    @classmethod
    def failed(cls, error: BaseException) -> Result:
        """The record of an error, and whether it is the caller's."""
        users = isinstance(error, ConfigError | ContextLengthError | NotFoundError)
        return cls.of(error=str(error), category="user" if users else "server")


Work = Callable[[], Awaitable[Result]]


def owner_of(name: str) -> str:
    """The session of a model or a sampler, with which its name begins."""
    return name.partition(":")[0]


@dataclass(slots=True, eq=False)
class _Request:
    owner: str
    """The session it belongs to."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    result: Result | None = None
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Queue:
    """The requests of one model."""

    next: int = 0
    waiting: dict[int, tuple[_Request, Work]] = field(default_factory=dict[int, "tuple[_Request, Work]"])
    ids: dict[int, str] = field(default_factory=dict[int, str])
    task: asyncio.Task[None] | None = None


class Requests:
    """All requests of a server that have not been forgotten."""

    def __init__(self) -> None:
        self._by_id: dict[str, _Request] = {}
        self._queues: dict[str, _Queue] = {}
        self._fetched: OrderedDict[str, int] = OrderedDict()

    def start(self, owner: str, work: Work) -> str:
        """Run at once. Returns the id of the request."""
        name, request = self._new(owner)
        request.task = asyncio.create_task(_run(request, work))
        return name

    def open_queue(self, model: str, first: Work) -> str:
        """Run the request that makes a model; later ones of it begin with number 1."""
        self._queues.setdefault(model, _Queue())
        return self.enqueue(model, 0, first)

    def enqueue(self, model: str, number: int, work: Work) -> str:
        """Run when all requests of the model with smaller numbers have. Raises ConfigError for an unknown model, and
        for a number that has passed and whose result is forgotten."""
        if (queue := self._queues.get(model)) is None:
            raise ConfigError(
                f"model {model!r} is unknown here: its session has ended, or the server was started again; create a"
                " training client from a saved state"
            )
        if number in queue.ids:
            return queue.ids[number]
        if number < queue.next:
            raise ConfigError(f"request {number} of model {model} has run, and its result is no longer kept")
        name, request = self._new(owner_of(model))
        queue.ids[number] = name
        queue.waiting[number] = (request, work)
        if queue.task is None or queue.task.done():
            queue.task = asyncio.create_task(self._drain(queue))
        return name

    async def fetch(self, name: str, seconds: float) -> Result | None:
        """The result of a request; None if it is not there in so many seconds. Raises NotFoundError for an unknown
        one."""
        if (request := self._by_id.get(name)) is None:
            raise NotFoundError(f"request {name} is unknown: its session has ended, or the server was started again")
        try:
            await asyncio.wait_for(request.done.wait(), seconds)
        except TimeoutError:
            return None
        assert request.result is not None
        self._fetched[name] = len(request.result.body)
        self._fetched.move_to_end(name)
        self._forget_fetched()
        return request.result

    def cancel(self, name: str) -> None:
        """Stop a request that was started; others run on."""
        request = self._by_id.get(name)
        if request is not None and request.task is not None:
            request.task.cancel()

    def forget(self, owner: str) -> None:
        """Stop all requests of a session, and forget them."""
        for model in [each for each in self._queues if owner_of(each) == owner]:
            if (task := self._queues.pop(model).task) is not None:
                task.cancel()
        for name, request in [(n, r) for n, r in self._by_id.items() if r.owner == owner]:
            if request.task is not None:
                request.task.cancel()
            self._drop(name)

    async def close(self) -> None:
        """Stop everything."""
        tasks = [each.task for each in (*self._queues.values(), *self._by_id.values()) if each.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _new(self, owner: str) -> tuple[str, _Request]:
        name, request = uuid4().hex, _Request(owner)
        self._by_id[name] = request
        return name, request

    async def _drain(self, queue: _Queue) -> None:
        while (found := queue.waiting.pop(queue.next, None)) is not None:
            await _run(*found)
            queue.next += 1

    def _forget_fetched(self) -> None:
        while len(self._fetched) > 1 and sum(self._fetched.values()) > FETCHED_BYTES:
            self._drop(next(iter(self._fetched)))

    def _drop(self, name: str) -> None:
        self._fetched.pop(name, None)
        del self._by_id[name]
        for queue in self._queues.values():
            for number in [number for number, each in queue.ids.items() if each == name]:
                del queue.ids[number]


class FairSlots:
    """So many answers at a time, of which each owner has at most three quarters; whoever has the fewest is next."""

    def __init__(self, slots: int) -> None:
        self._free, self._most = slots, slots - slots // 4
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def slot(self, owner: str) -> AsyncGenerator[None]:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._grant()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._free += 1
                self._running[owner] -= 1
                self._grant()

    def _grant(self) -> None:
        while self._free:
            waiting = [owner for owner in self._waiting if self._running[owner] < self._most]
            if not waiting:
                return
            owner = min(waiting, key=self._running.__getitem__)
            turn = self._waiting[owner].popleft()
            if not self._waiting[owner]:
                del self._waiting[owner]
            if not turn.cancelled():
                self._free -= 1
                self._running[owner] += 1
                turn.set_result(None)


async def _run(request: _Request, work: Work) -> None:
    try:
        request.result = await work()
    except asyncio.CancelledError:
        request.result = Result.failed(ConfigError("the request was cancelled"))
        raise
    except AgentLightningError as error:
        request.result = Result.failed(error)
    except Exception as error:
        logger.exception("a request of the Tinker API failed")
        request.result = Result.failed(error)
    finally:
        request.done.set()
