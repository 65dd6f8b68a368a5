"""`agl credit`: what recorded rollouts say about credit rules: compare."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from rich.console import Console
from rich.table import Table

from agentlightning.cli.opening import store_to_read, weights_of
from agentlightning.cli.options import RewardWeights, RunStore, Store
from agentlightning.cli.output import Result, agl
from agentlightning.errors import ConfigError, DatasetError

if TYPE_CHECKING:
    from agentlightning.evaluation.credit_comparison import CreditComparison
    from agentlightning.trajectory import Trajectory

Mode = Annotated[Literal["train", "val", "test"] | None, typer.Option(help="Only rollouts of this mode.")]


async def compare(
    earlier: Annotated[str | None, typer.Argument(help="The earlier form of --store.", hidden=True)] = None,
    run: RunStore = None,
    store: Store = None,
    rules: Annotated[
        list[str] | None,
        typer.Option(
            "--rule", help="A rule's name, or JSON with its type and settings; repeatable (default: all rules)."
        ),
    ] = None,
    groups: Annotated[int, typer.Option(min=1, help="Use at most this number of groups, the newest.")] = 128,
    mode: Mode = None,
    target_agent: Annotated[str | None, typer.Option(help="Only calls of agents whose name matches.")] = None,
    reward_weights: RewardWeights = None,
) -> Result:
    """Estimate how many rollouts each credit rule needs until its gradient shows more signal than noise.

    Reads the groups of a store (rollouts of one task each); nothing is trained and no model is needed.

    \b
    Examples:
      agl credit compare --run runs/first
      agl credit compare --store hub.db --rule grpo --rule '{"type": "gae", "lam": 0.9}'
    """
    from agentlightning.credit.base import RULES
    from agentlightning.evaluation.credit_comparison import compare_credit

    if earlier is not None:
        typer.echo(f"STORE is an option now: --store {earlier}", err=True)
    place = store_to_read(run, store or earlier)
    weights = weights_of(reward_weights, place)
    chosen = [_rule(each) for each in rules] if rules else RULES.names()
    recorded, unreadable = await _read(place, groups, mode)
    found = compare_credit(recorded, chosen, target_agent=target_agent, reward_weights=weights, left_out=unreadable)
    best = sorted(found.signals, key=lambda each: -each.snr)[:1]
    settings = Path(place).with_name("config.toml") if place else None  # Of the run whose store it is.
    of_run = ["--config", settings] if settings is not None and settings.is_file() else []
    after = [agl("train", *of_run, f"algorithm.credit={each.rule}", "--dry-run") for each in best]
    return Result(found.as_json(), lambda console: _show(found, console), after)


async def _read(store: str | None, groups: int, mode: Mode) -> tuple[list[list[Trajectory]], dict[str, int]]:
    """The newest groups of finished rollouts, and rollouts that cannot be read by reason."""
    from agentlightning.cli.store import open_named
    from agentlightning.credit import group_trajectories
    from agentlightning.credit.rejection import count_reasons
    from agentlightning.training.sources.collector import TrajectoryReader, find_groups

    async with open_named(store) as opened:
        found = await find_groups(opened, None if mode is None else [mode])
        if not found:
            of_mode = "" if mode is None else f" of mode {mode}"
            raise DatasetError(f"{store} has no finished rollout{of_mode}; record some first, or train for a step")
        chosen = {rollout_id: group for group, ids in found[-groups:] for rollout_id in ids}
        tasks = {each.rollout_id: each.input for each in await opened.query_rollouts(rollout_id_in=list(chosen))}
        trajectories, rejected = await TrajectoryReader(opened).read(chosen, tasks=tasks)
    return group_trajectories(trajectories), count_reasons(rejected)


def _rule(text: str) -> Any:
    if not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--rule {text!r} is not JSON: {error}") from error


# -- output ----------------------------------------------------------------------------------------------------------


def _show(found: CreditComparison, console: Console) -> None:
    console.print(f"{found.groups} groups, {found.rollouts} rollouts")
    for reason, count in found.left_out.items():
        console.print(f"left out: {count} {reason.replace('_', ' ')}")
    table = Table("rule", "signal-to-noise of a group", "rollouts to 1", "agreement", "groups used", box=None)
    for each in found.signals:
        low, high = each.interval
        fewest, most = each.rollouts_interval
        agreement = "" if each.agreement is None else f"{each.agreement:.2f}"
        table.add_row(
            each.rule,
            f"{each.snr:.3g} ({low:.3g} to {high:.3g})",
            f"{_count(each.rollouts)} ({_count(fewest)} to {_count(most)})",
            agreement,
            str(each.groups_used),
        )
    console.print(table)
    for rule, reason in found.unusable.items():
        console.print(f"{rule} cannot be used here: {reason}")


def _count(rollouts: float) -> str:
    return f"{rollouts:,.0f}" if math.isfinite(rollouts) else "no signal"


VERBS: Final = {"compare": compare}
