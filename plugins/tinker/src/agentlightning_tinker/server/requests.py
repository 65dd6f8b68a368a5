"""Requests whose results are fetched later: what runs, in which order, and the results until they are fetched.

Requests of one model run one after the other in the order of their sequence numbers, in whichever order they arrive. A
request that is sent again, because its answer was lost, is the same request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

import orjson

from agentlightning.errors import AgentLightningError, ConfigError, ContextLengthError, NotFoundError

logger = logging.getLogger(__name__)

FETCHED_BYTES: Final = 64 << 20
"""Results that were fetched stay up to this size together, for a client that lost the answer."""
UNKNOWN_MODEL: Final = (
    "model {!r} is unknown here: its session has ended, or the server was started again; create a training client from"
    " a saved state"
)
PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"


@dataclass(frozen=True, slots=True)
class Result:
    body: bytes
    media_type: str = JSON

    @classmethod
    def failed(cls, error: BaseException) -> Result:
        """The record of an error, and whether it is the caller's."""
        users = isinstance(error, ConfigError | ContextLengthError | NotFoundError)
        return cls(orjson.dumps({"error": str(error), "category": "user" if users else "server"}))


CANCELLED: Final = Result.failed(ConfigError("the request was cancelled"))
Work = Callable[[], Awaitable[Mapping[str, Any] | Result]]


def owner_of(name: str) -> str:
    """The session of a model or a sampler, with which its name begins."""
    return name.partition(":")[0]


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    owner: str
    """The session it belongs to."""
    place: tuple[str, int] | None
    """Its model, and its number among the requests of that; None: it has no turn."""
    task: asyncio.Task[Result]


@dataclass(slots=True)
class _Turns:
    """Of the requests of one model."""

    passed: int = -1
    """The number of the last one that has run."""
    ended: defaultdict[int, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    """By number: set when that has run, and the next one may."""


class Requests:
    """All requests of a server that have not been forgotten."""

    def __init__(self) -> None:
        self._by_id: dict[str, _Request] = {}
        self._ids: dict[tuple[str, int], str] = {}
        self._turns: dict[str, _Turns] = {}
        """By model."""
        self._fetched: OrderedDict[str, int] = OrderedDict()

    def start(self, owner: str, work: Work) -> str:
        """Run at once. Returns the id of the request."""
        return self._start(owner, None, work)

    def open_queue(self, model: str, first: Work) -> str:
        """Run the request that makes a model; later ones of it begin with number 1."""
        self._turns.setdefault(model, _Turns())
        return self.enqueue(model, 0, first)

    def enqueue(self, model: str, number: int, work: Work) -> str:
        """Run when all requests of the model with smaller numbers have. Raises ConfigError for an unknown model, and
        for a number that has passed and whose result is forgotten."""
        if (turns := self._turns.get(model)) is None:
            raise ConfigError(UNKNOWN_MODEL.format(model))
        if (known := self._ids.get((model, number))) is not None:
            return known
        if number <= turns.passed:
            raise ConfigError(f"request {number} of model {model} has run, and its result is no longer kept")

        async def in_turn() -> Mapping[str, Any] | Result:
            if number:
                await turns.ended[number - 1].wait()
            try:
                return await work()
            finally:
                turns.passed = number
                turns.ended.pop(number - 1, None)
                turns.ended[number].set()

        name = self._ids[model, number] = self._start(owner_of(model), (model, number), in_turn)
        return name

    async def fetch(self, name: str, seconds: float) -> Result | None:
        """The result of a request; None if it is not there in so many seconds. Raises NotFoundError for an unknown
        one."""
        if (request := self._by_id.get(name)) is None:
            raise NotFoundError(f"request {name} is unknown: its session has ended, or the server was started again")
        if not (await asyncio.wait({request.task}, timeout=seconds))[0]:
            return None
        result = CANCELLED if request.task.cancelled() else request.task.result()
        if name in self._by_id:
            self._fetched[name] = len(result.body)
            self._fetched.move_to_end(name)
        while len(self._fetched) > 1 and sum(self._fetched.values()) > FETCHED_BYTES:
            self._drop(next(iter(self._fetched)))
        return result

    def cancel(self, name: str) -> None:
        """Stop a request that has no turn; others run on."""
        request = self._by_id.get(name)
        if request is not None and request.place is None:
            request.task.cancel()

    def forget(self, owner: str) -> None:
        """Stop all requests of a session, and forget them."""
        for model in [each for each in self._turns if owner_of(each) == owner]:
            del self._turns[model]
        for name, request in [(n, r) for n, r in self._by_id.items() if r.owner == owner]:
            request.task.cancel()
            self._drop(name)

    async def close(self) -> None:
        """Stop everything."""
        tasks = [each.task for each in self._by_id.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, owner: str, place: tuple[str, int] | None, work: Work) -> str:
        name = uuid4().hex
        self._by_id[name] = _Request(owner, place, asyncio.create_task(_run(work)))
        return name

    def _drop(self, name: str) -> None:
        self._fetched.pop(name, None)
        if (place := self._by_id.pop(name).place) is not None:
            del self._ids[place]


async def _run(work: Work) -> Result:
    try:
        found = await work()
        return found if isinstance(found, Result) else Result(orjson.dumps(found))
    except AgentLightningError as error:
        return Result.failed(error)
    except Exception as error:
        logger.exception("a request of the Tinker API failed")
        return Result.failed(error)
