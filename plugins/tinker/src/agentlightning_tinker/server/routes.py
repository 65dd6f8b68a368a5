"""The routes of the Tinker API under /api/v1, for a Starlette application."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
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
from agentlightning_tinker.server.requests import Found, json_response
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
Answer = Found | str | None
"""What is answered; as text, the id of a request whose result is fetched later."""
Endpoint = Callable[[Request], Awaitable[Answer]]
Links = dict[str, tuple[Mapping[str, Path], float]]


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
    open_to_all: dict[str, Endpoint] = {
        "/healthz": _always({"status": "ok"}),
        f"{DOWNLOAD}/{{secret}}/{{name:path}}": of.download,
    }
    gets: dict[str, Endpoint] = {
        "/get_server_capabilities": _always(service.capabilities()),
        "/samplers/{name}": of.sampler_info,
        "/training_runs/{model}/checkpoints/{kind}/{name:path}/external_weights_urls": of.external_urls,
    }
    posts: dict[str, Endpoint] = {
        "/client/config": of.reading(wire.CreateSession, _always(CLIENT_CONFIG)),
        "/client/dynamic_config": _always({"sample_cancel_enabled": True}),
        "/telemetry": _always({"status": "accepted"}),
        "/create_session": of.reading(wire.CreateSession, service.create_session),
        HEARTBEAT: of.reading(wire.SessionId, service.heartbeat),
        "/sessions/{name}/finish": of.end_session,
        "/create_model": of.reading(wire.CreateModel, service.begin),
        "/get_info": of.reading(wire.ModelId, service.info),
        "/weights_info": of.reading(wire.WeightsPath, service.weights_info),
        "/create_sampling_session": of.reading(wire.CreateSampler, service.create_sampler),
        "/asample": of.reading(wire.SampleRequest, service.sample),
        "/retrieve_future": of.reading(wire.RequestId, of.fetch),
        "/cancel_future": of.reading(wire.RequestId, service.cancel),
        "/forward_backward": of.forward_backward,
        "/optim_step": of.reading(wire.OptimStep, service.optim_step),
        "/save_weights": of.reading(wire.SaveWeights, service.save_weights),
        "/save_weights_for_sampler": of.reading(wire.SaveForSampler, service.save_for_sampler),
        "/save_weights_external": of.reading(wire.SaveExternal, service.save_external),
        "/load_weights": of.reading(wire.LoadWeights, service.load_weights),
    }
    return [
        *(Route(BASE + path, _answering(each, None), methods=["GET"]) for path, each in open_to_all.items()),
        *(Route(BASE + path, _answering(each, token), methods=["GET"]) for path, each in gets.items()),
        *(Route(BASE + path, _answering(each, token), methods=["POST"]) for path, each in posts.items()),
        Route(f"{BASE}/{{path:path}}", _answering(_not_offered, token), methods=["GET", "POST", "PUT", "DELETE"]),
    ]


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
            return json_response({"error": str(error), "detail": str(error)}, status)
        if isinstance(found, Response):
            return found
        return json_response({"request_id": found} if isinstance(found, str) else found or {})

    return respond


def _always(answer: Answer) -> Callable[[Any], Awaitable[Answer]]:
    async def give(_: Any) -> Answer:
        return answer

    return give


async def _not_offered(request: Request) -> Answer:
    raise NotFoundError(f"{request.method} {request.url.path} is not offered by this server of the Tinker API")


@dataclass
class _Endpoints:
    """Reads requests, and answers with what the service returns."""

    service: TinkerService
    max_body_bytes: int
    links: Links = field(default_factory=Links)
    """The files that may be downloaded, by a random name of them all, and until when."""

    async def _body(self, request: Request) -> bytes:
        return await receive_body(request.headers, request.receive, self.max_body_bytes, SMALLER)

    def reading(self, kind: type[wire.WireRequest], handler: Callable[[Any], Awaitable[Any]]) -> Endpoint:
        """Handled at once, or in the turn of its model, of which also an error is the result: later requests are not
        kept waiting for it."""

        async def answer(request: Request) -> Answer:
            body, path = await self._body(request), request.url.path

            async def work() -> Any:
                try:
                    given = kind.model_validate_json(body)
                except ValidationError as error:
                    errors = error.errors(include_url=False)
                    found = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in errors)
                    raise ConfigError(f"{path}: {found}") from error
                return await handler(given)

            if (place := wire.Place.of(kind, body)) is not None:
                return self.service.requests_of(place.model_id).enqueue(place.model_id, place.seq_id, work)
            return await work()

        return answer

    async def forward_backward(self, request: Request) -> str:
        kind = request.headers.get("content-type", "")
        if wire.PROTOBUF not in kind or request.headers.get("content-encoding"):
            raise ConfigError(
                f"forward_backward came as {kind or 'unknown'} {request.headers.get('content-encoding', '')}, and this"
                f" server reads {wire.PROTOBUF}: use version {wire.OLDEST_SDK} or newer of the tinker package"
            )
        given = wire.read_request(await self._body(request))
        work = partial(self.service.forward_backward, given)
        return self.service.requests_of(given.model_id).enqueue(given.model_id, given.seq_id, work)

    async def fetch(self, given: wire.RequestId) -> Found:
        name = given.request_id
        result = await self.service.requests_of(name).fetch(name, POLL_SECONDS)
        return result or {"type": "try_again", "request_id": name, "queue_state": "active"}

    async def end_session(self, request: Request) -> None:
        await self.service.end_session(request.path_params["name"])

    async def sampler_info(self, request: Request) -> Found:
        return self.service.sampler_info(request.path_params["name"])

    async def external_urls(self, request: Request) -> Found:
        """A URL for each file, at the address by which the client reaches this server."""
        given, now, secret = request.path_params, time.time(), secrets.token_urlsafe(32)
        path = f"{SCHEME}{given['model']}/{given['kind']}/{quote(given['name'], safe='')}"
        files = await self.service.external_files(path)
        self.links = {link: known for link, known in self.links.items() if known[1] > now}
        self.links[secret] = files, now + LINK_SECONDS
        root = f"{request.url.scheme}://{request.url.netloc}{BASE}{DOWNLOAD}/{secret}"
        urls = {name: f"{root}/{quote(name)}" for name in files}
        return {"urls": urls, "expires": datetime.fromtimestamp(now + LINK_SECONDS, UTC).isoformat()}

    async def download(self, request: Request) -> Response:
        """A file, for who has its URL."""
        files, until = self.links.get(request.path_params["secret"], ({}, 0.0))
        file = files.get(request.path_params["name"])
        if file is None or until < time.time():
            message = "this URL is not one of this server, or has expired; ask for another one"
            return json_response({"error": message, "detail": message}, 403)
        if not file.is_file():
            raise NotFoundError(f"{file.name} is no longer there; save the weights again")
        return FileResponse(file, media_type="application/octet-stream")
