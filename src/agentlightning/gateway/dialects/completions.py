"""The dialects of OpenAI's `/v1/completions`, with prompts as text or as token ids, and of its `/v1/embeddings`.

Prompts are used unchanged: no template, and no token added in front. Tools and response formats do not exist here.
Without `max_tokens`, an answer has at most 16 tokens, the API's traditional default. Embeddings are only forwarded: our
own engines make none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Final, NoReturn

from agentlightning.engine.base import SamplingParams
from agentlightning.gateway.answer import Answer, Event
from agentlightning.gateway.dialects.base import (
    OPENAI_PARAMS,
    OPENAI_UNSUPPORTED,
    VLLM_FORMAT_FIELDS,
    Body,
    Dialect,
    Request,
    error_body,
    error_event,
    include_usage,
    integer,
    optional,
    read_json,
    read_shared,
    shorten,
    top_logprobs,
)
from agentlightning.gateway.dialects.chat import ChatReplyWriter, ChatResponse
from agentlightning.gateway.dialects.response_store import ResponseLookup
from agentlightning.gateway.errors import ApiError, bad_request
from agentlightning.util.json_values import Json

_KNOWN: Final = frozenset({"model", "prompt", "stream", "stream_options", "n", "logprobs", "user", "return_token_ids"})
_UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {
    **OPENAI_UNSUPPORTED,
    **dict.fromkeys(VLLM_FORMAT_FIELDS, ()),
    "chat_template_kwargs": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (0,),
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "add_special_tokens": (False,),
}
_DEFAULT: Final = SamplingParams(max_tokens=16)
_MAX_PROMPTS: Final = 1024


def read_request(body: Body, recall: ResponseLookup | None = None, attachments: bool = False) -> Request:
    """See `ReadRequest`."""
    data = read_json(body)
    include_usage(data)
    prompts = _prompts(data.get("prompt"))
    asked = optional(data, "return_token_ids", bool)
    # Whoever sends token ids reads them, too: agents of Agent Lightning 1.0 do so without asking for them.
    token_ids = any(isinstance(each, list) for each in prompts) if asked is None else asked
    logprobs = None if data.get("logprobs") is False else data.get("logprobs")
    top = top_logprobs(data, "logprobs") if logprobs is not None else 0
    base = replace(_DEFAULT, top_logprobs=top, stream_logprobs=logprobs is not None or token_ids)
    return replace(
        read_shared(data, OPENAI_PARAMS, base, _KNOWN, _UNSUPPORTED),
        prompts=prompts,
        n=integer(data, "n", 1, 128) or 1,
        logprobs=logprobs is not None,
        token_ids=token_ids,
    )


def _prompts(value: Any) -> tuple[str | list[int], ...]:
    prompts = [value] if isinstance(value, str) or _is_tokens(value) else value
    if not isinstance(prompts, list) or not 0 < len(prompts) <= _MAX_PROMPTS or not all(map(_is_prompt, prompts)):
        shapes = f"a text, a list of token ids, or a list of at most {_MAX_PROMPTS} of either, none of them empty"
        raise bad_request("prompt", f"prompt={shorten(value)} must be {shapes}")
    return tuple(prompts)


def _is_prompt(value: Any) -> bool:
    return (isinstance(value, str) and value != "") or _is_tokens(value)


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int and 0 <= token < 2**31 for token in value)


@dataclass(slots=True)
class CompletionReplyWriter(ChatReplyWriter):
    """Writes the reply to one request; a `ReplyWriter`."""

    offsets: dict[int, int] = field(default_factory=dict[int, int], init=False)
    """For each answer, the text offset of its next token."""
    _with_prompt: set[int] = field(default_factory=set[int], init=False)
    """The answers whose prompt was written."""

    def start(self, answers: Sequence[Answer]) -> bytes:
        return b""

    def _head(self, choices: Sequence[Json], kind: str = "") -> Json:
        return ChatReplyWriter._head(self, choices) | {"object": "text_completion"}

    def _whole(self, answer: Answer) -> Json:
        return {"text": answer.content}

    def _delta(self, event: Event | None) -> Json:
        return {"text": event if isinstance(event, str) else ""}

    def _prompt(self, answers: Sequence[Answer]) -> Json:
        return {}

    def _choice(
        self,
        answer: Answer,
        shown: Json,
        list_logprobs: Callable[[], list[Json]],
        reason: str | None = None,
        token_ids: Sequence[int] | None = None,
    ) -> Json:
        choice = ChatReplyWriter._choice(self, answer, shown, list_logprobs, reason, token_ids)
        if self.token_ids and answer.index not in self._with_prompt:
            self._with_prompt.add(answer.index)  # Once in a stream: the prompt may be far longer than an event.
            choice["prompt_token_ids"] = answer.prompt_token_ids
        return choice

    def _logprobs(self, answer: Answer, listed: list[Json]) -> Json:
        texts = [entry["token"] for entry in listed]
        *offsets, self.offsets[answer.index] = accumulate(map(len, texts), initial=self.offsets.get(answer.index, 0))
        return {
            "tokens": texts,
            "token_logprobs": [entry["logprob"] for entry in listed],
            "top_logprobs": _tops(listed),
            "text_offset": offsets,
        }


def _tops(listed: Sequence[Json]) -> list[dict[str, float]] | None:
    """The likeliest tokens at each place by their text; of two tokens with the same text, the likelier one."""
    tops = [entry["top_logprobs"] for entry in listed]
    return [{top["token"]: top["logprob"] for top in reversed(each)} for each in tops] if any(tops) else None


COMPLETIONS: Final = Dialect(
    id_prefix="cmpl-",
    call_prefix="call_",
    read=read_request,
    reply=CompletionReplyWriter.of,
    response=ChatResponse,
    error_body=error_body,
    error_event=error_event,
)


# -- embeddings --------------------------------------------------------------------------------------------------------


def _read_embedding(body: Body, recall: ResponseLookup | None = None, attachments: bool = False) -> NoReturn:
    """Raises ApiError 404: requests that are read are those for our engines."""
    model = optional(read_json(body), "model", str)
    message = f"the model {model!r} makes no embeddings here; add a route that leads it to a provider that does"
    raise ApiError(404, message, code="model_not_supported", param="model")


EMBEDDINGS: Final = replace(COMPLETIONS, id_prefix="embd-", read=_read_embedding)
