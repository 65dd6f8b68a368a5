"""The routes of the Tinker API under /api/v1, for a Starlette application."""

from __future__ import annotations

import asyncio
import hmac
import inspect
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

import orjson
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route

from agentlightning.errors import AgentLightningError, ConfigError, ContextLengthError, NotFoundError
from agentlightning.policy.config import PolicyConfig
from agentlightning.policy.open import policy_config
from agentlightning.store.http.endpoint import ClientDisconnected, receive_body
from agentlightning_tinker.server import messages, wire
from agentlightning_tinker.server.host import AdapterHost
from agentlightning_tinker.server.requests import JSON, PROTOBUF
from agentlightning_tinker.server.service import SCHEME, TinkerService

BASE: Final = "/api/v1"
DOWNLOAD: Final = "/download"
HEARTBEAT: Final = "/session_heartbeat"
MAX_BODY_BYTES: Final = 64 << 20
SMALLER: Final = "send fewer sequences at once, or raise --max-body"
POLL_SECONDS: Final = 20.0
"""How long a request for a result waits for it."""
LINK_SECONDS: Final = 3600.0
"""How long the URL of a file is valid. Who has it may download the file, without the API key."""
CLIENT_CONFIG: Final = {
    "pjwt_auth_enabled": False,
    "credential_default_source": "api_key",
    "proto_compress_fwdbwd": False,
    "custom_loss_server_side": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    "use_pyqwest_transport": False,
}
R = TypeVar("R", bound=wire.WireRequest)
Endpoint = Callable[[Request], Awaitable[Response]]
Handler = Callable[[Any], Any]
"""Answers a request that was read: with JSON, with a response, or, as text, with the id of a request whose result is
fetched later. May be a coroutine."""


@asynccontextmanager
async def open_routes(
    models: Sequence[str], folder: Path, token: str | None, max_body_bytes: int
) -> AsyncGenerator[list[BaseRoute]]:
    """The routes for models given as [NAME=]MODEL, over which adapters are trained and sampled; the rest as
    `tinker_routes`. Raises PolicyError for a model that is not there."""
    named = [model.partition("=") for model in models]
    paths = {name if equals else Path(name).name.removesuffix(".gguf"): path or name for name, equals, path in named}
    configs = [policy_config(PolicyConfig(), path).model_copy(update={"name": name}) for name, path in paths.items()]
    hosts = {config.name: await asyncio.to_thread(AdapterHost.open, config) for config in configs}
    async with tinker_routes(hosts, folder, token, max_body_bytes=max_body_bytes) as routes:
        yield routes


@asynccontextmanager
async def tinker_routes(
    hosts: Mapping[str, AdapterHost], folder: Path, token: str | None, *, max_body_bytes: int = MAX_BODY_BYTES
) -> AsyncGenerator[list[BaseRoute]]:
    """The routes, which serve `hosts` by the name of their model and close them at the end. Saved weights go below
    `folder`. With a `token`, all but the health check need it as the API key, with or without the prefix `tml-`."""
    service = TinkerService(hosts, folder)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(service.close)
        watch = asyncio.create_task(service.end_silent_sessions())
        stack.callback(watch.cancel)
        yield _routes(service, max_body_bytes, token)


def _routes(service: TinkerService, max_body_bytes: int, token: str | None) -> list[BaseRoute]:
    of = _Endpoints(service, max_body_bytes)
    requests: dict[str, tuple[type[wire.WireRequest], Handler]] = {
        "/client/config": (wire.CreateSession, lambda _: CLIENT_CONFIG),
        "/create_session": (wire.CreateSession, service.create_session),
        HEARTBEAT: (wire.SessionId, service.heartbeat),
        "/create_model": (wire.CreateModel, service.begin),
        "/get_info": (wire.ModelId, service.info),
        "/weights_info": (wire.WeightsPath, service.weights_info),
        "/create_sampling_session": (wire.CreateSampler, service.create_sampler),
        "/asample": (wire.SampleRequest, service.sample),
        "/retrieve_future": (wire.RequestId, of.fetch),
        "/cancel_future": (wire.RequestId, lambda given: service.requests.cancel(given.request_id)),
        "/optim_step": (wire.OptimStep, service.optim_step),
        "/save_weights": (wire.SaveWeights, service.save_weights),
        "/save_weights_for_sampler": (wire.SaveForSampler, service.save_for_sampler),
        "/save_weights_external": (wire.SaveExternal, service.save_external),
        "/load_weights": (wire.LoadWeights, service.load_weights),
    }
    posts: dict[str, Endpoint] = {
        "/client/dynamic_config": _of_path(lambda: {"sample_cancel_enabled": True}),
        "/telemetry": _of_path(lambda: {"status": "accepted"}),
        "/sessions/{name}/finish": _of_path(service.end_session),
        "/forward_backward": of.forward_backward,
        **{path: of.reading(*each) for path, each in requests.items()},
    }
    gets: dict[str, Endpoint] = {
        "/get_server_capabilities": _of_path(service.capabilities),
        "/samplers/{name}": _of_path(service.sampler_info),
        "/training_runs/{model}/checkpoints/{kind}/{name:path}/external_weights_urls": of.external_urls,
    }
    return [
        Route(f"{BASE}/healthz", _of_path(lambda: {"status": "ok"}), methods=["GET"]),
        Route(f"{BASE}{DOWNLOAD}/{{link}}", _guarded(of.download, None), methods=["GET"]),
        *(Route(BASE + path, _guarded(each, token), methods=["POST"]) for path, each in posts.items()),
        *(Route(BASE + path, _guarded(each, token), methods=["GET"]) for path, each in gets.items()),
        Route(f"{BASE}/{{path:path}}", _guarded(_unknown, token), methods=["GET", "POST", "PUT", "DELETE"]),
    ]


