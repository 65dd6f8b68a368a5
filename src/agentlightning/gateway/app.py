"""The gateway: the OpenAI and Anthropic API that agents call.

Attributes each call to an attempt, samples or forwards it, records it and replies. Agents call it over HTTP; the
trainer holds calls back with `gates`. This module wires the parts, has the routes, and is the boundary where errors
end. Each call is resolved once: caller, attempt, parsed body and route (`ResolvedCall`). A provider or an engine of
ours serves it then.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from os import PathLike
from pathlib import Path
from typing import Final

from msgspec import structs
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agentlightning.attempt_address import without_key
from agentlightning.engine.base import Engine, EngineUnavailableError
from agentlightning.errors import StoreError
from agentlightning.gateway.callers import CHECK_SECONDS, AttemptTable, Attribution, repeat_attributes
from agentlightning.gateway.config import GatewayConfig
from agentlightning.gateway.conversation import Conversations
from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.dialects.base import ApiPath, read_json
from agentlightning.gateway.dialects.chat import CHAT
from agentlightning.gateway.dialects.messages import MESSAGES
from agentlightning.gateway.dialects.response_store import ResponseStore
from agentlightning.gateway.errors import STORE_UNAVAILABLE, ApiError, to_api_error
from agentlightning.gateway.forwarding.call import MAX_UPLOAD_BYTES, ForwardingService
from agentlightning.gateway.http import ResponseWriter, Slot, headers_by_name, offload, read_body
from agentlightning.gateway.local import LocalService, LocalSettings, UpdateGates
from agentlightning.gateway.record import Counters, record_rejection
from agentlightning.gateway.routing import AgentMatcher, ModelsEndpoint, Router, client_family, json_response
from agentlightning.gateway.sampling import OnPolicySampling
from agentlightning.gateway.upstream.call import ServerPool
from agentlightning.gateway.upstream.limits import Budgets
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http.endpoint import ClientDisconnected, cancel_on_disconnect
from agentlightning.transport import Transport

logger = logging.getLogger(__name__)

ATTEMPT_PATHS: Final = (
    "/rollout/{rollout_id}/attempt/{attempt_id}",
    "/proxy/rollout/{rollout_id}/attempt/{attempt_id}/mode/{mode}/openai",
    "/worker/{worker_id}/key/{key}",
    "/worker/{worker_id}",
    "/key/{key}",
)
"""Prefixes of URLs that name an attempt or a worker."""
MAX_FAILURES: Final = 200
"""Messages that are counted before counting begins anew."""


class Gateway:
    """Serves model calls, and holds them back during weight updates.

    `engines` maps model names to engines. A call belongs to the attempt in its URL or in its key, which is signed with
    `secret`; a call without an attempt is rejected unless `allow_unattributed`. A URL is enough unless `require_key`,
    which is for servers that strangers can reach. `config` has the routes to providers and the budget; `budget_file`
    stores what was spent, unless the budget names a file; `shared` is a folder for what several processes of one server
    share. Training runs elsewhere may join a gateway that `takes_runs`. `default_model` serves requests without a model
    and, with `accept_any_model`, those for an unknown one, unless `config` says otherwise. Calls above
    `max_concurrency` wait. Every `check_seconds` the store is asked which attempts have ended.
    """

    def __init__(
        self,
        store: LightningStoreBase,
        engines: Mapping[str, Engine],
        *,
        secret: str,
        config: GatewayConfig | None = None,
        budget_file: str | PathLike[str] | None = None,
        shared: Path | None = None,
        default_model: str | None = None,
        accept_any_model: bool | None = None,
        require_key: bool = False,
        allow_unattributed: bool = False,
        takes_runs: bool = False,
        max_body_bytes: int = 32 * 1024 * 1024,
        max_concurrency: int = 4096,
        check_seconds: float = CHECK_SECONDS,
    ) -> None:
        config = config or GatewayConfig()
        self.counters = Counters()
        self._failures = Counter[str]()
        """Calls that failed for a reason within, by message."""
        self.conversations = Conversations()
        self.responses = ResponseStore(shared)
        self.gates = UpdateGates()
        """One gate for each engine, closed while its weights change."""
        self._open_transport = cache(Transport)
        """One for all providers with the same connect options."""
        self.budgets = Budgets(config.budget, store, budget_file)
        self.providers = {
            provider.name: ServerPool(provider, partial(self._open_transport, provider.connect_options()), self.budgets)
            for provider in config.providers
        }
        self.router = Router(
            engines,
            config.routes,
            self.providers,
            AgentMatcher(config.agents),
            default_model=config.default_model or default_model,
            accept_any_model=bool(accept_any_model if config.accept_any_model is None else config.accept_any_model),
            takes_runs=takes_runs,
        )
        self.attempts = AttemptTable(store, self.forget, check_seconds=check_seconds)
        self.attribution = Attribution(
            self.attempts, secret, require_key=require_key, allow_unattributed=allow_unattributed
        )
        parts = store, self.attempts, self.counters, OnPolicySampling(self.counters), self.responses

        self._forwarding = ForwardingService(*parts)
        self._local = LocalService(*parts, self.conversations, self.gates, config, {})
        self._models = ModelsEndpoint(self.router, self.attribution.check_key)
        self._limit = asyncio.Semaphore(max_concurrency)
        self._max_body_bytes = max_body_bytes

    # -- training runs elsewhere -----------------------------------------------------------------------------------

    def add_policy(self, model: str, engine: Engine, settings: LocalSettings) -> None:
        """See `Router.add_policy`; the settings are those of the run."""
        self.router.add_policy(model, engine)
        self._local.settings_of[self.gates.of(engine)] = settings

    def remove_policy(self, model: str) -> None:
        """Undo `add_policy`, and keep nothing of the engine."""
        self._local.settings_of.pop(self.gates.forget(self.router.remove_policy(model)), None)

    def forget(self, rollout_id: str, attempt_id: str) -> None:
        """Drop what is cached of an attempt that has ended."""
        self.conversations.forget((rollout_id, attempt_id))
        self.responses.forget((rollout_id, attempt_id))
        self.budgets.forget(rollout_id)

    def metrics(self) -> dict[str, int | float]:
        """Counters by name."""
        providers = self.providers.values()
        return asdict(self.counters) | {
            "provider_retries": sum(pool.num_retries for pool in providers),
            "provider_dollars": sum(pool.dollars for pool in providers),
            "over_budget": self.budgets.num_rejected,
            "attribution_conflicts": self.attribution.conflicts,
            "attribution_refused": self.attribution.refused,
        }

    async def close(self) -> None:
        """End the calls in progress and close the connections to providers. A later call opens them again."""
        await self.attempts.close()
        for pool in self.providers.values():
            await pool.close()
        self._open_transport.cache_clear()
        self.budgets.close()

    # -- the routes ------------------------------------------------------------------------------------------------

    def routes(self) -> list[Route]:
        """For a Starlette application. An unknown path under `/v1` gets a 404 in the shape the caller's SDK expects."""
        stored = _endpoint(self._stored_response)
        served = [
            *((f"/v1/{path}", _ModelCalls(self, path), "POST") for path in DIALECTS),
            ("/v1/messages/count_tokens", _ModelCalls(self, "messages", is_count=True), "POST"),
            ("/v1/responses/{response_id}", stored, "GET DELETE"),
            ("/v1/responses/{response_id}/cancel", stored, "POST"),
            ("/v1/models", _endpoint(self._models.list), "GET"),
            ("/v1/models/{model:path}", _endpoint(self._models.retrieve), "GET"),
            *((path, _ok, "GET") for path in ("/v1", "/v1/", "/", "")),
            ("/v1/{rest:path}", _endpoint(self._other_path), "GET POST PUT PATCH DELETE"),
        ]
        return [
            Route(prefix + path, endpoint, methods=methods.split())
            for prefix in (*ATTEMPT_PATHS, "")
            for path, endpoint, methods in served
            if prefix + path
        ]

    async def _stored_response(self, request: HttpRequest) -> Response:
        caller = await self.attribution.caller(headers_by_name(request.scope), request.path_params)
        attempt, response_id = caller.attempt or ("", ""), request.path_params["response_id"]
        if (provider := self.responses.provider_of(attempt, response_id)) is not None:
            pool = self.providers[provider]
            body = await self._forwarding.request_stored(pool, request.method, attempt, response_id)
            return Response(body, media_type="application/json")
        try:
            if request.method != "DELETE":
                return Response(self.responses.body(attempt, response_id), media_type="application/json")
            self.responses.delete(attempt, response_id)
        except ApiError as unknown:  # Of another attempt, which a provider of all paths may have.
            return await self._other_path(request, unknown)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def _other_path(self, request: HttpRequest, unserved: ApiError | None = None) -> Response:
        """Forward a request to the provider that serves all paths. Raises ApiError if there is none."""
        pools = [pool for pool in self.providers.values() if pool.provider.all_paths]
        if not pools or request.headers.get("upgrade", "").lower() == "websocket":
            raise unserved or _unserved(request)
        family, headers = client_family(request), headers_by_name(request.scope)
        pool = next((pool for pool in pools if pool.provider.dialect == family), pools[0])
        self.counters.requests += 1
        try:
            caller = await self.attribution.caller(headers, request.path_params)
            if caller.attempt is not None:
                await self.attempts.get(caller.attempt)
            body = await read_body(request.receive, headers, MAX_UPLOAD_BYTES)
            return await self._forwarding.forward_as_is(pool, request, caller, body)
        except ClientDisconnected:
            self.counters.cancelled += 1
            raise
        except Exception:
            self.counters.errors += 1
            raise

    # -- one call --------------------------------------------------------------------------------------------------

    def repeats(self, message: str) -> int:
        """How often calls have failed with this message, where that is 1, 10, 100 ...; else 0. What all calls fail of,
        such as a wrong key, would fill the log."""
        if len(self._failures) >= MAX_FAILURES:
            self._failures.clear()
        self._failures[message] += 1
        times = self._failures[message]
        return times if str(times).rstrip("0") == "1" else 0

    async def call_model(
        self, path: ApiPath, scope: Scope, receive: Receive, writer: ResponseWriter, is_count: bool
    ) -> None:
        """Serve one model call, or a request for the size of its prompt in tokens (`is_count`), for which nothing is
        sampled or recorded. Raises ApiError and whatever its source raises."""
        started, headers, body = time.time(), headers_by_name(scope), b""
        caller = await self.attribution.caller(headers, scope["path_params"])
        with Slot(self._limit) as slot:
            try:
                body = await read_body(receive, headers, self._max_body_bytes)
                if caller.attempt_id is not None:
                    api_path = scope["path"].rpartition("/v1/")[2]
                    # A digest takes a hundredth of the time that reading the request takes.
                    repeat = await offload(len(body) // 128, partial(repeat_attributes, headers, api_path, body))
                    caller = structs.replace(caller, repeat=repeat)
                await slot.acquire()  # after the body: a slow sender takes no slot
                data = await offload(len(body), partial(read_json, body))
                context = None if caller.attempt is None else await self.attempts.get(caller.attempt)
                call = self.router.resolve_call(path, headers, caller, data, context)
                service = self._local if call.route.servers is None else self._forwarding
                if is_count:
                    return await service.count(call, len(body), writer)
                prepared = await service.prepare(call, len(body))
            except Exception as error:
                if not (is_count or isinstance(error, ClientDisconnected)):
                    await record_rejection(self.attempts.store, path, caller, body, error, started)
                raise
            with self.attempts.track(context), cancel_on_disconnect(receive):
                await prepared.run(writer)


@dataclass(frozen=True, slots=True)
class _ModelCalls:
    """The endpoint of a path. An object, since Starlette takes a function for one that gets a `Request`."""

    gateway: Gateway
    path: ApiPath
    is_count: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call. Any failure becomes an error reply that the caller's SDK understands."""
        gateway, dialect = self.gateway, DIALECTS[self.path]
        gateway.counters.requests += 1
        writer = ResponseWriter(send, scope.get("http_version") != "1.0", dialect.ping)
        name = b"request-id" if dialect is MESSAGES else b"x-request-id"
        # Not from the generator of attempt ids, which could be told from so many of its numbers.
        writer.extra_headers = [(name, b"req_" + secrets.token_hex(12).encode())]
        try:
            await gateway.call_model(self.path, scope, receive, writer, self.is_count)
        except ClientDisconnected:
            gateway.counters.cancelled += 1
        except Exception as error:
            gateway.counters.errors += 1
            api_error = to_api_error(error)
            if api_error.status >= 500 and (times := gateway.repeats(api_error.message)):
                expected = isinstance(error, (ApiError, EngineUnavailableError, *STORE_UNAVAILABLE))
                again = f" ({times} times)" if times > 1 else ""
                logger.error("a call failed%s: %s", again, api_error.message, exc_info=None if expected else error)
            if not writer.started:
                body = dialect.error_body(api_error)
                return await writer.send_json(api_error.status, body, api_error.retry, api_error.retry_after)
            await writer.send_events(dialect.error_event(api_error))
            await writer.close()


async def _ok(request: HttpRequest) -> Response:
    return json_response({"status": "ok"})


def _unserved(request: HttpRequest) -> ApiError:
    path = without_key(request.url.path)
    if request.headers.get("upgrade", "").lower() == "websocket":
        # After this status Codex falls back to HTTP at once; after any other it retries for seconds.
        return ApiError(426, f"{path} is no websocket; send POST requests")
    served = ", ".join(f"POST /v1/{path}" for path in DIALECTS)
    return ApiError(404, f"{request.method} {path} is not served here; served: {served}, GET /v1/models")


def _endpoint(serve: Callable[[HttpRequest], Awaitable[Response]]) -> Callable[[HttpRequest], Awaitable[Response]]:
    """An endpoint whose errors become responses in the format of the client."""

    async def respond(request: HttpRequest) -> Response:
        try:
            return await serve(request)
        except ClientDisconnected:
            return Response(status_code=499)  # Nobody sees it.
        except (ApiError, StoreError) as error:
            api_error = to_api_error(error)
            dialect = MESSAGES if client_family(request) == "anthropic" else CHAT
            return Response(dialect.error_body(api_error), api_error.status, media_type="application/json")

    return respond
