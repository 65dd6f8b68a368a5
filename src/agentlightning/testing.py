"""Fakes for tests of agents and algorithms: engines and servers that need no model.

    engine = ScriptedEngine(["Hello.", "Good-bye."])                       # one answer per call
    engine = ScriptedEngine(lambda messages: messages[-1]["content"])      # computed from the conversation
    with ScriptedServer({"echo": lambda text: text}) as server:
        server.url        # base URL: /chat/completions, with the models above

`ScriptedEngine`: an `Engine` with scripted answers instead of a model. Tokens are those of the given chat format, by
default `ByteChatFormat`, whose tokens are bytes and which needs no torch. Log-probabilities are a fixed function of the
token. `ScriptedServer`: an OpenAI-compatible endpoint on loopback whose models are functions, in a thread of its own.
"""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, Self, cast

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from agentlightning.chat.base import ChatFormat, Message
from agentlightning.chat.tool_calls.format import CallFormat, Tools
from agentlightning.chat.tool_calls.formats import HERMES
from agentlightning.engine.base import ConstraintKind, FinishReason, Sample, SamplingParams, room_for_answer
from agentlightning.errors import ConfigError, PolicyError

__all__ = ["ByteChatFormat", "ScriptedEngine", "ScriptedServer", "read_chatml"]

_SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TURN: Final = re.compile(r"<\|im_start\|>([^\n]*)\n(.*?)<\|im_end\|>", re.DOTALL)


class ByteChatFormat(ChatFormat):
    """ChatML with Hermes tool calls; tokens 0 to 255 are bytes, 256 to 258 are special."""

    eos_token_ids: frozenset[int] = frozenset({256, 258})
    tool_calls: CallFormat = HERMES

    def render(self, messages: Sequence[Message], tools: Tools = None, add_generation_prompt: bool = True) -> str:
        listed = f"<|im_start|>system\n{_json(list(tools))}<|im_end|>\n" if tools else ""
        turns = "".join(f"<|im_start|>{_role(message)}\n{_body(message)}<|im_end|>\n" for message in messages)
        return listed + turns + ("<|im_start|>assistant\n" if add_generation_prompt else "")

    def encode(self, text: str) -> list[int]:
        pieces = re.split(r"(<\|endoftext\|>|<\|im_start\|>|<\|im_end\|>)", text)
        codes = [[256 + _SPECIAL.index(piece)] if piece in _SPECIAL else piece.encode() for piece in pieces]
        return [token for code in codes for token in code]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        data = b"".join(_token_bytes(token, skip_special_tokens) for token in token_ids)
        return data.decode("utf-8", errors="replace")


@dataclass(eq=False)
class ScriptedEngine:
    """An `Engine` that returns scripted answers.

    `script` is a sequence with one answer per call (an exception in it is raised), or a function from the conversation,
    parsed from its ChatML prompt as `{"role": ..., "content": ...}`, to the answer. `delay` is the time in seconds
    before each step of `tokens_per_step` tokens. `calls` records the prompt and parameters of each call.
    """

    script: Iterable[str | Exception] | Callable[[list[Message]], str]
    _: KW_ONLY
    chat: ChatFormat = field(default_factory=ByteChatFormat)
    model: str = "scripted"
    context_length: int = 32768
    delay: float = 0.0
    tokens_per_step: int = 1
    policy_version: int = 0
    supported_params: frozenset[str] = frozenset()
    calls: list[tuple[list[int], SamplingParams]] = field(default_factory=list[tuple[list[int], SamplingParams]])

    def __post_init__(self) -> None:
        self.chat = self.chat or ByteChatFormat()  # None stands for the default, too
        self._script = self.script if callable(self.script) else iter(list(self.script))

    async def can_enforce(self, text: str, kind: ConstraintKind = "json_schema") -> bool:
        return False

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: Callable[[Sequence[int]], None] | None = None,
        *,
        affinity: str = "",
    ) -> Sample:
        """The next scripted answer. Raises ContextLengthError like a real engine, and PolicyError after the last
        one."""
        self.calls.append((list(prompt_token_ids), params))
        limit, version = room_for_answer(prompt_token_ids, self.context_length, params.max_tokens), self.policy_version
        tokens, reason = self._cut(self._answer(prompt_token_ids), params.stop, limit)
        logprobs = tuple(-(1 + token % 7) / 8 for token in tokens)
        top = params.top_logprobs
        tops = tuple(_top_logprobs(pair, top) for pair in zip(tokens, logprobs, strict=True)) if top else ()
        for start in range(0, len(tokens), self.tokens_per_step):
            if self.delay:
                await asyncio.sleep(self.delay)
            if on_tokens is not None:
                step = slice(start, start + self.tokens_per_step)
                values = (logprobs[step], tops[step]) if params.stream_logprobs else ()
                cast(Callable[..., None], on_tokens)(tokens[step], *values)
        return Sample(tuple(tokens), logprobs, reason, version, top_logprobs=tops)

    def _answer(self, prompt_token_ids: Sequence[int]) -> list[int]:
        if callable(self._script):
            answer: str | Exception | None = self._script(read_chatml(self.chat.decode(prompt_token_ids)))
        else:
            answer = next(self._script, None)
        if answer is None:
            raise PolicyError(
                f"the script of {self.model} has {len(self.calls) - 1} answers, but this is call {len(self.calls)}"
            )
        if isinstance(answer, Exception):
            raise answer
        return [*self.chat.encode(answer), *self._end_of_turn()]

    def _end_of_turn(self) -> list[int]:
        turn = self.chat.render([{"role": "user", "content": "?"}, {"role": "assistant", "content": "?"}], None, False)
        return [token for token in self.chat.encode(turn) if token in self.chat.eos_token_ids][-1:]

    def _cut(self, tokens: list[int], stops: Sequence[str], limit: int) -> tuple[list[int], FinishReason]:
        for end in range(1, min(len(tokens), limit) + 1) if stops else ():
            text = self.chat.decode(tokens[:end])
            if any(stop in text for stop in stops):
                return tokens[:end], "stop"
        return (tokens, "stop") if len(tokens) <= limit else (tokens[:limit], "length")


