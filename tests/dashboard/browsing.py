"""A dashboard in a thread, and a window of a real Chromium that collects what goes wrong in it.

Needs the package `playwright` and a Chromium of the system (`apt-get install chromium`); tests are skipped without, by
name.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from typing import Any

import uvicorn

from agentlightning.dashboard.app import dashboard_routes
from agentlightning.dashboard.data.run_data import Catalog
from agentlightning.dashboard.serve import dashboard_app
from agentlightning.server.app import listen

TOKEN = "a-token"
GRPO = "calculator-grpo"
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
COLOURS = ("advantage", "logprob", "ratio", "rank", "version", "loss")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


class Served:
    """A dashboard in a thread of its own."""

    def __init__(self, **catalog: Any) -> None:
        self._catalog = catalog
        self._listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/dashboard"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        data = Catalog(**self._catalog, writable=True)
        app = dashboard_app(dashboard_routes(data, TOKEN), "127.0.0.1")
        config = uvicorn.Config(
            app, lifespan="off", ws="none", log_config=None, access_log=False, timeout_graceful_shutdown=1
        )
        self.server = uvicorn.Server(config)
        await self.server.serve(sockets=[self._listener])
        await data.close()

    def __enter__(self) -> Served:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self._thread.join(20)


class Window:
    """A page that collects what went wrong in it."""

    def __init__(
        self, browser: Any, served: Served, *, width: int = 1400, theme: str = "light", token: str = TOKEN
    ) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
        self.page = self.context.new_page()
        self.page.set_default_timeout(30_000)
        self.url = served.url
        self.problems: list[str] = []
        self.page.on("console", lambda said: self._console(said))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda dialog: self.problems.append(f"dialog {dialog.message}"))
        if token:
            self.page.goto(f"{served.url}#token={token}")
            self.page.wait_for_selector("h1")

    def _console(self, said: Any) -> None:
        if said.type in ("error", "warning"):
            self.problems.append(said.text)

    def open(self, path: str, selector: str = "h1") -> Any:
        self.page.goto(f"{self.url}{path}")
        self.page.wait_for_selector(selector)
        self.page.wait_for_selector("[aria-busy=true]", state="detached")
        return self.page


def groups(window: Window, run: str, step: int) -> list[dict[str, Any]]:
    read = "async ([url, token]) => (await fetch(url, {headers: {authorization: `Bearer ${token}`}})).json()"
    return window.page.evaluate(read, [f"{window.url}/api/runs/{run}/steps/{step}", TOKEN])["groups"]


def a_group(window: Window) -> str:
    """A rollout of a group in which a tool failed."""
    return next(group["worst"] for group in groups(window, GRPO, 9) if group["tool_errors"])


def pages(window: Window) -> list[str]:
    rollout, run = a_group(window), f"/runs/{GRPO}"
    return [
        "",
        run,
        f"{run}/steps/9",
        f"{run}/rollouts",
        f"{run}/tasks",
        f"{run}/tasks?set=validation&mode=sampled",
        f"{run}/rollouts?failure=any",
        f"{run}/rollouts/{rollout}",
        f"{run}/rollouts/{rollout}?tab=spans",
        f"{run}/rollouts/{rollout}?tab=raw",
        *(f"{run}/rollouts/{rollout}/tokens?by={by}" for by in COLOURS),
        f"{run}/rollouts/{rollout}/group",
        *(f"{run}/{name}" for name in ("server", "failures", "resources", "weights")),
        f"/compare?of={GRPO}&runs={GRPO}",
        "/compare?runs=calculator-grpo,calculator-rloo",
    ]
