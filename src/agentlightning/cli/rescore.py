"""`agl rescore`: apply a new reward function to stored rollouts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from agentlightning.cli import store as stores
from agentlightning.cli.opening import named_store
from agentlightning.cli.options import Reward, Store, Token
from agentlightning.cli.output import Result, agl
from agentlightning.errors import ConfigError
from agentlightning.util.json_values import loads
from agentlightning.util.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console

    from agentlightning.rescorer import Rescoring


async def rescore(
    ctx: typer.Context,
    reward: Reward = None,
    run: Annotated[
        str | None, typer.Option(help="A run directory, or part of the rollout id.", show_default=False)
    ] = None,
    store: Store = None,
    server: stores.Server = None,
    token: Token = None,
    status: stores.Statuses = None,
    mode: stores.Modes = None,
    task: Annotated[
        str | None, typer.Option(help="JSON: a task, or some of its keys with their values.", show_default=False)
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Rollouts to score at the same time.")] = 8,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Score and report, but write nothing.")] = False,
) -> Result:
    """Apply a new reward function to stored rollouts.

    Each gets a new final reward; earlier ones stay recorded. Without --status: rollouts that succeeded.

    \b
    Examples:
      agl rescore --reward new_reward.py:score --run runs/first --dry-run
      agl rescore --reward new_reward.py:score --store hub.db --mode train --task '{"level": 3}'
    """

    from agentlightning.rescorer import Selection, rescore_async
    from agentlightning.training.persistence.run_dir import read_state

    if reward is None:
        raise ConfigError("agl rescore needs --reward module:function")
    directory = Path(run) if run is not None and (Path(run) / "state.json").exists() else None
    named = run if directory is None else read_state(directory).run_id
    place = named_store(store, server)
    if place is None and directory is not None:
        place = str(directory / "store.db")
    selection = Selection(
        run=named,
        status=stores.checked(status, "status") or ("succeeded",),
        mode=stores.checked(mode, "mode"),
        task=_task(task),
    )
    with Progress(ctx.obj.console) as progress:
        async with stores.open_named(place, token) as opened:
            progress.phase("scoring rollouts")
            result = await rescore_async(
                opened, reward, selection, concurrency=concurrency, dry_run=dry_run, on_progress=progress.update
            )
    if dry_run:
        chosen = [f"--status={each}" for each in status or ()] + [f"--mode={each}" for each in mode or ()]
        after = agl("rescore", *chosen, reward=reward, run=run, task=task, store=store, server=server)
    else:
        after = agl("store", "list", sort="reward", store=place)
    return Result(asdict(result), lambda console: _show(result, console), [after])


def _task(text: str | None) -> Any:
    try:
        return None if text is None else loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"--task {text!r} is not JSON ({error}); for text, write --task '\"...\"'") from error


def _show(result: Rescoring, console: Console) -> None:
    verb = "would get" if result.dry_run else "have"
    parts = [f"{result.rescored:,} of {result.rollouts:,} rollouts {verb} a new reward"]
    parts += [f"{result.unchanged:,} unchanged"] if result.unchanged else []
    parts += [f"{result.without_attempt:,} never ran"] if result.without_attempt else []
    parts += [f"{len(result.failed):,} failed and keep theirs"] if result.failed else []
    console.print("; ".join(parts))
    if result.mean_before is not None and result.mean_after is not None:
        console.print(f"mean reward {result.mean_before:.4g} -> {result.mean_after:.4g}")
    for rollout_id, message in list(result.failed.items())[:3]:
        console.print(f"{rollout_id}: {message}")
