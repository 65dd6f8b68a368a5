"""The chat-completions dialect: OpenAI's wire in, our call out; our answers in, OpenAI's wire out.

What we cannot honour and would change what is sampled is refused by name. Fields we do not know change nothing: they
are accepted, ignored and counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson

from agentlightning.gateway.answer import Answer, Piece
from agentlightning.gateway.conversation import text_of
from agentlightning.gateway.problems import Problem, bad
from agentlightning.policy.base import ChatFormat, Message, SamplingParams

_KNOWN: Final = frozenset(
    {
        *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "user"),
        *("stream", "stream_options", "n", "logprobs", "top_logprobs"),
        *("temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "stop", "seed"),
    }
)
_ROLES: Final = frozenset({"system", "user", "assistant", "tool"})

_REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "typical_p": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "best_of": (1,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "modalities": (["text"],),
    "audio": (),
}
"""Fields that change what is sampled or answered and that we cannot honour, with the values that change nothing."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request, understood."""

    model: str | None
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    params: SamplingParams
    n: int = 1
    stream: bool = False
    logprobs: bool = False
    unknown: tuple[str, ...] = ()
    """Names of fields that were ignored."""


def read_request(body: bytes) -> ChatRequest:
    """Raises Problem 400, naming the field, on what is not a request or cannot be honoured."""
    data = _read_json(body)
    for name, neutral in _REFUSED.items():
        if name in data and data[name] is not None and data[name] not in neutral:
            raise bad(name, f"{name}={_short(data[name])} cannot be honoured here; leave it out")
    _refuse_formats(data)
    tools, dropped = _tools(data)
    unknown = tuple(name for name in data if name not in _KNOWN and name not in _REFUSED)
    return ChatRequest(
        model=_optional(data, "model", str),
        messages=_messages(data.get("messages")),
        tools=None if data.get("tool_choice") == "none" else tools,
        params=sampling_params(data, SamplingParams(), "the request"),
        n=_integer(data, "n", 1, 128) or 1,
        stream=bool(_optional(data, "stream", bool)),
        logprobs=bool(_optional(data, "logprobs", bool)),
        unknown=unknown + dropped,
    )


def sampling_params(data: Mapping[str, Any], base: SamplingParams, whose: str) -> SamplingParams:
    """`base` with what `data` sets. Raises Problem 400 naming a value that cannot work; `whose` says where it
    stands."""
    values: dict[str, Any] = {}
    for name, (field, read) in _PARAMS.items():
        if data.get(name) is None:
            continue
        try:
            values[field] = read(data[name])
        except (TypeError, ValueError) as error:
            raise bad(name, f"{whose} sets {name}={_short(data[name])}; {error}") from None
    return replace(base, **values)


def forced_params(params: SamplingParams, resource: str, forced: Mapping[str, Any]) -> SamplingParams:
    """What the trainer's LLM resource decides wins. Raises Problem 400 on a name we cannot honour."""
    unknown = sorted(set(forced) - set(_PARAMS))
    if unknown:
        known = ", ".join(sorted(_PARAMS))
        message = f"the LLM resource {resource!r} sets {', '.join(unknown)}, which cannot be honoured; known: {known}"
        raise bad("sampling_parameters", message)
    return sampling_params(forced, params, f"the LLM resource {resource!r}")


# -- reading ---------------------------------------------------------------------------------------------------------


