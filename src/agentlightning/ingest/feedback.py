"""Receives feedback on rollouts: from programs with the access token, and from people by a signed link.

`POST /v1/agl/rollouts/ID/feedback` takes `{"score": 1.0, "label": "...", "comment": "...", "source": "..."}`. A link
(`agl.feedback_link`) leads to a page with thumbs up and down and a comment. Opening it records nothing, since mail
programs open links in advance; sending it twice records it once. The page runs no script and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import time
from typing import Any, Final
from urllib.parse import parse_qsl

import orjson
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.recording.feedback import LINK_PATH, Feedback, add_feedback, read_link
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http import BASE_PATH
from agentlightning.store.http.endpoint import RequestError, endpoint, receive_body, respond, status_of
from agentlightning.util.json_values import loads

MAX_BYTES: Final = 64 * 1024
FIELDS: Final = frozenset({"score", "label", "comment", "source"})
VOTES: Final = {"up": 1.0, "down": 0.0}

STYLE: Final = (
    "body{font:1.1em system-ui,sans-serif;max-width:28em;margin:4em auto;padding:0 1em;text-align:center}"
    "textarea{width:100%;height:6em;margin:1em 0;font:inherit}button{font-size:2em;margin:0 .5em;padding:.2em .6em}"
)
_STYLE_HASH: Final = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS: Final = {
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; form-action 'self'; frame-ancestors 'none';"
        " base-uri 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
}
FORM: Final = (
    "<h1>Was this helpful?</h1><form method=post><textarea name=comment maxlength=10000"
    ' placeholder="Comment (optional)" aria-label="Comment"></textarea><br>'
    '<button name=vote value=up aria-label="Yes">&#128077;</button>'
    '<button name=vote value=down aria-label="No">&#128078;</button></form>'
)


def feedback_routes(store: LightningStoreBase, secret: str, token: str | None) -> list[Route]:
    """Routes for a Starlette application; they come before those of the store. `secret` signs links."""

    async def post(request: Request) -> Response:
        feedback, source = read_feedback(await receive_body(request.headers, request.receive, MAX_BYTES, "send less"))
        span = await add_feedback(store, request.path_params["rollout_id"], feedback, source)
        ids = {"rollout_id": span.rollout_id, "attempt_id": span.attempt_id, "span_id": span.span_id}
        return respond(orjson.dumps(ids), 201)

    async def page(request: Request) -> Response:
        try:
            link = read_link(secret, request.path_params["key"])
            if link is None:
                raise RequestError("This link is not valid.", 403)
            if link.expiry < time.time():
                raise RequestError("This link has expired.", 410)
            if request.method != "POST":
                return _page(FORM)
            body = await receive_body(request.headers, request.receive, MAX_BYTES, "send less")
            await add_feedback(store, link.rollout_id, read_form(body), link.nonce)
        except AgentLightningError as error:
            return _page(f"<h1>{html.escape(str(error))}</h1>", status_of(error))
        return _page("<h1>Thank you.</h1>")

    return [
        Route(BASE_PATH + "/rollouts/{rollout_id}/feedback", endpoint(post, token), methods=["POST"]),
        Route(LINK_PATH + "/{key}", page, methods=["GET", "HEAD", "POST"]),
    ]


def read_feedback(body: bytes) -> tuple[Feedback, str | None]:
    """The feedback in a JSON body, and its source. Raises RequestError, ConfigError or RewardError."""
    try:
        given: Any = loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the feedback is not JSON ({error})") from None
    if not isinstance(given, dict):
        raise RequestError(f"the feedback is no object; send any of {sorted(FIELDS)}")
    if unknown := given.keys() - FIELDS:
        raise RequestError(f"the feedback has the unknown fields {sorted(unknown)}; send any of {sorted(FIELDS)}")
    source = given.pop("source", None)
    if source is not None and (not isinstance(source, str) or not source):
        raise RequestError(f"source={source!r:.80} is not text; send an id of who says it, or none")
    return Feedback(**given), source


def read_form(body: bytes) -> Feedback:
    """The feedback in the form of the page. Raises ConfigError."""
    try:
        fields = dict(parse_qsl(body.decode(errors="replace"), max_num_fields=10))
    except ValueError:
        raise ConfigError("the form has more than 10 fields") from None
    vote, comment = fields.get("vote", ""), fields.get("comment", "").strip()
    if vote not in VOTES:
        raise ConfigError("choose thumbs up or thumbs down")
    return Feedback(score=VOTES[vote], label=f"thumbs_{vote}", comment=comment or None)


def _page(body: str, status: int = 200) -> Response:
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width'><title>Feedback</title>"
    return HTMLResponse(f"<!doctype html><html lang=en>{head}<style>{STYLE}</style>{body}</html>", status, HEADERS)