def _top_logprobs(sampled: tuple[int, float], count: int) -> tuple[tuple[int, float], ...]:
    """The sampled token and other, less likely ones."""
    token, logprob = sampled
    others = [other for other in range(65, 65 + count) if other != token]
    return (sampled, *((other, logprob - place) for place, other in enumerate(others[: count - 1], start=1)))


def read_chatml(text: str) -> list[Message]:
    """The complete turns of a ChatML text as messages."""
    return [{"role": role, "content": content} for role, content in _TURN.findall(text)]


def _role(message: Message) -> str:
    role = message.get("role")
    if not isinstance(role, str):
        raise ConfigError(f"a message has the role {role!r}; use system, user, assistant or tool")
    return role


def _body(message: Message) -> str:
    calls = [_call(call["function"]) for call in message.get("tool_calls") or ()]
    return "\n".join([part for part in (message.get("content"),) if part] + calls)


def _call(function: dict[str, Any]) -> str:
    try:
        arguments = orjson.loads(function["arguments"])
    except orjson.JSONDecodeError:
        arguments = function["arguments"]
    return f"{HERMES.opening}\n{_json({'name': function['name'], 'arguments': arguments})}\n{HERMES.closing}"


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _token_bytes(token: int, skip_special_tokens: bool) -> bytes:
    if token < 256:
        return bytes([token])
    return b"" if skip_special_tokens else _SPECIAL[token - 256].encode()


class ScriptedServer:
    """Use as `with`. `models`: by name, from the text of a request, all its messages, to the reply."""

    def __init__(self, models: Mapping[str, Callable[[str], str]]) -> None:
        self.models = dict(models)
        self.calls: Counter[str] = Counter()
        """Answered calls by model."""
        self.app = Starlette(routes=[Route("/v1/chat/completions", self._complete, methods=["POST"])])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        self._server = uvicorn.Server(uvicorn.Config(self.app, log_level="error", lifespan="off"))
        self._thread = threading.Thread(target=lambda: self._server.run([self._listener]), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def _complete(self, request: Request) -> JSONResponse:
        body: dict[str, Any] = await request.json()
        model = str(body.get("model"))
        answer = self.models.get(model)
        if answer is None:
            return JSONResponse({"error": {"message": f"no model {model!r} here"}}, status_code=404)
        text = "\n".join(_content(message.get("content")) for message in body["messages"])
        reply = answer(text)
        self.calls[model] += 1
        usage = {"prompt_tokens": len(text.split()), "completion_tokens": len(reply.split())}
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": reply}}
        return JSONResponse(
            {
                "id": f"chatcmpl-{self.calls.total()}",
                "object": "chat.completion",
                "created": 0,
                "model": model,
                "choices": [choice],
                "usage": usage | {"total_tokens": sum(usage.values())},
            }
        )


def _content(content: Any) -> str:
    """The text of a message, which may come in parts."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content)
    return str(content or "")