def _guarded(endpoint: Endpoint, token: str | None) -> Endpoint:
    """The endpoint for those who have the key, with errors as answers."""

    async def answer(request: Request) -> Response:
        given = request.headers.get("x-api-key", "")
        if token is not None and not any(
            hmac.compare_digest(given.encode(), each.encode()) for each in (token, f"tml-{token}")
        ):
            return _error(401, "the API key is not that of this server; set TINKER_API_KEY to tml- and its token")
        try:
            return await endpoint(request)
        except NotFoundError as error:
            return _error(410 if request.url.path == BASE + HEARTBEAT else 404, str(error))
        except (ConfigError, ContextLengthError) as error:
            return _error(400, str(error))
        except ClientDisconnected:
            return _error(400, "the request ended before its body")
        except AgentLightningError as error:
            return _error(500, str(error))

    return answer


def _error(status: int, message: str) -> Response:
    return _json({"error": message, "detail": message}, status)


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type=JSON)


async def _answer(found: Any) -> Response:
    """What a `Handler` returned, as a response."""
    found = await found if inspect.isawaitable(found) else found
    if isinstance(found, Response):
        return found
    return _json({"request_id": found} if isinstance(found, str) else found or {})


def _of_path(handler: Callable[..., Any]) -> Endpoint:
    """As a `Handler`, of the parameters in the path; no body is read."""

    async def answer(request: Request) -> Response:
        return await _answer(handler(**request.path_params))

    return answer


async def _unknown(request: Request) -> Response:
    return _error(404, f"{request.method} {request.url.path} is not offered by this server of the Tinker API")


@dataclass
class _Endpoints:
    """Reads requests, and answers with what the service returns."""

    service: TinkerService
    max_body_bytes: int
    links: dict[str, tuple[Path, float]] = field(default_factory=dict[str, tuple[Path, float]])
    """The files that may be downloaded, by a random name, and until when."""

    async def _body(self, request: Request) -> bytes:
        return await receive_body(request.receive, self.max_body_bytes, SMALLER)

    def reading(self, kind: type[wire.WireRequest], handler: Handler) -> Endpoint:
        """At once, or in the turn of its model, of which also an error is the result: later requests are not kept
        waiting for it."""

        async def answer(request: Request) -> Response:
            body, path = await self._body(request), request.url.path
            place = wire.Place.of(body) if kind.has_turn else None
            if place is None:
                return await _answer(handler(_parsed(body, kind, path)))

            async def work() -> Mapping[str, Any]:
                return await handler(_parsed(body, kind, path))

            return await _answer(self.service.requests.enqueue(place.model_id, place.seq_id, work))

        return answer

    async def forward_backward(self, request: Request) -> Response:
        kind = request.headers.get("content-type", "")
        if PROTOBUF not in kind or request.headers.get("content-encoding"):
            raise ConfigError(
                f"forward_backward came as {kind or 'unknown'} {request.headers.get('content-encoding', '')}, and this"
                f" server reads {PROTOBUF}: use version {wire.OLDEST_SDK} or newer of the tinker package"
            )
        given = messages.read_request(await self._body(request))
        work = partial(self.service.forward_backward, given)
        return await _answer(self.service.requests.enqueue(given.model_id, given.seq_id, work))

    async def fetch(self, given: wire.RequestId) -> Any:
        result = await self.service.requests.fetch(given.request_id, POLL_SECONDS)
        if result is None:
            return {"type": "try_again", "request_id": given.request_id, "queue_state": "active"}
        return Response(result.body, media_type=result.media_type)

    async def external_urls(self, request: Request) -> Response:
        """A URL for each file, at the address by which the client reaches this server."""
        given, now = request.path_params, time.time()
        path = f"{SCHEME}{given['model']}/{given['kind']}/{quote(given['name'], safe='')}"
        links = {secrets.token_urlsafe(32): each for each in (await self.service.external_files(path)).items()}
        self.links = {link: known for link, known in self.links.items() if known[1] > now}
        self.links |= {link: (file, now + LINK_SECONDS) for link, (_, file) in links.items()}
        root = f"{request.url.scheme}://{request.url.netloc}{BASE}{DOWNLOAD}"
        urls = {name: f"{root}/{link}" for link, (name, _) in links.items()}
        return _json({"urls": urls, "expires": datetime.fromtimestamp(now + LINK_SECONDS, UTC).isoformat()})

    async def download(self, request: Request) -> Response:
        """A file, for who has its URL."""
        file, until = self.links.get(request.path_params["link"], (None, 0.0))
        if file is None or until < time.time():
            return _error(403, "this URL is not one of this server, or has expired; ask for another one")
        if not file.is_file():
            raise NotFoundError(f"{file.name} is no longer there; save the weights again")
        return FileResponse(file, media_type="application/octet-stream")


def _parsed(body: bytes, kind: type[R], path: str) -> R:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
        raise ConfigError(f"{path}: {found}") from error
