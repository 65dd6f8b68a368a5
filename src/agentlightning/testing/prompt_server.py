"""Serves a `PromptWorld` as an OpenAI-compatible endpoint on loopback, in a thread of its own.

    with PromptWorldServer(PromptWorld(seed=0)) as server:
        server.url        # base URL: /chat/completions, with the models below

The name of the model says which part of the world answers: follower (tasks), critic (a critique), editor (bounded
edits in JSON).
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from agentlightning.testing.prompt_world import PromptWorld


class PromptWorldServer:
    """Use as `with`."""

    def __init__(self, world: PromptWorld) -> None:
        self.world = world
        self.calls: Counter[str] = Counter()
        """Answered calls by model."""
        self.overrides: dict[str, Callable[[str], str]] = {}
        """By model: from the text of a request to the reply, in place of the world's."""
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
        answer = self.overrides.get(model) or self.world.models.get(model)
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
