"""An evaluation as `agl eval` prints it: text for people, and JSON values for programs."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from rich.console import Console

from agentlightning.cli.formatting.advice import evaluation_advice
from agentlightning.evaluation.evaluation import Evaluation
from agentlightning.evaluation.intervals import Comparison


def print_evaluation(console: Console, result: Evaluation, aa: bool = False) -> None:
    """Print the reward and, where there are such, pass@k, slices, the comparison and the A/A test."""
    console.print(f"reward {result}")
    if result.cached:
        console.print(f"{result.cached} rollouts were taken from the cache")
    for k, once, always in _passes(result):
        console.print(f"pass@{k} {once:.3f}   pass^{k} {always:.3f}")
    for field, values in result.slices.items():
        for value, part in values.items():
            console.print(f"{field}={value}: {part if part.known else 'no reward'}")
    if result.comparison is not None:
        console.print(f"gain {result.comparison}\n{_verdict(result.comparison)}")
    if aa:
        console.print(str(result.null_test()))


def evaluation_record(result: Evaluation, aa: bool = False) -> dict[str, Any]:
    """The evaluation as JSON values, as `--json` prints it."""
    record = _measured(result) | {
        "missing": result.missing,
        "reasons": dict(result.reasons),
        "repeats": result.repeats,
        "missing_rollouts": result.missing_rollouts,
        "cached": result.cached,
        "seconds": round(result.seconds, 2),
        "pass_at_k": {str(k): once for k, once, _ in _passes(result)},
        "pass_hat_k": {str(k): always for k, _, always in _passes(result)},
        "slices": {
            field: {value: _measured(part) for value, part in values.items()} for field, values in result.slices.items()
        },
    }
    if result.comparison is not None:
        record["comparison"] = asdict(result.comparison) | {"significant": result.comparison.significant}
    record["advice"] = evaluation_advice(result)
    if aa:
        found = asdict(result.null_test())
        smallest = found["smallest_gain"]
        record["aa"] = found | {"smallest_gain": None if math.isinf(smallest) else smallest}
    return record


def _measured(result: Evaluation) -> dict[str, Any]:
    known = bool(result.known)
    return {
        "reward": result.mean if known else None,
        "score": result.score if known else None,
        "interval": list(result.interval) if known else None,
        "tasks": len(result.rewards),
        "measured": len(result.known),
    }


def _passes(result: Evaluation) -> list[tuple[int, float, float]]:
    """k, pass@k and pass^k for one rollout and for all, where tasks have several."""
    if result.repeats < 2 or (result.failed_as == "exclude" and result.missing_rollouts):
        return []
    return [(k, result.pass_at_k(k), result.pass_hat_k(k)) for k in (1, result.repeats)]


def _verdict(comparison: Comparison) -> str:
    if not comparison.significant:
        return "no difference is shown"
    return "it is better" if comparison.gain > 0 else "it is worse"
