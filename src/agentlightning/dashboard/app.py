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
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from agentlightning.dashboard.actions import act, export
from agentlightning.dashboard.data.rollouts import RolloutSummary
from agentlightning.dashboard.data.run_data import Catalog, RunData
from agentlightning.dashboard.query import Query
from agentlightning.dashboard.views import rollout, rollouts, runs
from agentlightning.errors import NotFoundError
from agentlightning.store.http.endpoint import RequestError, endpoint, read_body, respond, respond_in_parts
from agentlightning.util.json_values import Json

PATH = "/dashboard"
MAX_BODY = 256 * 1024
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
UNCACHED = {**HEADERS, "cache-control": "no-store"}
STATIC = Path(__file__).parent / "static"
VIEWS: Mapping[str, Callable[[Any, Query], Awaitable[Json]]] = {
    "/runs": runs.list_runs,
    "/compare": runs.compare,
    "/runs/{run}": runs.show_run,
    "/runs/{run}/status": runs.show_status,
    "/runs/{run}/search": runs.show_search,
    "/runs/{run}/steps/{step}": rollouts.show_step,
    "/runs/{run}/rollouts": rollouts.list_rollouts,
    "/runs/{run}/changes": rollouts.show_changes,
    "/runs/{run}/rollouts/{rollout}": rollout.show_rollout,
    "/runs/{run}/rollouts/{rollout}/tokens": rollout.show_tokens,
    "/runs/{run}/rollouts/{rollout}/group": rollout.show_group,
    "/runs/{run}/tasks": runs.list_tasks,
    "/runs/{run}/tasks/{task}": rollouts.show_task,
    "/runs/{run}/server": rollouts.show_server,
    "/runs/{run}/failures": rollouts.list_failures,
    "/runs/{run}/resources": runs.list_resources,
    "/runs/{run}/weights": runs.list_weights,
}
"""The JSON of each view, by its path below /dashboard/api: a function of the run that the path names, or else of the
catalog, and of the query. The page of a view has the same path below /dashboard."""


def dashboard_routes(data: Catalog, token: str | None) -> list[BaseRoute]:
    """Routes for a Starlette application. With a `token`, all data requires it."""
    posts = {"/runs/{run}/actions/{action}": _action, "/runs/{run}/export": _export}

    def route(path: str, answer: Callable[[Any, Request], Awaitable[Response]], method: str) -> Route:
        async def handle(request: Request) -> Response:
            if (name := request.path_params.get("run")) is None:
                return await answer(data, request)
            run = await data.run(name)
            with run.reading():
                return await answer(run, request)

        return Route(f"{PATH}/api{path}", endpoint(handle, token, UNCACHED), methods=[method])

    return [
        *(route(path, partial(_view, view), "GET") for path, view in VIEWS.items()),
        *(route(path, answer, "POST") for path, answer in posts.items()),
        *(route("/{path:path}", _unknown, method) for method in ("GET", "POST")),
        Mount(f"{PATH}/static", _Static(directory=STATIC)),
        Route(PATH, _page, methods=["GET"]),
        Route(f"{PATH}/{{path:path}}", _page, methods=["GET"]),
    ]


# -- the JSON ----------------------------------------------------------------------------------------------------------


def _json(request: Request, content: Any) -> Response:
    """A JSON response; that of a view with an ETag, so that a page that asks again is sent what has changed."""
    body = orjson.dumps(content, default=_plain, option=orjson.OPT_NON_STR_KEYS)
    if request.method != "GET":
        return respond(body, headers=UNCACHED)
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = {**HEADERS, "cache-control": "private, no-cache", "etag": tag}
    unchanged = request.headers.get("if-none-match") == tag
    return respond(b"", 304, headers) if unchanged else respond(body, headers=headers)


def _plain(value: Any) -> Any:
    return vars(value) if isinstance(value, RolloutSummary) else str(value)


async def _view(view: Callable[[Any, Query], Awaitable[Json]], of: Any, request: Request) -> Response:
    return _json(request, await view(of, Query({**request.query_params, **request.path_params})))


async def _action(run: RunData, request: Request) -> Response:
    return _json(request, await act(run, request.path_params["action"], await _body(request)))


async def _export(run: RunData, request: Request) -> Response:
    lines, counts = await export(run, await _body(request))
    return await respond_in_parts(lines, headers={**HEADERS, **counts, "content-type": "application/x-ndjson"})


async def _unknown(of: Any, request: Request) -> Response:
    raise NotFoundError(f"there is no view at {request.url.path!r}; the views are: {', '.join(VIEWS)}")


async def _body(request: Request) -> Any:
    """The JSON of a request. A page of another site cannot send this content type without being asked first."""
    data = await read_body(request.headers, request.receive, MAX_BODY)
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
