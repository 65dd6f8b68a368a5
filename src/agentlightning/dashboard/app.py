"""The routes of the dashboard: the page and its files for anybody, the JSON of every view for those with the token.

    /dashboard/...         the page; it reads the JSON of the same path below /dashboard/api
    /dashboard/static/...  its files, none of which comes from elsewhere
    /dashboard/api/...     the JSON of every view; POST for actions

The page itself holds no data. Its Content-Security-Policy allows scripts and styles of this server alone, and none in
the page: text of agents that is taken for HTML somewhere still runs nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from agentlightning.dashboard.actions import act, export
from agentlightning.dashboard.data.run_data import Catalog
from agentlightning.dashboard.query import Query
from agentlightning.dashboard.views import (
    resources,
    rollout,
    rollouts,
    runs,
    tasks,
)
from agentlightning.errors import AgentLightningError, NotFoundError
from agentlightning.store.http.encoding import RequestError, encode, error_response, status_of
from agentlightning.store.http.endpoint import authorize, read_body

PATH: Final = "/dashboard"
MAX_BODY: Final = 256 * 1024
HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
STATIC: Final = Path(__file__).parent / "static"
Handler = Callable[[Request], Awaitable[Response]]
View = Callable[[Catalog, Query], Awaitable[dict[str, Any]]]
VIEWS: Final[Mapping[str, View]] = {
    "/runs": runs.list_runs,
    "/compare": runs.compare,
    "/runs/{run}": runs.show_run,
    "/runs/{run}/status": runs.show_status,
    "/runs/{run}/search": resources.show_search,
    "/runs/{run}/steps/{step}": rollouts.show_step,
    "/runs/{run}/rollouts": rollouts.list_rollouts,
    "/runs/{run}/changes": rollouts.show_changes,
    "/runs/{run}/rollouts/{rollout}": rollout.show_rollout,
    "/runs/{run}/rollouts/{rollout}/tokens": rollout.show_tokens,
    "/runs/{run}/rollouts/{rollout}/group": rollout.show_group,
    "/runs/{run}/tasks": tasks.list_tasks,
    "/runs/{run}/tasks/{task}": rollouts.show_task,
    "/runs/{run}/server": rollouts.show_server,
    "/runs/{run}/failures": rollouts.list_failures,
    "/runs/{run}/resources": resources.list_resources,
    "/runs/{run}/weights": resources.list_weights,
}
"""The JSON of each view, by its path below /dashboard/api. The page of a view has the same path below /dashboard."""

EXPORT: Final = "/runs/{run}/export"


def dashboard_routes(data: Catalog, token: str | None) -> list[BaseRoute]:
    """Routes for a Starlette application. With a `token`, all data requires it."""
    api = f"{PATH}/api"
    return [
        *(Route(f"{api}{path}", authorized(token, _view(data, view)), methods=["GET"]) for path, view in VIEWS.items()),
        Route(f"{api}/runs/{{run}}/actions/{{action}}", authorized(token, _action(data)), methods=["POST"]),
        Route(f"{api}{EXPORT}", authorized(token, _export(data)), methods=["POST"]),
        Route(f"{api}/{{path:path}}", authorized(token, unknown), methods=["GET", "POST"]),
        *page_routes(),
    ]


def page_routes() -> list[BaseRoute]:
    """The page and its files, which hold no data."""
    return [
        Mount(f"{PATH}/static", _Static(directory=STATIC)),
        Route(PATH, _page, methods=["GET"]),
        Route(f"{PATH}/{{path:path}}", _page, methods=["GET"]),
    ]


# -- the JSON ----------------------------------------------------------------------------------------------------------


def json_response(request: Request, content: Any) -> Response:
    """A JSON response; that of a view with an ETag, so that a page that asks again is sent what has changed."""
    body = orjson.dumps(content, default=_plain, option=orjson.OPT_NON_STR_KEYS)
    if request.method != "GET":
        return Response(body, 200, {**HEADERS, "cache-control": "no-store"}, media_type="application/json")
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = {**HEADERS, "cache-control": "private, no-cache", "etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type="application/json")


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset | tuple):
        return list(value)  # pyright: ignore[reportUnknownArgumentType]
    return str(value)


def error_json(error: AgentLightningError, status: int | None = None) -> Response:
    """An error as a response, with the status of its kind unless another is given."""
    headers = {**HEADERS, "cache-control": "no-store"}
    return Response(encode(error_response(error)), status or status_of(error), headers, media_type="application/json")


def authorized(token: str | None, handler: Handler) -> Handler:
    """A handler for those with the token, whose errors are JSON."""

    async def respond(request: Request) -> Response:
        try:
            authorize(dict(request.headers), token)
            return await handler(request)
        except AgentLightningError as error:
            return error_json(error)

    return respond


def _view(data: Catalog, view: View) -> Handler:
    async def respond(request: Request) -> Response:
        query = Query(dict(request.path_params), dict(request.query_params))
        return json_response(request, await view(data, query))

    return respond


def _action(data: Catalog) -> Handler:
    async def respond(request: Request) -> Response:
        parts = request.path_params
        return json_response(request, await act(data, parts["run"], parts["action"], await _body(request)))

    return respond


def _export(data: Catalog) -> Handler:
    async def respond(request: Request) -> Response:
        lines, counts = await export(data, request.path_params["run"], await _body(request))
        return StreamingResponse(lines, headers={**HEADERS, **counts}, media_type="application/x-ndjson")

    return respond


async def unknown(request: Request) -> Response:
    """Answers what is no view."""
    raise NotFoundError(f"there is no view at {request.url.path!r}; the views are: {', '.join(VIEWS)}")


async def _body(request: Request) -> Any:
    """The JSON of a request. A page of another site cannot send this content type without being asked first."""
    data = await read_body(dict(request.headers), request.receive, MAX_BODY)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the request is not JSON ({error})") from None


# -- the page ----------------------------------------------------------------------------------------------------------


class _Static(StaticFiles):
    """The files of the page, with the headers of all that is served here."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(HEADERS)
        return response


async def _page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html", headers=HEADERS)
