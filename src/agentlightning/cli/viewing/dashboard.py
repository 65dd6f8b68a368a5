"""`agl dashboard`: runs, rollouts and tokens as a web page, read-only."""

from __future__ import annotations

import secrets
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentlightning.cli.opening import POSTGRES, is_url
from agentlightning.cli.options import Token
from agentlightning.cli.output import Output, Result
from agentlightning.errors import ConfigError, ServerError

if TYPE_CHECKING:
    from starlette.routing import Route

    from agentlightning.dashboard.data.catalog import Catalog

Target = Annotated[
    str | None,
    typer.Argument(
        help="The directory of a run or of several, a database, or the URL of a server (default: runs).",
        show_default=False,
    ),
]


async def dashboard(
    ctx: typer.Context,
    target: Target = None,
    demo: Annotated[bool, typer.Option("--demo", help="Show two recorded runs; nothing is trained.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 4749,
    token: Token = None,
    browser: Annotated[bool, typer.Option(help="Open it in the browser.")] = True,
) -> None:
    """Show runs, rollouts and tokens in the browser, until stopped (Ctrl-C). It only reads.

    The page asks for a token of its own, which is part of the link that is printed. A server (`agl serve`, a run) has
    its dashboard at /dashboard, with actions, and needs no `agl dashboard`.

    \b
    Examples:
      agl dashboard --demo
      agl dashboard runs/first --port 0
    """
    from agentlightning.cli.process.stop_signals import StopSignals

    with StopSignals() as signals:  # so that one leaves no files of a demo behind
        await signals.while_running(_serve(target, demo, host, port, token, browser, ctx.obj))


async def _serve(
    target: str | None, demo: bool, host: str, port: int, server_token: str | None, browser: bool, output: Output
) -> None:
    from agentlightning.dashboard.app import PATH
    from agentlightning.dashboard.serve import dashboard_app, serve_dashboard
    from agentlightning.server.app import listen, url_of

    if demo and target is not None:
        raise ConfigError(f"--demo shows recorded runs, and {target!r} is none of them; leave one of them out")
    try:
        listener = listen(host, port)
    except ServerError as error:
        open_there = f"Another `agl dashboard` may be open there: {url_of(host, port)}{PATH}"
        raise ServerError(f"{error}. {open_there}; for one beside it: agl dashboard --port 0") from error
    token = secrets.token_urlsafe(24)
    with listener:
        async with _routes(target, demo, server_token, token, output) as routes:
            link = f"{url_of(host, listener.getsockname()[1])}{PATH}#token={token}"
            record = {"url": link.partition("#")[0], "link": link}
            output.show(Result(record, lambda console: console.print(f"dashboard  {link}")))
            sys.stdout.flush()
            if browser and not output.as_json and sys.stdout.isatty():
                import webbrowser

                webbrowser.open(link)
            await serve_dashboard(dashboard_app(routes, host, has_token=True), listener)


@asynccontextmanager
async def _routes(
    target: str | None, demo: bool, server_token: str | None, token: str, output: Output
) -> AsyncGenerator[list[Route]]:
    if target is not None and is_url(target):
        from agentlightning.dashboard.remote import remote_routes

        async with remote_routes(target, server_token, token) as routes:
            yield routes
        return
    from agentlightning.dashboard.app import dashboard_routes

    with tempfile.TemporaryDirectory(prefix="agl-dashboard-") as folder:
        if demo:
            from agentlightning.dashboard.demo import write_demo

            output.console.print("unpacking two recorded runs ...")
            await write_demo(Path(folder))
        async with _catalog(folder if demo else target) as catalog:
            try:
                yield dashboard_routes(catalog, token)
            finally:
                await catalog.close()


@asynccontextmanager
async def _catalog(target: str | None) -> AsyncGenerator[Catalog]:
    from agentlightning.cli.store import open_named
    from agentlightning.dashboard.data.catalog import Catalog

    runs = _runs(target)
    if runs is not None:
        yield runs
        return
    async with open_named(target) as store:
        yield Catalog(store)


def _runs(target: str | None) -> Catalog | None:
    """The run in a directory, or those below it; None for a database. Raises ConfigError where there is neither."""
    from agentlightning.dashboard.data.catalog import Catalog
    from agentlightning.training.persistence.run_dir import holds_run

    path = Path(target or "runs")
    if holds_run(path):
        return Catalog(directories=[path])
    if path.is_dir() and any(path.glob("*/state.json")):
        return Catalog(roots=[path])
    if target is None or not (target.startswith(POSTGRES) or path.exists()):
        raise ConfigError(
            f"there is no run and no database at {str(path)!r}; give the directory of a run, a database or a URL, or"
            " look at recorded runs: agl dashboard --demo"
        )
    return None
