"""What a dry run has seen, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Console

from agentlightning.util.printable import printable

if TYPE_CHECKING:
    from agentlightning.training.dry_run import DryRun, DryRunCheck, DryRunRollout

STYLES: Final = {"ok": "green", "warning": "yellow", "failed": "red"}
MOST_TEXT: Final = 400
"""Characters of a message that are shown."""
LAST_LINES: Final = 8
"""Lines of a traceback that are shown, the last ones."""


def print_dry_run(found: DryRun, console: Console) -> None:
    """Print each check with what to look for, one rollout as an example, and whether training can begin."""
    console.print()
    for check in found.checks:
        _print_check(check, console)
    if found.rollouts:
        _print_example(found.rollouts, console)
    counts = {name: sum(each.outcome == name for each in found.checks) for name in ("failed", "warning")}
    if not found.is_ready:
        console.print(f"\nnot ready: {counts['failed']} of {len(found.checks)} checks failed", style="red")
    elif counts["warning"]:
        warnings = "1 warning" if counts["warning"] == 1 else f"{counts['warning']} warnings"
        console.print(f"\nready, with {warnings}", style="yellow")
    else:
        console.print("\nready", style="green")


def _print_check(check: DryRunCheck, console: Console) -> None:
    first, *rest = map(printable, check.text.splitlines() or [""])
    console.print(f"{check.outcome:<8}", style=STYLES[check.outcome], end="")
    console.print(f" {check.name:<9} {first}")
    if len(rest) > LAST_LINES:
        console.print(f"{'':<19}... {len(rest) - LAST_LINES} lines")
    for line in rest[-LAST_LINES:]:
        console.print(f"{'':<19}{line}")
    if check.advice and check.outcome != "ok":
        console.print(f"{'':<9} {'try':<9} {printable(check.advice)}")


def _print_example(rollouts: tuple[DryRunRollout, ...], console: Console) -> None:
    """The best of them, message by message."""
    from agentlightning.training.sources.collector import said

    shown = max(rollouts, key=lambda each: (each.policy_calls > 0, each.reward is not None, each.reward or 0.0))
    reward = "no reward" if shown.reward is None else f"reward {shown.reward:g}"
    console.print(f"\none rollout of {len(rollouts)}, {reward}")
    console.print(f"  task       {_short(shown.task)}")
    for message in shown.transcript:
        console.print(f"  {message.get('role', '?')!s:<10} {_short(said(message))}")
    console.print(f"  output     {_short(shown.output)}")


def _short(value: object) -> str:
    text = printable(str(value))
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 3]}..."
