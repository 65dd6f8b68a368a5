"""`agl status`: how far a training run is, running here, on a shared disk, on a server elsewhere, or over."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from agentlightning.cli.opening import is_url, run_or_newest
from agentlightning.cli.options import Token
from agentlightning.cli.output import Result, agl
from agentlightning.cli.viewing.remote_status import remote_status
from agentlightning.errors import ConfigError
from agentlightning.util.printable import printable
from agentlightning.util.progress import duration
from agentlightning.util.sparkline import sparkline

LOOK: Final = {"finished": ("report",), "unfinished": ("train", "--resume")}
"""The verb that leads on from a run, by its status."""


def status(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="The directory of a run (running, finished or crashed; default: the newest below runs), or the address"
            " of a server that shows it: the link of its dashboard.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--run", help="Of a server: which of its runs. Default: the running one.", show_default=False),
    ] = None,
    token: Token = None,
) -> Result:
    """Say how far a training run is: its step, reward, validation, speed, failures and warnings.

    \b
    Examples:
      agl status
      agl status runs/first --json
      agl status http://hub:4747 --run first
    """
    if target is not None and is_url(target):
        record, rewards = remote_status(target, token, name)
        after = []
    else:
        run = run_or_newest(None if target is None else Path(target))
        record, rewards = _local_status(run, name)
        after = [agl(*LOOK.get(record["status"], ("dashboard",)), run)]
    return Result(record, lambda console: _print(record, rewards, console), after)


def _local_status(run: Path, name: str | None) -> tuple[dict[str, Any], list[float | None]]:
    from agentlightning.dashboard.data.status import status_record

    if name is not None:
        raise ConfigError(f"--run {name} chooses among the runs of a server, and {run} is a directory; leave it out")
    return status_record(run)


def _print(record: dict[str, Any], rewards: list[float | None], console: Console) -> None:
    of = "" if record["steps"] is None else f" of {record['steps']}"
    left = "" if record["seconds_left"] is None else f", about {duration(record['seconds_left'])} left"
    head = f"{record['run_dir']}: {record['status']}, step {record['step']}{of}, {duration(record['seconds'])}{left}"
    console.print(head)
    if record["reward"] is not None:
        spark = sparkline([float("nan") if each is None else each for each in rewards])
        first, best = record["first_reward"], record["best_reward"]
        console.print(f"reward      {record['reward']:.3f}  {spark}  from {first:.3f}, best {best:.3f}")
    for mode, value in record["validation"].items():
        console.print(f"validation  {mode} {value:.3f}  (step {record['validated_at']})")
    for mode, value in record["start"].items():
        scored, tasks = record.get("start_tasks", {}).get(mode, (0, 0))  # A server elsewhere may be older.
        some = "" if scored == tasks else f"{scored} of {tasks} "
        console.print(f"start       {mode} {value:.3f}, on {some}held-out tasks")
    if record["tokens_per_second"]:
        console.print(f"speed       {record['tokens_per_second']:,.0f} tokens/s")
    rejected = sum(record["rejected_rollouts"].values())
    if record["sessions"] is None:
        console.print(f"rollouts    {record['rollouts']}, {record['failed_rollouts']} failed, {rejected} rejected")
    else:
        console.print(f"sessions    {record['sessions']}")
    for each in record["failures"]:
        console.print(f"failed      {each['count']}  {printable(each['cause'])}  {printable(each['example'])}")
    for text in record["warnings"].values():
        console.print(f"warning     {printable(text)}", style="yellow")
    if record["prompts"]:
        from agentlightning.cli.formatting.training_report import print_prompt_diff

        print_prompt_diff(record["prompt_diff"], console)
