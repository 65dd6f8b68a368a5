"""The gateway: the OpenAI-compatible endpoint that agents call.

Responsible for finding out whose call it is, keeping it token-faithful, having it sampled, recorded and answered.
Called by agents over HTTP, and by the trainer for `pause`, `drain` and `resume`. It never decides what is learned.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agentlightning import span as names
from agentlightning.gateway.answer import Answer, Piece
from agentlightning.gateway.attribution import AttemptContext, Caller, Contexts, attribute
from agentlightning.gateway.conversation import Conversations, Prompt
from agentlightning.gateway.dialects import chat
from agentlightning.gateway.exchange import Exchange, Show
from agentlightning.gateway.gate import Gate
from agentlightning.gateway.problems import Problem, problem_of
from agentlightning.gateway.record import Record
from agentlightning.gateway.upstream import Upstream
from agentlightning.gateway.wire import ClientGone, Outlet, read_body, read_headers, until_gone
from agentlightning.policy.base import Engine
from agentlightning.span import new_span_id, new_trace_id
from agentlightning.store.base import LightningStoreBase

logger = logging.getLogger(__name__)

ATTEMPT_PATHS: Final = (
    "/rollout/{rollout_id}/attempt/{attempt_id}",
    "/proxy/rollout/{rollout_id}/attempt/{attempt_id}/mode/{mode}/openai",
)
MAX_UNKNOWN_NAMES: Final = 200


@dataclass(slots=True)
class Counters:
    """What the gateway has done since it was made."""

    requests: int = 0
    errors: int = 0
    """Requests answered with an error."""
    cancelled: int = 0
    """Requests whose caller hung up."""
    unattributed: int = 0
    """Requests served for no attempt, and recorded nowhere."""
    continued: int = 0
    """Requests that got the exact tokens of an earlier one."""
    drift: int = 0
    """Requests that looked like a continuation which could not be proven."""
    prompt_tokens: int = 0
    response_tokens: int = 0
    unknown_fields: int = 0
    """Request fields that were ignored."""
    unknown_names: Counter[str] = field(default_factory=Counter[str])
    """The first names of them, and how often each came."""

    def count_unknown(self, unknown: tuple[str, ...]) -> None:
        self.unknown_fields += len(unknown)
        for name in unknown:
            if name in self.unknown_names or len(self.unknown_names) < MAX_UNKNOWN_NAMES:
                self.unknown_names[name] += 1


class Gateway:
    """Routes, and the valve for weight updates.

    `engines` maps model names to engines. A call is attributed by the attempt in its URL or by the key made with
    `secret`; one that names none is refused unless `allow_unattributed`. The URL is enough by itself unless
    `require_key`: for a server that strangers can reach. `default_model` serves requests that name no model and, with
    `accept_any_model`, those that name an unknown one. More than `max_concurrency` calls at once wait.
    """

    def __init__(
        self,
        store: LightningStoreBase,
        engines: Mapping[str, Engine],
        *,
        secret: str,
        default_model: str | None = None,
        accept_any_model: bool = False,
        require_key: bool = False,
        allow_unattributed: bool = False,
        max_body_bytes: int = 32 * 1024 * 1024,
        max_concurrency: int = 4096,
        recheck_seconds: float = 1.0,
    ) -> None:
        self.counters = Counters()
        self.conversations = Conversations()
        self._store = store
        self._upstream = Upstream(engines, default_model, accept_any_model)
        self._contexts = Contexts(store, recheck_seconds=recheck_seconds)
        self._attribute = partial(
            attribute, secret=secret, require_key=require_key, allow_unattributed=allow_unattributed
        )
        self._max_body_bytes = max_body_bytes
        self._slots = asyncio.Semaphore(max_concurrency)
        self._gate = Gate()
        self._created = int(time.time())

    # -- the valve -----------------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        return self._gate.closed

    def pause(self) -> None:
        """Calls that come from now on wait; those under way go on."""
        self._gate.close()

    async def drain(self, timeout: float | None = None) -> None:
        """Pause, and wait until nothing is sampled or recorded. Raises TimeoutError, still paused."""
        await self._gate.drain(timeout)

    def resume(self) -> None:
        """Waiting calls go on."""
        self._gate.open()

    def forget(self, rollout_id: str, attempt_id: str) -> None:
        """Drop what is remembered of an attempt that has ended."""
        self.conversations.forget((rollout_id, attempt_id))
        self._contexts.forget(rollout_id, attempt_id)

    # -- the routes ----------------------------------------------------------------------------------------------

    def routes(self) -> list[Route]:
        """For a Starlette application; a path under `/v1` that nobody serves is a 404 in OpenAI's shape."""
        return [route for prefix in (*ATTEMPT_PATHS, "") for route in self._routes_below(prefix)]

    def _routes_below(self, prefix: str) -> list[Route]:
        return [
            Route(f"{prefix}/v1/chat/completions", _Endpoint(self), methods=["POST"]),
            Route(f"{prefix}/v1/models", self._list_models, methods=["GET"]),
            Route(f"{prefix}/v1/models/{{model:path}}", self._show_model, methods=["GET"]),
            Route(f"{prefix}/v1", _alive, methods=["GET"]),
            Route(prefix or "/", _alive, methods=["GET"]),
            Route(f"{prefix}/v1/{{rest:path}}", _no_such_path, methods=["GET", "POST", "PUT", "DELETE"]),
        ]

    async def _list_models(self, request: Request) -> Response:
        data = [self._model(name) for name in self._upstream.models]
        return _json({"object": "list", "data": data})

    async def _show_model(self, request: Request) -> Response:
        try:
            name, _ = self._upstream.resolve(request.path_params["model"])
        except Problem as problem:
            return _refusal(problem)
        return _json(self._model(name))

    def _model(self, name: str) -> dict[str, str | int]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "agentlightning"}

    # -- one call ------------------------------------------------------------------------------------------------

    async def serve_chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One chat completion; the boundary where any failure becomes a reply that the caller's SDK understands."""
        self.counters.requests += 1
        outlet = Outlet(send)
        try:
            async with self._slots:
                await self._chat(scope, receive, outlet)
        except ClientGone:
            self.counters.cancelled += 1
        except Exception as error:
            self.counters.errors += 1
            problem = problem_of(error)
            if problem.status >= 500:
                logger.error("a call failed: %s", problem.message, exc_info=error)
            await _fail(outlet, problem)

    async def _chat(self, scope: Scope, receive: Receive, outlet: Outlet) -> None:
        headers = read_headers(scope)
        caller = self._attribute(headers, scope["path_params"])
        request = chat.read_request(await read_body(receive, headers, self._max_body_bytes))
        self.counters.count_unknown(request.unknown)
        exchange = await self._prepare(caller, request)
        reply = chat.Reply.new(exchange.record.response_id, exchange.record.served_model, request.logprobs)
        await self._relay(exchange, reply, request.stream, receive, outlet)

    async def _prepare(self, caller: Caller, request: chat.ChatRequest) -> Exchange:
        model, engine = self._upstream.resolve(request.model)
        params = request.params
        if caller.rollout_id is not None and caller.attempt_id is not None:
            context = await self._context(caller.rollout_id, caller.attempt_id)
            params = chat.forced_params(params, *context.sampling_parameters(model))
            key, trace_id = (caller.rollout_id, caller.attempt_id), context.trace_id
            prompt = self.conversations.prompt(key, model, engine.chat, request.messages, request.tools)
        else:
            self.counters.unattributed += 1
            trace_id = new_trace_id()
            prompt = Prompt(engine.chat.encode(engine.chat.render(request.messages, request.tools)))
        self.counters.continued += prompt.continues is not None
        self.counters.drift += prompt.drift
        record = _record(caller, request, model, prompt, trace_id)
        reads_calls = request.tools is not None
        answers = [Answer(index, engine.chat, params.stop, reads_calls) for index in range(request.n)]
        return Exchange(engine, params, record, answers, attributed=caller.attempt_id is not None)

    async def _context(self, rollout_id: str, attempt_id: str) -> AttemptContext:
        try:
            return await self._contexts.get(rollout_id, attempt_id)
        except Problem:
            self.forget(rollout_id, attempt_id)
            raise

    async def _run(self, exchange: Exchange, show: Show | None) -> None:
        async with self._gate:
            kept = await exchange.run(self._store, show)
        self._learn(exchange)
        record = exchange.record
        if any(span.attributes.get(names.SUPERSEDED) for span in kept):
            self._contexts.doubt(record.rollout_id, record.attempt_id)

    def _learn(self, exchange: Exchange) -> None:
        record, eos = exchange.record, exchange.engine.chat.eos_token_ids
        self.counters.prompt_tokens += len(record.prompt.token_ids)
        for answer, span_id in zip(exchange.answers, record.span_ids, strict=True):
            if (sample := answer.sample) is None:
                continue
            self.counters.response_tokens += len(sample.token_ids)
            if exchange.attributed:
                key = (record.rollout_id, record.attempt_id)
                self.conversations.learn(key, record.prompt, answer.message, sample, eos, span_id)

    async def _relay(
        self, exchange: Exchange, reply: chat.Reply, stream: bool, receive: Receive, outlet: Outlet
    ) -> None:
        """Draw, and pass on: piece by piece where the caller streams. A caller that hangs up ends the drawing."""
        events: Events = asyncio.Queue()
        work = asyncio.create_task(self._run(exchange, partial(_put, events) if stream else None))
        gone = asyncio.create_task(until_gone(receive))
        for task in (work, gone):
            task.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                await outlet.write(_pieces(reply, exchange, outlet.started, event, events))
            if not work.done():
                raise ClientGone
            await work
            await _end(reply, exchange, stream, outlet)
        finally:
            await _settle(exchange, work, gone)


