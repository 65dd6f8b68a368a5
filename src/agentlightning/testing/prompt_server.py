"""Serves a `PromptWorld` as an OpenAI-compatible endpoint on loopback, in a thread of its own.

    with PromptWorldServer(PromptWorld(seed=0)) as server:
        server.url        # base URL: /chat/completions, with the models below

The name of the model says which part of the world answers: follower (tasks), critic (a critique), editor (bounded
edits in JSON), rewriter (the whole prompt anew), reflector (a critique and the whole prompt, in a code block).
`POST /quality {"prompt": ...}` answers with the `quality` of a prompt, the `optimum` of the world, and the `calls` of
the follower so far.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

from aiohttp import web

from agentlightning.testing.prompt_world import PromptWorld


class PromptWorldServer:
    """Use as `with`."""

    def __init__(self, world: PromptWorld) -> None:
        self.world = world
        self.calls: Counter[str] = Counter()
        """Answered calls by model."""
        self.overrides: dict[str, Callable[[str], str]] = {}
        """By model: from the text of a request to the reply, in place of the world's."""
        self.url = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/quality", self._quality)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _complete(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        model = str(body.get("model"))
        answer = self.overrides.get(model) or self._parts.get(model)
        if answer is None:
            return web.json_response({"error": {"message": f"no model {model!r} here"}}, status=404)
        text = "\n".join(_content(message.get("content")) for message in body["messages"])
        reply = answer(text)
        self.calls[model] += 1
        usage = {"prompt_tokens": len(text.split()), "completion_tokens": len(reply.split())}
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": reply}}
        return web.json_response(
            {
                "id": f"chatcmpl-{self.calls.total()}",
                "object": "chat.completion",
                "created": 0,
                "model": model,
                "choices": [choice],
                "usage": usage | {"total_tokens": sum(usage.values())},
            }
        )

    async def _quality(self, request: web.Request) -> web.Response:
        quality = self.world.quality(str((await request.json())["prompt"]))
        return web.json_response({"quality": quality, "optimum": self.world.optimum, "calls": self.calls["follower"]})

    @property
    def _parts(self) -> dict[str, Callable[[str], str]]:
        world = self.world
        return {
            "follower": world.answer,
            "critic": world.critique,
            "editor": world.edits,
            "rewriter": world.rewrite,
            "reflector": world.reflect,
        }


def _content(content: Any) -> str:
    """The text of a message, which may come in parts."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content)
    return str(content or "")
