"""The routes of the Tinker API under /api/v1, for a Starlette application."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from secrets import token_urlsafe
from typing import Any, Final
from urllib.parse import quote

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route

from agentlightning.errors import AgentLightningError, ConfigError, ContextLengthError, NotFoundError, StoreAuthError
from agentlightning.policy.config import PolicyConfig
from agentlightning.policy.open import policy_config
from agentlightning.store.http.endpoint import ClientDisconnected, receive_body, status_of
from agentlightning_tinker.server import wire
from agentlightning_tinker.server.host import AdapterHost
from agentlightning_tinker.server.service import SCHEME, TinkerService
from agentlightning_tinker.server.sessions import Found, json_response

BASE: Final = "/api/v1"
HEALTH: Final = "GET /healthz"
DOWNLOAD: Final = "GET /download/{link:path}"
HEARTBEAT: Final = "/session_heartbeat"
MAX_BODY_BYTES: Final = 64 << 20
SMALLER: Final = "send fewer sequences at once, or raise --max-body"
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
Endpoint = Callable[[Request], Awaitable[Found]]


@asynccontextmanager
async def open_routes(
    models: Sequence[str], folder: Path, token: str | None, max_body_bytes: int
) -> AsyncGenerator[list[BaseRoute]]:
    """The routes for models given as [NAME=]MODEL, over which adapters are trained and sampled; the rest as
    `tinker_routes`. Raises PolicyError for a model that is not there."""
    named = [model.partition("=") for model in models]
    paths = {name if equals else Path(name).name.removesuffix(".gguf"): path or name for name, equals, path in named}
    configs = [policy_config(PolicyConfig(), path).model_copy(update={"name": name}) for name, path in paths.items()]
    hosts = [await asyncio.to_thread(AdapterHost.open, config) for config in configs]
    async with tinker_routes(hosts, folder, token, max_body_bytes=max_body_bytes) as routes:
        yield routes


@asynccontextmanager
async def tinker_routes(
    hosts: Sequence[AdapterHost], folder: Path, token: str | None, *, max_body_bytes: int = MAX_BODY_BYTES
) -> AsyncGenerator[list[BaseRoute]]:
    """The routes, which serve `hosts` by the name of their model and close them at the end. Saved weights go below
    `folder`. With a `token`, all but the health check need it as the API key, with or without the prefix `tml-`."""
    service = TinkerService(hosts, folder)
    watch = asyncio.create_task(service.end_silent_sessions())
    try:
        yield _routes(service, max_body_bytes, token)
    finally:
        watch.cancel()
        await service.close()


def _routes(service: TinkerService, max_body_bytes: int, token: str | None) -> list[BaseRoute]:
    of = _Endpoints(service, max_body_bytes)
    endpoints: dict[str, Endpoint] = {
        HEALTH: _always({"status": "ok"}),
        DOWNLOAD: of.download,
        "GET /get_server_capabilities": _always(service.capabilities()),
        "GET /samplers/{name}": of.sampler_info,
        "GET /training_runs/{model}/checkpoints/{kind}/{name:path}/external_weights_urls": of.external_urls,
        "POST /client/config": of.reading(wire.CreateSession, _always(CLIENT_CONFIG)),
        "POST /client/dynamic_config": _always({"sample_cancel_enabled": True}),
        "POST /telemetry": _always({"status": "accepted"}),
        "POST /create_session": of.reading(wire.CreateSession, service.create_session),
        f"POST {HEARTBEAT}": of.reading(wire.SessionId, service.heartbeat),
        "POST /sessions/{name}/finish": of.end_session,
        "POST /create_model": of.reading(wire.CreateModel, service.begin),
        "POST /get_info": of.reading(wire.ModelId, service.info),
        "POST /weights_info": of.reading(wire.WeightsPath, service.weights_info),
        "POST /create_sampling_session": of.reading(wire.CreateSampler, service.create_sampler),
        "POST /asample": of.reading(wire.SampleRequest, service.sample),
        "POST /retrieve_future": of.reading(wire.RequestId, service.fetch),
        "POST /cancel_future": of.reading(wire.RequestId, service.cancel),
        "POST /forward_backward": of.forward_backward,
        "POST /optim_step": of.reading(wire.OptimStep, service.optim_step),
        "POST /save_weights": of.reading(wire.SaveWeights, service.save_weights),
        "POST /save_weights_for_sampler": of.reading(wire.SaveForSampler, service.save_for_sampler),
        "POST /save_weights_external": of.reading(wire.SaveExternal, service.save_external),
        "POST /load_weights": of.reading(wire.LoadWeights, service.load_weights),
        "GET,POST,PUT,DELETE /{path:path}": _not_offered,
    }
    routes: list[BaseRoute] = []
    for name, endpoint in endpoints.items():
        methods, path = name.split()
        key = None if name in (HEALTH, DOWNLOAD) else token
        routes.append(Route(BASE + path, _answering(endpoint, key), methods=methods.split(",")))
    return routes


def _answering(endpoint: Endpoint, token: str | None) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint for those who have the key, with errors as answers."""

    async def respond(request: Request) -> Response:
        given = request.headers.get("x-api-key", "").encode()
        try:
            if token is not None and not any(
                hmac.compare_digest(given, each.encode()) for each in (token, f"tml-{token}")
            ):
                raise StoreAuthError("the API key is not that of this server; set TINKER_API_KEY to tml- and its token")
            found = await endpoint(request)
        except ClientDisconnected:
            return Response(status_code=400)
        except AgentLightningError as error:
            ended = isinstance(error, NotFoundError) and request.url.path == BASE + HEARTBEAT
            status = 410 if ended else 400 if isinstance(error, ContextLengthError) else status_of(error)
            return _error(str(error), status)
        return found if isinstance(found, Response) else json_response(found)

    return respond


