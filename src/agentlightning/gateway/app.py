"""The gateway: the endpoint that agents call as they would call OpenAI or Anthropic.

Responsible for finding out whose call it is, keeping it token-faithful, having it sampled, recorded and answered.
Called by agents over HTTP, and by the trainer for `pause`, `drain` and `resume`. It never decides what is learned.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import fields
from functools import partial
from os import PathLike
from typing import Any, Final, cast

from msgspec import structs
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agentlightning.engine.base import Engine
from agentlightning.gateway.asgi import ClientDisconnected, ResponseWriter, read_body, read_headers
from agentlightning.gateway.callers.agents import AgentMatcher, AgentRule
from agentlightning.gateway.callers.attempt_watch import AttemptWatch
from agentlightning.gateway.callers.attempts import AttemptCache, AttemptContext, AttemptIds
from agentlightning.gateway.callers.attribution import MODE_TEMPERATURES, Attribution, Caller
from agentlightning.gateway.callers.client_retries import RequestIdentity
from agentlightning.gateway.callers.on_policy import OnPolicySampling
from agentlightning.gateway.concurrency import ConcurrencyLimit
from agentlightning.gateway.config import GatewayConfig
from agentlightning.gateway.dialects.anthropic.reply import count_reply
from agentlightning.gateway.dialects.anthropic.request import MESSAGES
from agentlightning.gateway.dialects.base import Dialect, Request
from agentlightning.gateway.dialects.openai.chat import CHAT
from agentlightning.gateway.dialects.openai.completions import COMPLETIONS
from agentlightning.gateway.dialects.openai.embeddings import EMBEDDINGS
from agentlightning.gateway.dialects.openai.responses_request import RESPONSES
from agentlightning.gateway.dialects.response_store import ResponseStore
from agentlightning.gateway.errors import STORE_UNAVAILABLE, ApiError, to_api_error
from agentlightning.gateway.forwarding.fast_path import FastPath, RawRequest
from agentlightning.gateway.forwarding.service import ForwardingService
from agentlightning.gateway.forwarding.stored_responses import request_stored_response
from agentlightning.gateway.json_body import parse_object
from agentlightning.gateway.local.conversation import Conversations
from agentlightning.gateway.local.service import LocalService
from agentlightning.gateway.local.update_gate import UpdateGates
from agentlightning.gateway.metrics import Counters
from agentlightning.gateway.models_api import ModelsEndpoint, error_body, json_response
from agentlightning.gateway.offload import offload
from agentlightning.gateway.recording.rejected_span import record_rejection
from agentlightning.gateway.routing import Router
from agentlightning.gateway.translation.call import Translator
from agentlightning.gateway.upstream.budget import Budgets
from agentlightning.gateway.upstream.provider import ApiPath as ProviderPath
from agentlightning.gateway.upstream.servers import ServerPool
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.journal.store import JournaledStore
from agentlightning.transport import Transport, open_transport
from agentlightning.transport.connector import ConnectOptions

logger = logging.getLogger(__name__)

ATTEMPT_PATHS: Final = (
    "/rollout/{rollout_id}/attempt/{attempt_id}",
    "/proxy/rollout/{rollout_id}/attempt/{attempt_id}/mode/{mode}/openai",
    "/worker/{worker_id}/rollout/{rollout_id}/attempt/{attempt_id}",
    "/worker/{worker_id}",
)
DIALECTS: Final[Mapping[str, Dialect]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/embeddings": EMBEDDINGS,
}
_PATHS: Final[Mapping[Dialect, ProviderPath]] = {
    dialect: cast("ProviderPath", path.removeprefix("/v1/")) for path, dialect in DIALECTS.items()
}


class Gateway:
    """Routes, and the valve for weight updates.

    `engines` maps model names to engines. A call is attributed by the attempt in its URL or by the key made with
    `secret`; one that names none is refused unless `allow_unattributed`. The URL is enough by itself unless
    `require_key`: for a server that strangers can reach. `config` says what goes to providers, and what that may cost;
    `budget_file` is where the total is kept, unless it names a file. `default_model` serves requests that name no model
    and, with `accept_any_model`, those that name an unknown one, unless `config` says otherwise. More than
    `max_concurrency` calls at once wait. `agents` says how agents are recognised that do not name themselves;
    `mode_temperatures` are those of 1.0's URLs, where the trainer has set none.
    """

    def __init__(
        self,
        store: LightningStoreBase,
        engines: Mapping[str, Engine],
        *,
        secret: str,
        config: GatewayConfig | None = None,
        budget_file: str | PathLike[str] | None = None,
        default_model: str | None = None,
        accept_any_model: bool | None = None,
        require_key: bool = False,
        allow_unattributed: bool = False,
        max_body_bytes: int = 32 * 1024 * 1024,
        max_concurrency: int = 4096,
        recheck_seconds: float = 1.0,
        agents: Sequence[AgentRule] = (),
        mode_temperatures: Mapping[str, float] = MODE_TEMPERATURES,
    ) -> None:
        self.counters = Counters()
        self._transports: dict[ConnectOptions, Transport] = {}
        self.conversations = Conversations()
        self.kept = ResponseStore()
        self.gates = UpdateGates()
        """One for each engine: what an update of one policy closes."""
        self._store = store
        config = config or GatewayConfig()
        self.budgets = Budgets(config.budget, store, budget_file)
        self.providers = {
            provider.name: ServerPool(provider, partial(self._open_transport, provider.connect_options()), self.budgets)
            for provider in config.providers
        }
        self.router = Router(
            engines,
            config.routes,
            self.providers,
            default_model=config.default_model or default_model,
            accept_any_model=bool(accept_any_model if config.accept_any_model is None else config.accept_any_model),
        )
        # Whether an attempt goes on does not depend on spans: nobody waits for those in a journal.
        bare = store.store if isinstance(store, JournaledStore) else store
        self._attempts = AttemptCache(bare, recheck_seconds=recheck_seconds)
        self.attribution = Attribution(
            store,
            secret,
            require_key=require_key,
            allow_unattributed=allow_unattributed,
            mode_temperatures=mode_temperatures,
        )
        self._models = ModelsEndpoint(self.router, self.attribution.check_key)
        self._agents = AgentMatcher((*config.agents, *agents))
        self._forwarder, self._local = self._callees(config)
        self._max_body_bytes = max_body_bytes
        self._limit = ConcurrencyLimit(max_concurrency)
        self._fast_path = FastPath(
            self._limit, self.attribution, self._forwarder, self.counters, self._continue_in_task, max_body_bytes
        )
        self._watch = AttemptWatch(self._attempts, self.forget)
        self._watch.fast_calls = self._fast_path.calls

    def _callees(self, config: GatewayConfig) -> tuple[ForwardingService, LocalService]:
        """Who has calls answered: by providers, and by our own engines."""
        translator = Translator({path: dialect for dialect, path in _PATHS.items()}, self.kept, self.counters)
        on_policy = OnPolicySampling(self.counters)
        forwarder = ForwardingService(
            self.router,
            self._store,
            self._attempts,
            self._context,
            self._agents,
            self.counters,
            translator,
            on_policy,
            self.kept,
        )
        local = LocalService(
            store=self._store,
            table=self.router,
            conversations=self.conversations,
            kept=self.kept,
            gates=self.gates,
            contexts=self._attempts,
            find_context=self._context,
            counters=self.counters,
            on_policy=on_policy,
            holding=config.structured_output,
        )
        return forwarder, local

    # -- the valve -----------------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        return self.gates.closed

    def pause(self) -> None:
        """Calls of every engine that come from now on wait; those under way go on."""
        self.gates.close()

    async def drain(self, timeout: float | None = None) -> None:
        """Pause, and wait until nothing is sampled or recorded. Raises TimeoutError, still paused."""
        await self.gates.drain(timeout)

    def resume(self) -> None:
        """Waiting calls go on."""
        self.gates.open()

    def forget(self, rollout_id: str, attempt_id: str) -> None:
        """Drop what is remembered of an attempt that has ended."""
        self.conversations.forget((rollout_id, attempt_id))
        self.kept.forget((rollout_id, attempt_id))
        self._attempts.forget(rollout_id, attempt_id)
        self.budgets.forget(rollout_id)
        for pool in self.providers.values():
            pool.forget(f"{rollout_id}/{attempt_id}")

    def metrics(self) -> dict[str, int | float]:
        """What the gateway has done, by name."""
        kept = {field.name: getattr(self.counters, field.name) for field in fields(self.counters)}
        providers = self.providers.values()
        return {name: value for name, value in kept.items() if isinstance(value, int)} | {
            "provider_retries": sum(pool.num_retries for pool in providers),
            "provider_dollars": sum(pool.dollars for pool in providers),
            "over_budget": self.budgets.num_rejected,
            "attribution_conflicts": self.attribution.conflicts,
        }

    async def close(self) -> None:
        """End the calls under way, and hang up on providers. A call that comes later calls them anew."""
        await self._watch.close()
        await self._fast_path.close()
        for pool in self.providers.values():
            await pool.close()
        transports, self._transports = self._transports, {}
        for transport in transports.values():
            await transport.close()
        self.budgets.close()

    def _open_transport(self, options: ConnectOptions) -> Transport:
        """One for all providers that are reached in the same way."""
        if (transport := self._transports.get(options)) is None:
            transport = self._transports[options] = open_transport(options)
        return transport

    # -- the routes ----------------------------------------------------------------------------------------------

    def routes(self) -> list[Route]:
        """For a Starlette application; a path under `/v1` that nobody serves is a 404 as the caller's SDK knows it."""
        return [route for prefix in (*ATTEMPT_PATHS, "") for route in self._routes_below(prefix)]

    def _routes_below(self, prefix: str) -> list[Route]:
        return [
            *(Route(prefix + path, self._endpoint(dialect), methods=["POST"]) for path, dialect in DIALECTS.items()),
            Route(
                f"{prefix}/v1/messages/count_tokens",
                _Endpoint(self.serve_count, partial(self._admit, MESSAGES)),
                methods=["POST"],
            ),
            Route(f"{prefix}/v1/responses/{{response_id}}", self._serve_stored_response, methods=["GET", "DELETE"]),
            Route(f"{prefix}/v1/models", self._models.list, methods=["GET"]),
            Route(f"{prefix}/v1/models/{{model:path}}", self._models.retrieve, methods=["GET"]),
            *(Route(f"{prefix}{path}", _alive, methods=["GET"]) for path in ("/v1", "/v1/", "/")),
            *([Route(prefix, _alive, methods=["GET"])] if prefix else []),
            Route(f"{prefix}/v1/{{rest:path}}", _no_such_path, methods=["GET", "POST", "PUT", "DELETE"]),
        ]

    async def _serve_stored_response(self, request: HttpRequest) -> Response:
        try:
            caller = await self.attribution.caller(read_headers(request.scope), request.path_params)
            attempt, name = _attempt(caller) or ("", ""), request.path_params["response_id"]
            if (provider := self.kept.provider_of(attempt, name)) is not None:
                body = await request_stored_response(self.providers[provider], request.method, attempt, name)
                return Response(body, media_type="application/json")
            if request.method != "DELETE":
                return Response(self.kept.body(attempt, name), media_type="application/json")
            self.kept.delete(attempt, name)
        except ApiError as api_error:
            return error_body(request, api_error)
        return json_response({"id": name, "object": "response", "deleted": True})

    # -- one call ------------------------------------------------------------------------------------------------

    async def serve(self, dialect: Dialect, scope: Scope, receive: Receive, send: Send) -> None:
        """One model call; the boundary where any failure becomes a reply that the caller's SDK understands."""
        await self._handle(dialect, partial(self._call, dialect), scope, receive, send)

    def _endpoint(self, dialect: Dialect) -> _Endpoint:
        admit, fast_path = partial(self._admit, dialect), partial(self._fast_path.try_serve, _PATHS[dialect])
        return _Endpoint(partial(self.serve, dialect), admit, fast_path)

    def _continue_in_task(self, path: ProviderPath, attempt: AttemptIds | None, work: Work) -> ASGIApp:
        """The rest of a call that cannot go the fast path to its end."""

        async def resumed(scope: Scope, receive: Receive, writer: ResponseWriter) -> None:
            async with self._limit.slot():
                with self._watch.track(attempt):
                    await work(scope, receive, writer)

        return partial(self._handle, DIALECTS[f"/v1/{path}"], resumed)

    def _admit(self, dialect: Dialect, line: RawRequest) -> tuple[int, bytes] | None:
        """The answer to a caller who has no business here, by the head of its request alone."""
        try:
            self._fast_path.identify(line)
        except ApiError as api_error:
            self.counters.requests += 1
            self.counters.errors += 1
            return api_error.status, dialect.error_body(api_error)
        return None

    async def serve_count(self, scope: Scope, receive: Receive, send: Send) -> None:
        """How many tokens the prompt of a call would have; nothing is sampled or recorded."""
        await self._handle(MESSAGES, self._count, scope, receive, send)

    async def _handle(self, dialect: Dialect, work: Work, scope: Scope, receive: Receive, send: Send) -> None:
        self.counters.requests += 1
        writer = ResponseWriter(send, chunked=scope.get("http_version") != "1.0")
        name = b"request-id" if dialect is MESSAGES else b"x-request-id"
        writer.extra_headers = [(name, b"req_" + secrets.token_hex(12).encode())]
        try:
            await work(scope, receive, writer)
        except ClientDisconnected:
            self.counters.cancelled += 1
        except Exception as error:
            self.counters.errors += 1
            api_error = to_api_error(error)
            if api_error.status >= 500:
                explained = isinstance(error, (ApiError, *STORE_UNAVAILABLE))
                logger.error("a call failed: %s", api_error.message, exc_info=None if explained else error)
            await _fail(dialect, writer, api_error)

    async def _call(self, dialect: Dialect, scope: Scope, receive: Receive, writer: ResponseWriter) -> None:
        started = time.time()
        headers, caller = await self._caller(scope)
        body = b""
        async with AsyncExitStack() as slot:
            try:
                body, caller = await self._body(scope, receive, headers, caller)
                await slot.enter_async_context(self._limit.slot())  # not sooner: who sends slowly holds none
                run = await self._resolve(dialect, headers, caller, body)
            except ClientDisconnected:
                raise
            except Exception as error:
                await record_rejection(self._store, _PATHS[dialect], caller, body, error, started)
                raise
            with self._watch.track(caller.attempt):
                await run(scope, receive, writer)

    async def _resolve(self, dialect: Dialect, headers: Mapping[str, str], caller: Caller, body: bytes) -> Work:
        """What is to be done for a call. What it raises nobody has recorded; what is raised afterwards is."""
        asked = await offload(len(body), partial(parse_object, body))
        if (forward := await self._forwarder.plan(_PATHS[dialect], caller, headers, asked)) is not None:
            return partial(self._forwarder.run, forward)
        caller, request = await self._read(dialect, headers, caller, body, asked)
        exchange, reply = await self._local.prepare(dialect, _PATHS[dialect], caller, request, len(body))
        return partial(self._local.draw, exchange, request, reply)

    async def _count(self, scope: Scope, receive: Receive, writer: ResponseWriter) -> None:
        headers, caller = await self._caller(scope)
        body, caller = await self._body(scope, receive, headers, caller)
        async with self._limit.slot():
            await self._count_prompt(headers, caller, body, writer)

    async def _count_prompt(
        self, headers: Mapping[str, str], caller: Caller, body: bytes, writer: ResponseWriter
    ) -> None:
        asked = await offload(len(body), partial(parse_object, body))
        if await self._forwarder.count(caller, headers, asked, writer):
            return
        caller, request = await self._read(MESSAGES, headers, caller, body, asked)
        tokens = await self._local.count(caller, request, len(body))
        await writer.send_json(200, count_reply(tokens))

    async def _caller(self, scope: Scope) -> tuple[dict[str, str], Caller]:
        headers = read_headers(scope)
        return headers, await self.attribution.caller(headers, scope["path_params"])

    async def _body(
        self, scope: Scope, receive: Receive, headers: Mapping[str, str], caller: Caller
    ) -> tuple[bytes, Caller]:
        body = await read_body(receive, headers, self._max_body_bytes)
        if caller.attempt_id is not None:
            path = scope["path"].rpartition("/v1/")[2]
            repeat = await offload(len(body) // 1024, partial(RequestIdentity.of, headers, path, body))  # It is fast.
            caller = structs.replace(caller, repeat=repeat)
        return body, caller

    async def _read(
        self,
        dialect: Dialect,
        headers: Mapping[str, str],
        caller: Caller,
        body: bytes,
        asked: dict[str, Any] | None,
    ) -> tuple[Caller, Request]:
        recall = self.kept.lookup(_attempt(caller))
        request = await offload(len(body), partial(dialect.read, body if asked is None else asked, recall))
        self.counters.count_unknown(request.ignored_fields)
        agent = self._agents.identify(headers, request.raw, self.router)
        return caller.with_agent(agent, self.router), request

    async def _context(self, caller: Caller) -> AttemptContext:
        rollout_id, attempt_id = caller.rollout_id or "", caller.attempt_id or ""
        try:
            return await self._attempts.get(rollout_id, attempt_id)
        except ApiError:
            self.forget(rollout_id, attempt_id)
            raise


Work = Callable[[Scope, Receive, ResponseWriter], Awaitable[None]]


class _Endpoint:
    """Starlette takes an object, unlike a function, for a bare ASGI application."""

    def __init__(
        self,
        serve: ASGIApp,
        admit: Callable[[RawRequest], tuple[int, bytes] | None],
        fast_path: Callable[[RawRequest], bool] | None = None,
    ) -> None:
        self._handle = serve
        self.admit = admit
        """Called at the end of a head: the status and the body of a refusal, or None."""
        self.fast_path = fast_path
        """Serves a call as the socket has it; returns False where it does not."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handle(scope, receive, send)


def _attempt(caller: Caller) -> tuple[str, str] | None:
    return caller.attempt


async def _fail(dialect: Dialect, writer: ResponseWriter, api_error: ApiError) -> None:
    if not writer.started:
        return await writer.send_json(
            api_error.status, dialect.error_body(api_error), api_error.retry, api_error.retry_after
        )
    await writer.send_events(dialect.error_event(api_error))
    await writer.close()


async def _alive(request: HttpRequest) -> Response:
    return json_response({"status": "ok"})


async def _no_such_path(request: HttpRequest) -> Response:
    if request.headers.get("upgrade", "").lower() == "websocket":
        # Codex, told this, asks by HTTP at once; told anything else, it tries again for seconds.
        return error_body(request, ApiError(426, f"{request.url.path} is no websocket; send POST requests"))
    served = ", ".join(f"POST {path}" for path in DIALECTS)
    api_error = ApiError(
        404, f"{request.method} {request.url.path} is not served here; served: {served}, GET /v1/models"
    )
    return error_body(request, api_error)
