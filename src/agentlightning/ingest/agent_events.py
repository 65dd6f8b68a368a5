"""Receives events that agents in any language post to their own attempt.

An event is `{"event_type": "reward", "data": {"value": 1.0}}`. A reward becomes a reward span; any other type becomes
a span of that name with its data as attributes, except those that only the gateway may set. The key in the request must
be that of the attempt. Events after the end of the attempt are stored with a mark, and otherwise ignored.
"""

from __future__ import annotations

from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentlightning import span as names
from agentlightning.attempt_address import read_attempt_key
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http.endpoint import RequestError, endpoint, receive_body, respond
from agentlightning.tracing.agent_spans import agent_attributes, event_span, late_mark
from agentlightning.tracing.rewards import check_reward
from agentlightning.util.api_key import api_key
from agentlightning.util.json_values import dumps, loads

MAX_EVENT_BYTES: Final = 4 * 1024 * 1024


def event_routes(store: LightningStoreBase, secret: str) -> list[Route]:
    """Routes for a Starlette application; `secret` signs the keys of attempts."""

    async def post_event(request: Request) -> Response:
        rollout_id, attempt_id = request.path_params["rollout_id"], request.path_params["attempt_id"]
        key = api_key(request.headers)
        if not key or read_attempt_key(secret, key) != (rollout_id, attempt_id):
            raise RequestError("events need the AGL_KEY of this attempt, as `Authorization: Bearer <key>`", 401)
        body = await receive_body(request.headers, request.receive, MAX_EVENT_BYTES, "send less")
        span = read_event(body, rollout_id, attempt_id)
        span.attributes.update(late_mark(await store.get_attempt(attempt_id)))
        stored = await store.add_span(span)
        found = {
            "span_id": stored.span_id,
            "sequence_id": stored.sequence_id,
            "superseded": names.SUPERSEDED in stored.attributes,
            "late": names.LATE in stored.attributes,
        }
        return respond(dumps(found))

    return [
        Route(f"{prefix}/{{rollout_id}}/attempt/{{attempt_id}}/events", endpoint(post_event), methods=["POST"])
        for prefix in ("/rollout", "/api/rollouts")
    ]


def read_event(body: bytes, rollout_id: str, attempt_id: str) -> Span:
    """The span for a posted event. Raises RequestError, or RewardError if the reward is invalid."""
    try:
        event = loads(body)
        dumps(event)  # deeply nested JSON can be parsed, but not written
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the event is not JSON ({error}); NaN and Infinity are not JSON either") from None
    except orjson.JSONEncodeError as error:
        raise RequestError(f"the event cannot be stored: {error}; send flatter values") from None
    kind = event.get("event_type") if isinstance(event, dict) else None
    if not isinstance(kind, str) or not kind:
        raise RequestError('an event is an object like {"event_type": "reward", "data": {"value": 1.0}}')
    data: Any = event.get("data")
    if kind == "reward":
        reward = check_reward(data.get("value") if isinstance(data, dict) else data, "the event")
        value = names.REWARD_VALUES if isinstance(reward, dict) else names.SCORE_VALUE
        kind, attributes = names.REWARD, {names.EVALUATION_NAME: "reward", value: reward}
    else:
        attributes: dict[str, Any] = agent_attributes(data) if isinstance(data, dict) else {"value": data}
        if kind == "message":
            said = attributes.get("message", attributes.get("content", attributes.get("body")))
            text = said if isinstance(said, str) else dumps(data).decode()
            kind, attributes = names.MESSAGE, attributes | {names.MESSAGE_BODY: text}
    return event_span(rollout_id, attempt_id, kind, attributes)