def _error(message: str, status: int) -> Response:
    return json_response({"error": message, "detail": message}, status)


def _always(answer: Found) -> Callable[[Any], Awaitable[Found]]:
    async def give(_: Any) -> Found:
        return answer

    return give


async def _not_offered(request: Request) -> Found:
    raise NotFoundError(f"{request.method} {request.url.path} is not offered by this server of the Tinker API")


@dataclass
class _Endpoints:
    """Reads requests, and answers with what the service returns."""

    service: TinkerService
    max_body_bytes: int
    links: dict[str, tuple[Path, float]] = field(default_factory=dict[str, tuple[Path, float]])
    """The files that may be downloaded, each by a random name of its own, and until when."""

    async def _body(self, request: Request) -> bytes:
        return await receive_body(request.headers, request.receive, self.max_body_bytes, SMALLER)

    def reading(self, kind: type[wire.WireRequest], handler: Callable[[Any], Awaitable[Found]]) -> Endpoint:
        """Handled at once, or in the turn of its model, of which also an error is the result: later requests are not
        kept waiting for it."""

        async def answer(request: Request) -> Found:
            body, path = await self._body(request), request.url.path

            async def work() -> Found:
                try:
                    given = kind.model_validate_json(body)
                except ValidationError as error:
                    errors = error.errors(include_url=False)
                    found = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in errors)
                    raise ConfigError(f"{path}: {found}") from error
                return await handler(given)

            if "model_id" in kind.model_fields:
                with suppress(ValidationError):  # It has no turn, or does not say which one.
                    return self.service.enqueue(wire.Place.model_validate_json(body), work)
            return await work()

        return answer

    async def forward_backward(self, request: Request) -> Found:
        kind = request.headers.get("content-type", "")
        if wire.PROTOBUF not in kind or request.headers.get("content-encoding"):
            raise ConfigError(
                f"forward_backward came as {kind or 'unknown'} {request.headers.get('content-encoding', '')}, and this"
                f" server reads {wire.PROTOBUF}: use version {wire.OLDEST_SDK} or newer of the tinker package"
            )
        given = wire.read_request(await self._body(request))
        return self.service.enqueue(given, partial(self.service.forward_backward, given))

    async def end_session(self, request: Request) -> Found:
        await self.service.end_session(request.path_params["name"])
        return {}

    async def sampler_info(self, request: Request) -> Found:
        return self.service.sampler_info(request.path_params["name"])

    async def external_urls(self, request: Request) -> Found:
        """A URL for each file, at the address by which the client reaches this server."""
        given, now = request.path_params, time.time()
        path = f"{SCHEME}{given['model']}/{given['kind']}/{quote(given['name'], safe='')}"
        links = {f"{token_urlsafe(32)}/{n}": file for n, file in (await self.service.external_files(path)).items()}
        self.links = {link: known for link, known in self.links.items() if known[1] > now}
        self.links |= {link: (file, now + LINK_SECONDS) for link, file in links.items()}
        root = f"{request.url.scheme}://{request.url.netloc}{BASE}/download/"
        urls = {link.partition("/")[2]: root + quote(link) for link in links}
        return {"urls": urls, "expires": datetime.fromtimestamp(now + LINK_SECONDS, UTC).isoformat()}

    async def download(self, request: Request) -> Response:
        """A file, for who has its URL."""
        file, until = self.links.get(request.path_params["link"], (None, 0.0))
        if file is None or until < time.time():
            return _error("this URL is not one of this server, or has expired; ask for another one", 403)
        if not file.is_file():
            raise NotFoundError(f"{file.name} is no longer there; save the weights again")
        return FileResponse(file, media_type="application/octet-stream")
