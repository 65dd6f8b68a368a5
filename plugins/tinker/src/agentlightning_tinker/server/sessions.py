"""What a client has begun: its training runs and samplers, and requests whose results are fetched later.

Requests of one model run one after the other in the order of their sequence numbers, in whichever order they arrive. A
request that is sent again, because its answer was lost, is the same request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from uuid import uuid4

import orjson
from starlette.responses import Response

from agentlightning.errors import AgentLightningError, ConfigError, ContextLengthError, NotFoundError
from agentlightning_tinker.server.host import AdapterHost
from agentlightning_tinker.server.wire import Saved

logger = logging.getLogger(__name__)

FETCHED_BYTES: Final = 16 << 20
"""Results of a session that were fetched stay up to this size together, for a client that lost the answer."""
Found = Mapping[str, Any] | Response
"""What a request gives: an object as JSON, or a response as it is."""
Work = Callable[[], Awaitable[Found]]
T = TypeVar("T")


def json_response(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


def failure(error: BaseException) -> Response:
    """The result of a request that failed: the error, and whether it is the caller's."""
    users = isinstance(error, ConfigError | ContextLengthError | NotFoundError)
    return json_response({"error": str(error), "category": "user" if users else "server"})


def require(found: T | None, what: str) -> T:
    """A session, or something of one. Raises NotFoundError where it is not there."""
    if found is None:
        raise NotFoundError(
            f"{what} is unknown here: its session has ended, or the server was started again; begin from a saved state"
        )
    return found


@dataclass(frozen=True, slots=True)
class Sampler:
    host: AdapterHost
    copy: Saved | None = None
    """None: the model below the adapters."""
    path: str | None = None


class Session:
    """With its name begin those of its training runs, samplers and requests, before a colon. The id of a request that
    has a turn is MODEL:NUMBER."""

    def __init__(self, name: str) -> None:
        self.name, self.heard = name, time.monotonic()
        self.slots = dict[AdapterHost, asyncio.Semaphore]()
        """By model, for answers at the same time."""
        self.models = dict[str, AdapterHost]()
        """By training run, what it is over."""
        self.samplers: dict[str, Sampler] = {}
        self._tasks: dict[str, asyncio.Task[Response]] = {}
        """The requests that have not been forgotten."""
        self._passed: dict[str, int] = {}
        """By training run, the number of its last request that has run."""
        self._turn = asyncio.Condition()
        """Notified when one has run."""
        self._fetched: OrderedDict[str, int] = OrderedDict()

    def start(self, work: Work, name: str | None = None) -> str:
        """Run at once. Returns the id of the request."""
        name = name or f"{self.name}:{uuid4().hex}"
        self._tasks[name] = asyncio.create_task(_run(work))
        return name

    def open_queue(self, model: str, first: Work) -> str:
        """Run the request that makes a model; later ones of it begin with number 1."""
        self._passed.setdefault(model, -1)
        return self.enqueue(model, 0, first)

    def enqueue(self, model: str, number: int, work: Work) -> str:
        """Run when all requests of the model with smaller numbers have. Raises NotFoundError for an unknown model,
        and ConfigError for a number that has passed and whose result is forgotten."""
        passed = require(self._passed.get(model), f"model {model!r}")
        if (name := f"{model}:{number}") in self._tasks:
            return name
        if number <= passed:
            raise ConfigError(f"request {number} of model {model} has run, and its result is no longer kept")

        async def in_turn() -> Found:
            async with self._turn:
                await self._turn.wait_for(lambda: self._passed[model] == number - 1)
            try:
                return await work()
            finally:
                self._passed[model] = number
                async with self._turn:
                    self._turn.notify_all()

        return self.start(in_turn, name)

    async def fetch(self, name: str, seconds: float) -> Response | None:
        """The result of a request; None if it is not there in so many seconds. Raises NotFoundError for an unknown
        one."""
        task = require(self._tasks.get(name), f"request {name}")
        if not (await asyncio.wait({task}, timeout=seconds))[0]:
            return None
        result = failure(ConfigError("the request was cancelled")) if task.cancelled() else task.result()
        if name in self._tasks:
            self._fetched[name] = len(result.body)
            self._fetched.move_to_end(name)
        while len(self._fetched) > 1 and sum(self._fetched.values()) > FETCHED_BYTES:
            del self._tasks[self._fetched.popitem(last=False)[0]]
        return result

    def cancel(self, name: str) -> None:
        """Stop a request that has no turn; others run on."""
        if name in self._tasks and name.rpartition(":")[0] not in self._passed:
            self._tasks[name].cancel()

    async def close(self) -> None:
        """Stop everything."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


async def _run(work: Work) -> Response:
    try:
        found = await work()
        return found if isinstance(found, Response) else json_response(found)
    except Exception as error:
        if not isinstance(error, AgentLightningError):
            logger.exception("a request of the Tinker API failed")
        return failure(error)
