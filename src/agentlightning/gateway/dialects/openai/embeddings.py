"""The dialect of OpenAI's `/v1/embeddings`, which is only forwarded: our own engines make no embeddings."""

from __future__ import annotations

from typing import Final, NoReturn

from agentlightning.gateway.dialects.base import Body, Dialect, ReplyMetadata, ReplyWriter, Request
from agentlightning.gateway.dialects.openai import common
from agentlightning.gateway.dialects.response_store import ResponseLookup
from agentlightning.gateway.dialects.validation import optional, read_json
from agentlightning.gateway.errors import ApiError


def read_request(body: Body, recall: ResponseLookup | None = None, attachments: bool = False) -> NoReturn:
    """Raises ApiError 404: requests that are read are those for our engines."""
    model = optional(read_json(body), "model", str)
    message = f"the model {model!r} makes no embeddings here; add a route that leads it to a provider that does"
    raise ApiError(404, message, code="model_not_supported", param="model")


def _reply(request: Request, head: ReplyMetadata) -> ReplyWriter:
    raise AssertionError("no request is ever read")


EMBEDDINGS: Final = Dialect(
    operation="chat",
    id_prefix="embd-",
    call_prefix="call_",
    read=read_request,
    reply=_reply,
    error_body=common.error_body,
    error_event=common.error_event,
)
