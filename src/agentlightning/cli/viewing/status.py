"""`agl status`: how far a training run is, running here, on a shared disk, on a server elsewhere, or over."""

from __future__ import annotations

import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from agentlightning.cli.opening import run_or_newest
from agentlightning.cli.options import Json, Token
from agentlightning.cli.output import agl, open_output
from agentlightning.cli.viewing.remote_status import is_url, remote_status, reward_figures
from agentlightning.util.printable import printable
from agentlightning.util.progress import duration
from agentlightning.util.sparkline import sparkline

if TYPE_CHECKING:
    from agentlightning.training.health.examination import Examination
    from agentlightning.training.health.step_record import StepRecord


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
    as_json: Json = False,
) -> None:
    """Say how far a training run is: its step, reward, validation, speed, failures and warnings.

    \b
    Examples:
      agl status
      agl status runs/first --json
      agl status http://hub:4747 --run first
    """
    with open_output(as_json) as output:
        if target is not None and is_url(target):
            record, rewards = remote_status(target, token, name)
            after = []
        else:
            run = run_or_newest(None if target is None else Path(target))
            record, rewards = _local_status(run, name)
            after = [agl(*LOOK.get(record["status"], ("dashboard",)), run)]
        output.finish(record, lambda console: _print(record, rewards, console), *after)


def _local_status(run: Path, name: str | None) -> tuple[dict[str, Any], list[float | None]]:
    from agentlightning.errors import ConfigError
    from agentlightning.training.health.examination import examine, read_records

    if name is not None:
        raise ConfigError(f"--run {name} chooses among the runs of a server, and {run} is a directory; leave it out")
    found = examine(run)
    records, _ = read_records(run / "metrics.jsonl")
    return record_of(found, records), [each.reward for each in records]


def record_of(found: Examination, records: list[StepRecord]) -> dict[str, Any]:
    """The state of a run as JSON values."""
    from agentlightning.training.persistence.checkpoints import prompts_of

    state = found.state
    validated = next((each for each in reversed(records) if each.validation), None)
    # The settings say nothing of the steps of an algorithm object, nor of one of `Trainer.train`.
    total = None if state.algorithm or state.recorded else _total_steps(found.run_dir)
    per_step = state.seconds / state.step if state.step else None
    left = per_step * (total - state.step) if per_step and total and found.status != "finished" else None
    means = {
        name.removeprefix("before-"): sum(known) / len(known)
        for name, each in state.evaluations.items()
        if name.startswith("before-") and (known := [value for value in each if value is not None])
    }
    return {
        "run_dir": str(found.run_dir),
        "status": found.status,
        "step": state.step,
        "steps": total,
        "seconds": round(state.seconds, 1),
        "seconds_left": None if left is None else round(left, 1),
        **reward_figures([each.reward for each in records]),
        "start": means,
        "validation": dict(validated.validation) if validated else {},
        "validated_at": validated.step if validated else None,
        "tokens_per_second": records[-1].tokens_per_second if records else None,
        "sessions": None if state.recorded is None else state.recorded.sessions,
        "rollouts": state.rollouts,
        "failed_rollouts": state.failed_rollouts,
        "rejected_rollouts": dict(state.rejected),
        "failures": [asdict(each) for each in found.failures],
        "warnings": dict(state.warnings),
        **prompts_of(found.run_dir, "checkpoint" if found.status == "finished" else state.checkpoint),
    }


def _total_steps(run_dir: Path) -> int | None:
    """The steps of the whole run; None where its settings do not say."""
    try:
        settings = tomllib.loads((run_dir / "config.toml").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    steps = settings.get("algorithm", {}).get("steps")
    return steps if isinstance(steps, int) else None


def _print(record: dict[str, Any], rewards: list[float | None], console: Console) -> None:
    of = "" if record["steps"] is None else f" of {record['steps']}"
    left = "" if record["seconds_left"] is None else f", about {duration(record['seconds_left'])} left"
    head = f"{record['run_dir']}: {record['status']}, step {record['step']}{of}, {duration(record['seconds'])}{left}"
    console.print(head, markup=False)
    if record["reward"] is not None:
        spark = sparkline([float("nan") if each is None else each for each in rewards])
        first, best = record["first_reward"], record["best_reward"]
        console.print(f"reward      {record['reward']:.3f}  {spark}  from {first:.3f}, best {best:.3f}")
    for mode, value in record["validation"].items():
        console.print(f"validation  {mode} {value:.3f}  (step {record['validated_at']})", markup=False)
    for mode, value in record["start"].items():
        console.print(f"start       {mode} {value:.3f}, on held-out tasks", markup=False)
    if record["tokens_per_second"]:
        console.print(f"speed       {record['tokens_per_second']:,.0f} tokens/s")
    rejected = sum(record["rejected_rollouts"].values())
    if record["sessions"] is None:
        console.print(f"rollouts    {record['rollouts']}, {record['failed_rollouts']} failed, {rejected} rejected")
    else:
        console.print(f"sessions    {record['sessions']}")
    for each in record["failures"]:
        console.print(
            f"failed      {each['count']}  {printable(each['cause'])}  {printable(each['example'])}", markup=False
        )
    for text in record["warnings"].values():
        console.print(f"warning     {printable(text)}", style="yellow", markup=False)
    if record["prompts"]:
        from agentlightning.cli.formatting.training_report import print_prompt_diff

        print_prompt_diff(record["prompt_diff"], console)