def _read_json(body: bytes) -> dict[str, Any]:
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Problem(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise Problem(400, f"the body is a JSON {type(data).__name__}, not an object", code="invalid_json")
    return data


def _refuse_formats(data: dict[str, Any]) -> None:
    choice = data.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise bad("tool_choice", f"tool_choice={_short(choice)} cannot be enforced here; use auto or none")
    shape = data.get("response_format")
    if shape is not None and not (isinstance(shape, dict) and shape.get("type") == "text"):
        raise bad("response_format", f"response_format={_short(shape)} cannot be enforced here; use the type text")


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise bad("messages", "messages must be a list with at least one message")
    return [_message(index, message) for index, message in enumerate(value)]


def _message(index: int, message: Any) -> Message:
    where = f"messages[{index}]"
    role = message.get("role") if isinstance(message, dict) else None
    role = "system" if role == "developer" else role
    if role not in _ROLES:
        raise bad("messages", f"{where} has the role {_short(role)}; use {', '.join(sorted(_ROLES))} or developer")
    read: Message = {"role": role, "content": _content(where, message.get("content"))}
    if calls := message.get("tool_calls"):
        read["tool_calls"] = _tool_calls(where, calls)
    for key in ("tool_call_id", "name"):
        if message.get(key) is not None:
            read[key] = _expect(f"{where}.{key}", message[key], str)
    return read


def _content(where: str, content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in _expect(f"{where}.content", content, list):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal":
            part["text"] = part.get("refusal")
        if kind not in ("text", "refusal") or not isinstance(part.get("text"), str):
            raise bad("messages", f"{where}.content has a part of type {_short(kind)}; this model reads text only")
    return text_of(content)


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    return [_tool_call(f"{where}.tool_calls[{place}]", call) for place, call in enumerate(_expect(where, calls, list))]


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad("messages", f"{where} must be an object with function.name and function.arguments")
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = orjson.dumps(arguments).decode()
    function = {"name": function["name"], "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": function}


def _tools(data: dict[str, Any]) -> tuple[list[dict[str, Any]] | None, tuple[str, ...]]:
    """(function tools, names of the kinds of tools that only a hosted service has and that are left out)."""
    tools: list[dict[str, Any]] = []
    dropped: list[str] = []
    for index, tool in enumerate(_optional(data, "tools", list) or ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise bad("tools", f"tools[{index}] must be an object with the type function")
        if kind != "function":
            dropped.append(f"tools.{kind}")
            continue
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad("tools", f"tools[{index}] must have a function with a name")
        tools.append(tool)
    return tools or None, tuple(dropped)


def _optional(data: Mapping[str, Any], name: str, kind: type) -> Any:
    return None if data.get(name) is None else _expect(name, data[name], kind)


def _expect(where: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise bad(where.partition("[")[0], f"{where}={_short(value)} must be a {kind.__name__}")
    return value


def _integer(data: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = data.get(name)
    if value is not None and (type(value) is not int or not low <= value <= high):
        raise bad(name, f"{name}={_short(value)} must be a whole number from {low} to {high}")
    return value


def _short(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 80 else text[:77] + "..."


def _whole(low: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if type(value) is not int or value < low:
            raise ValueError(f"use a whole number of at least {low}")
        return value

    return read


def _number(low: float, high: float, open_low: bool = False) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high or (open_low and value == low):
            raise ValueError(f"use a number {'above' if open_low else 'from'} {low:g} to {high:g}")
        return float(value)

    return read


def _top_k(value: Any) -> int:
    return 0 if value == -1 else _whole(0)(value)


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("use a string or a list of strings, none of them empty")
    return tuple(stops)


_PARAMS: Final[dict[str, tuple[str, Callable[[Any], Any]]]] = {
    "temperature": ("temperature", _number(0, 100)),
    "top_p": ("top_p", _number(0, 1, open_low=True)),
    "top_k": ("top_k", _top_k),
    "max_tokens": ("max_tokens", _whole(1)),
    "max_completion_tokens": ("max_tokens", _whole(1)),
    "stop": ("stop", _stop),
    "seed": ("seed", _whole(-(2**63))),
}


# -- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    """Writes the reply to one request."""

    id: str
    model: str
    logprobs: bool = False
    created: int = 0

    @classmethod
    def new(cls, id: str, model: str, logprobs: bool) -> Reply:
        return cls(id, model, logprobs, int(time.time()))

    def completion(self, answers: Sequence[Answer], prompt_tokens: int) -> bytes:
        """The whole reply as one object."""
        choices = [self._choice(answer) for answer in answers]
        return orjson.dumps(
            self._head("chat.completion") | {"choices": choices, "usage": usage(answers, prompt_tokens)}
        )

    def opening(self, index: int) -> bytes:
        return self._chunk(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, piece: Piece) -> bytes:
        if isinstance(piece, str):
            return self._chunk(index, {"content": piece})
        return self._chunk(index, {"tool_calls": [{"index": piece.index, **piece.wire()}]})

    def closing(self, answer: Answer) -> bytes:
        return self._chunk(answer.index, {}, answer.finish_reason, self._logprobs(answer))

    def end(self, answers: Sequence[Answer], prompt_tokens: int) -> bytes:
        chunk = self._head("chat.completion.chunk") | {"choices": [], "usage": usage(answers, prompt_tokens)}
        return _event(chunk) + b"data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _choice(self, answer: Answer) -> dict[str, Any]:
        return {
            "index": answer.index,
            "message": {**answer.message, "refusal": None},
            "finish_reason": answer.finish_reason,
            "logprobs": self._logprobs(answer),
        }

    def _chunk(
        self, index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return _event(self._head("chat.completion.chunk") | {"choices": [choice]})

    def _logprobs(self, answer: Answer) -> dict[str, Any] | None:
        sample = answer.sample
        if not self.logprobs or sample is None:
            return None
        drawn = zip(sample.token_ids, sample.logprobs, strict=True)
        return {"content": [_token(answer.chat, token, value) for token, value in drawn], "refusal": None}


def usage(answers: Sequence[Answer], prompt_tokens: int) -> dict[str, int]:
    """Tokens of the prompt, counted once, and of all answers."""
    drawn = sum(len(answer.sample.token_ids) if answer.sample else 0 for answer in answers)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": drawn, "total_tokens": prompt_tokens + drawn}


def error_event(problem: Problem) -> bytes:
    """A failure after the stream has begun; the official SDK raises APIError on it."""
    return _event({"error": problem.error()})


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def _token(chat: ChatFormat, token: int, logprob: float) -> dict[str, Any]:
    text = chat.decode([token])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
