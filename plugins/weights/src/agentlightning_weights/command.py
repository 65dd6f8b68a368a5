"""`agl weights`: brings the weights that a run publishes to this host, and to its model server."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer
from typer import Argument, Context, Option

from agentlightning.cli.main import Verb
from agentlightning.cli.output import Output, Result
from agentlightning.errors import ConfigError, PolicyError

if TYPE_CHECKING:
    from agentlightning_weights.pull import Pulled


def register(app: typer.Typer) -> None:
    verbs = typer.Typer(name="weights", no_args_is_help=True, help="Bring the weights of a run to other hosts.")
    verbs.command("pull", cls=Verb)(pull)
    app.add_typer(verbs)


def pull(
    ctx: Context,
    url: str = Argument(help="Where the run publishes (policy.weights.url)."),
    directory: Path = Argument(help="The directory for the two newest versions on this host."),
    follow: bool = Option(False, "--follow", help="Go on with each version that comes, until stopped."),
    every: float = Option(2.0, min=0.1, help="Seconds between two looks for a new version, with --follow."),
    model_server: str | None = Option(
        None, help="Let the model server at this URL load each version; it sees the directory."
    ),
    engine: Literal["vllm", "sglang"] = Option("vllm", help="The kind of that server."),
) -> None:
    """Pull the newest version: what changed since the one that is here, or all of it.

    \b
    Examples:
      agl weights pull s3://bucket/run /models/run
      agl weights pull s3://bucket/run /models/run --follow --model-server http://localhost:8000
    """
    from agentlightning_weights.pull import WeightPuller

    output: Output = ctx.obj
    puller = WeightPuller(url, directory)

    def show(pulled: Pulled) -> None:
        if model_server is not None and pulled.steps:
            asyncio.run(_load(model_server, engine, pulled))
        record = {**asdict(pulled), "directory": str(pulled.directory)}
        output.show(Result(record, _line(pulled)))

    while follow:  # A version that cannot be had is named, and the next one tried.
        try:
            pulled = puller.pull()
        except PolicyError as error:
            typer.echo(f"warning: {error}", err=True)
        else:
            if pulled is not None and pulled.steps:
                show(pulled)
        time.sleep(every)
    if (pulled := puller.pull()) is None:
        raise ConfigError(f"nothing is published at {puller.bucket.url} yet; wait for the run, or use --follow")
    show(pulled)


async def _load(url: str, engine: str, pulled: Pulled) -> None:
    """Let a server load a version. Raises ModelServerError."""
    from agentlightning.engine.servers.config import ENGINES
    from agentlightning.transport import Transport

    transport = Transport()
    try:
        server = ENGINES.find(engine)(transport, url)
        await server.load_weights(pulled.directory, f"version-{pulled.version}", lambda: None)
    finally:
        await transport.close()


def _line(pulled: Pulled) -> str:
    from rich.filesize import decimal

    if not pulled.steps:
        return f"version {pulled.version} is here: {pulled.directory}"
    return f"version {pulled.version}: {decimal(pulled.bytes)} in {pulled.seconds:.2f} s: {pulled.directory}"