Events = asyncio.Queue[tuple[int, Piece] | None]
"""Pieces of answers; None: somebody is done."""


class _Endpoint:
    """Starlette takes an object, unlike a function, for a bare ASGI application."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._gateway.serve_chat(scope, receive, send)


def _record(caller: Caller, request: chat.ChatRequest, model: str, prompt: Prompt, trace_id: str) -> Record:
    return Record(
        rollout_id=caller.rollout_id or "",
        attempt_id=caller.attempt_id or "",
        trace_id=caller.trace_id or trace_id,
        parent_id=caller.parent_id,
        agent=caller.agent,
        response_id=f"chatcmpl-{secrets.token_hex(12)}",
        requested_model=request.model or model,
        served_model=model,
        messages=request.messages,
        tools=request.tools,
        prompt=prompt,
        start_time=time.time(),
        span_ids=tuple(new_span_id() for _ in range(request.n)),
    )


def _put(events: Events, index: int, piece: Piece) -> None:
    events.put_nowait((index, piece))


def _pieces(reply: chat.Reply, exchange: Exchange, started: bool, first: tuple[int, Piece], events: Events) -> bytes:
    """Everything that is there by now, to be sent at once."""
    parts = [] if started else [reply.opening(answer.index) for answer in exchange.answers]
    parts.append(reply.piece(*first))
    while not events.empty():
        event = events.get_nowait()
        if event is None:
            events.put_nowait(None)
            break
        parts.append(reply.piece(*event))
    return b"".join(parts)


async def _end(reply: chat.Reply, exchange: Exchange, stream: bool, outlet: Outlet) -> None:
    answers, prompt_tokens = exchange.answers, len(exchange.record.prompt.token_ids)
    if not stream:
        return await outlet.whole(200, reply.completion(answers, prompt_tokens))
    parts = [] if outlet.started else [reply.opening(answer.index) for answer in answers]
    parts += [reply.closing(answer) for answer in answers]
    await outlet.write(b"".join(parts) + reply.end(answers, prompt_tokens))
    await outlet.close()


async def _settle(exchange: Exchange, work: asyncio.Task[None], gone: asyncio.Task[None]) -> None:
    """Leave nothing running. What is drawn is recorded to the end, even for a caller that has hung up."""
    gone.cancel()
    if not exchange.drawn:
        work.cancel()
    await asyncio.wait({work, gone})
    if gone.cancelled() or work.cancelled() or (error := work.exception()) is None:
        return
    logger.error("the call of a caller that hung up could not be recorded", exc_info=error)


async def _fail(outlet: Outlet, problem: Problem) -> None:
    if not outlet.started:
        return await outlet.whole(problem.status, problem.body(), problem.retry)
    await outlet.write(chat.error_event(problem))
    await outlet.close()


async def _alive(request: Request) -> Response:
    return _json({"status": "ok"})


async def _no_such_path(request: Request) -> Response:
    served = "POST /v1/chat/completions, GET /v1/models"
    return _refusal(Problem(404, f"{request.method} {request.url.path} is not served here; served: {served}"))


def _refusal(problem: Problem) -> Response:
    return Response(problem.body(), problem.status, media_type="application/json")


def _json(content: Mapping[str, object]) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
