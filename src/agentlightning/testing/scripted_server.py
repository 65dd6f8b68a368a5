"""`ScriptedServer`: an OpenAI-compatible endpoint on loopback whose models are functions, in a thread of its own.

with ScriptedServer({"echo": lambda text: text}) as server:
    server.url        # base URL: /chat/completions, with the models above
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


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
