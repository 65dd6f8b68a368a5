"""The routes of the dashboard: the page and its files for anybody; for those with the token the JSON of every view,
and actions: cancel, requeue, retry and annotate rollouts, and export a selection of them.

    /dashboard/...         the page; it reads the JSON of the same path below /dashboard/api
    /dashboard/static/...  its files, none of which comes from elsewhere
    /dashboard/api/...     the JSON of every view; POST for actions

The page itself holds no data. Its Content-Security-Policy allows scripts and styles of this server alone, and none in
the page: text of agents that is taken for HTML somewhere still runs nothing.

An action names rollouts by their ids, and answers for each what became of it: one that cannot be changed does not stop
the others. An export names them so, or by the filters of the table, and is written as

rollouts   `agl store import` reads them
sft        {"messages": [...], "tools": [...]}, as `agl sft --data` reads them
dpo        {"prompt": [...], "chosen": [...], "rejected": [...]}, as `agl dpo --data` reads them
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from agentlightning.dashboard.data.rollouts import RolloutSummary
from agentlightning.dashboard.data.run_data import Catalog, RunData
from agentlightning.dashboard.query import Query
from agentlightning.dashboard.views import rollout, rollouts, runs
from agentlightning.dashboard.views.rollouts import MOST_ROWS, Table, select
from agentlightning.errors import AgentLightningError, ConfigError, DatasetError, NotFoundError
from agentlightning.recording.feedback import Feedback, add_feedback
from agentlightning.rollouts import Rollout
from agentlightning.store.export.jsonl import end_line, header_line, item_line
from agentlightning.store.http.endpoint import RequestError, endpoint, read_body, respond, respond_in_parts
from agentlightning.training.export import DatasetForm, Selection, dataset_records
from agentlightning.util.json_values import Json, is_list, is_table

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
    posts = {"/runs/{run}/actions/{action}": _act, "/runs/{run}/export": _export}

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


async def _view(view: Callable[[Any, Query], Awaitable[Json]], of: Any, request: Request) -> Response:
    """The JSON of a view, with an ETag, so that a page that asks again is sent what has changed."""
    content = await view(of, Query({**request.query_params, **request.path_params}))
    body = orjson.dumps(content, default=_plain, option=orjson.OPT_NON_STR_KEYS)
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = {**HEADERS, "cache-control": "private, no-cache", "etag": tag}
    unchanged = request.headers.get("if-none-match") == tag
    return respond(b"", 304, headers) if unchanged else respond(body, headers=headers)


def _plain(value: Any) -> Any:
    return vars(value) if isinstance(value, RolloutSummary) else str(value)


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


# -- actions -----------------------------------------------------------------------------------------------------------


MOST_IDS = 1000
RETRY_OF = "retry_of"
"""In the metadata of a rollout: the one whose task is run again."""
SOURCE = "dashboard"
"""Who gave feedback, where the user did not say."""


async def _act(run: RunData, request: Request) -> Response:
    """Do something to each rollout that a request names. Raises ConfigError for a request that cannot be."""
    action, body = request.path_params["action"], await _body(request)
    if not run.writable:
        raise ConfigError("this dashboard only reads; open that of the server, with its access token")
    if action not in ACTIONS:
        raise ConfigError(f"action {action!r} is none of: {', '.join(ACTIONS)}")
    ids = ids_in(body)
    results: Json = {}
    for rollout_id in ids:
        try:
            results[rollout_id] = {"done": True, **await ACTIONS[action](run, rollout_id, body)}
        except AgentLightningError as error:
            results[rollout_id] = {"done": False, "error": str(error)}
    run.summaries.forget(await run.by_ids(ids))
    done = sum(each["done"] for each in results.values())
    return respond(orjson.dumps({"action": action, "results": results, "done": done}), headers=UNCACHED)


def ids_in(body: Any) -> list[str]:
    """The rollouts that a request names. Raises ConfigError."""
    ids = body.get("rollout_ids") if is_table(body) else None
    if not is_list(ids) or not ids or not all(isinstance(each, str) for each in ids):
        raise ConfigError('the request names no rollouts; send {"rollout_ids": ["..."]}')
    if len(ids) > MOST_IDS:
        raise ConfigError(f"the request names {len(ids)} rollouts; at most {MOST_IDS} are changed at once")
    return list(dict.fromkeys(ids))


async def _cancel(run: RunData, rollout_id: str, body: Mapping[str, Any]) -> Json:
    return {"status": (await run.store.cancel_rollout(rollout_id)).status}


async def _requeue(run: RunData, rollout_id: str, body: Mapping[str, Any]) -> Json:
    """The same rollout waits again; a succeeded one cannot."""
    return {"status": (await run.store.requeue_rollout(rollout_id, "requeued from the dashboard")).status}


async def _retry(run: RunData, rollout_id: str, body: Mapping[str, Any]) -> Json:
    """A new rollout of the same task, which leaves this one as it is."""
    rollout = await run.rollout(rollout_id)
    new = await run.store.enqueue_rollout(
        rollout.input,
        rollout.mode,
        rollout.resources_id,
        rollout.config,
        {RETRY_OF: rollout_id},
        f"ro-{uuid.uuid4().hex[:20]}",
        queue=rollout.queue,
        priority=rollout.priority,
    )
    return {"status": new.status, "rollout_id": new.rollout_id}


async def _annotate(run: RunData, rollout_id: str, body: Mapping[str, Any]) -> Json:
    """Feedback as a span: a score becomes the final reward of the rollout, a label can be filtered by."""
    given = {name: body[name] for name in ("score", "label", "comment") if body.get(name) not in (None, "")}
    source = body.get("source") or SOURCE
    if not isinstance(source, str):
        raise ConfigError(f"source={source!r:.80} is not text")
    span = await add_feedback(run.store, rollout_id, Feedback(**given), source)
    return {"span_id": span.span_id}


ACTIONS: Mapping[str, Callable[[RunData, str, Mapping[str, Any]], Awaitable[Json]]] = {
    "cancel": _cancel,
    "requeue": _requeue,
    "retry": _retry,
    "annotate": _annotate,
}


# -- export -----------------------------------------------------------------------------------------------------------


ROLLOUTS = "rollouts"
DATASETS: Mapping[str, DatasetForm] = {"sft": "openai-jsonl", "dpo": "dpo-jsonl"}
RECORDS_HEADER = "x-agl-records"
SKIPPED_HEADER = "x-agl-skipped"
"""JSON: how many gave no record, by reason."""
MOST_EXPORTED = 20_000
"""Rollouts that filters may select."""
CHUNK = 50


async def export(run: RunData, body: Any) -> tuple[AsyncIterator[bytes], dict[str, str]]:
    """The lines, and headers that say how many records there are and what gave none. Raises ConfigError."""
    fields = body if is_table(body) else Json()
    form = fields.get("form", ROLLOUTS)
    if form != ROLLOUTS and form not in DATASETS:
        raise ConfigError(f"form={form!r:.80} is none of: {', '.join((ROLLOUTS, *DATASETS))}")
    filters = fields.get("filters")
    rollouts = await run.by_ids(ids_in(body)) if filters is None else await _matching(run, filters)
    if form == ROLLOUTS:
        return _lines_of_store(run, [each.rollout_id for each in rollouts]), {RECORDS_HEADER: str(len(rollouts))}
    selection = Selection(reward_weights=run.weights)
    try:
        records, skipped = await dataset_records(run.store, rollouts, DATASETS[form], selection)
    except DatasetError as error:
        raise ConfigError(str(error)) from error
    headers = {RECORDS_HEADER: str(len(records)), SKIPPED_HEADER: orjson.dumps(skipped).decode()}
    return _lines(records), headers


async def _matching(run: RunData, given: Any) -> list[Rollout]:
    """All rollouts that match the filters of a table, oldest first."""
    if not is_table(given) or not all(isinstance(each, str) for each in given.values()):
        raise ConfigError('filters is no object of texts; send {"filters": {"state": "succeeded"}}')
    query = {**given, "sort": "", "order": "asc", "after": "", "limit": str(MOST_ROWS)}
    rollouts = list[Rollout]()
    while True:
        page = await select(run, Table(Query(query)))
        rollouts += await run.by_ids([row.rollout_id for row in page["rows"]])
        if len(rollouts) > MOST_EXPORTED:
            raise ConfigError(
                f"the filters select more than {MOST_EXPORTED:,} rollouts; narrow them, or use agl export"
            )
        if page["next"] is None:
            return rollouts
        query["after"] = page["next"]


async def _lines(records: Sequence[Mapping[str, Any]]) -> AsyncIterator[bytes]:
    for each in records:
        yield orjson.dumps(each) + b"\n"


async def _lines_of_store(run: RunData, ids: Sequence[str]) -> AsyncIterator[bytes]:
    yield header_line()
    count = 0
    with run.reading():  # the request is over once the first lines are sent
        for start in range(0, len(ids), CHUNK):
            for record in await run.store.read_records(ids[start : start + CHUNK]):
                count += 1
                yield item_line(record)
    yield end_line(0, count)


# -- the page ----------------------------------------------------------------------------------------------------------


class _Static(StaticFiles):
    """The files of the page, with the headers of all that is served here."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(HEADERS)
        return response


async def _page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html", headers=HEADERS)
