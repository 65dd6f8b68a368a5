"""How far each update moved the probability of the tokens it learned from, written for the token view of the dashboard.

The ratio of new to old of a token is exp(log p under the weights after the update - log p when it was sampled). After
an update of one minibatch this is what the update has done; a loss that clips stops counting a token whose ratio leaves
the clip range in a later minibatch.

A line of `ratios/step-000012.jsonl` is one call: `{"rollout": ..., "call": span_id, "log_ratios": [...]}`, a number for
each sampled token, rounded to four digits. A step that is repeated after a crash writes its lines once more: the last
one of a call counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import orjson

from agentlightning.policy.base import Metrics
from agentlightning.policy.learner import Learner
from agentlightning.training.callbacks import Callback, NoState
from agentlightning.training.persistence.run_dir import RunState
from agentlightning.trajectory import CallId, FloatArray, TrainingSample

FOLDER = "ratios"
DIGITS = 4
CallRatios = dict[CallId, list[float]]
"""Log-ratios of the sampled tokens of each call, by (rollout_id, span_id)."""


def ratios_file(run_dir: Path, step: int) -> Path:
    """Where the ratios of a step are."""
    return run_dir / FOLDER / f"step-{step:06d}.jsonl"


class TokenRatios(Callback[NoState]):
    """Scores the tokens of each update once more, and writes their ratios (`run.token_ratios`)."""

    name = "token_ratios"

    def __init__(self, directory: Path, state: RunState, learner: Learner) -> None:
        self.directory, self.run_state, self.learner = directory, state, learner

    async def on_update(self, samples: Sequence[TrainingSample]) -> Metrics:
        """Returns what that cost. Raises PolicyError for a policy that cannot score tokens."""
        began = time.monotonic()
        found: CallRatios = {}
        for adapter in dict.fromkeys(sample.adapter for sample in samples):
            own = [sample for sample in samples if sample.adapter == adapter]
            columns = await self.learner.score([sample.tree for sample in own], {"logprobs"}, adapter=adapter)
            for sample, logprobs in zip(own, columns["logprobs"], strict=True):
                _add(found, sample, logprobs)
        await asyncio.to_thread(write_ratios, self.directory, self.run_state.step + 1, found)
        return {"ratio_seconds": time.monotonic() - began}


def write_ratios(run_dir: Path, step: int, found: CallRatios) -> None:
    """Add a line for each call."""
    path = ratios_file(run_dir, step)
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        if file.tell():
            file.write(b"\n")  # ends a line that a crash cut off
        for (rollout, call), ratios in found.items():
            file.write(orjson.dumps({"rollout": rollout, "call": call, "log_ratios": ratios}) + b"\n")


def read_ratios(run_dir: Path, step: int, rollout_ids: Collection[str]) -> CallRatios:
    """Those of some rollouts in a step; empty where none were recorded."""
    found: CallRatios = {}
    needles = [orjson.dumps({"rollout": each})[:-1] + b"," for each in rollout_ids]
    try:
        with ratios_file(run_dir, step).open("rb") as file:
            lines = [line for line in file if any(line.startswith(each) for each in needles)]
    except OSError:
        return found
    for line in lines:
        try:
            each: Any = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue  # a line that a crash cut off
        found[each["rollout"], each["call"]] = each["log_ratios"]
    return found


def _add(found: CallRatios, sample: TrainingSample, logprobs: Sequence[FloatArray]) -> None:
    """The nodes of a call stand in order: an update of the weights or a later prompt may have split it."""
    for node, new in zip(sample.tree.nodes, logprobs, strict=True):
        if node.sampled and node.call is not None and node.rollout_id is not None and node.logprobs:
            ratios = [round(float(now) - old, DIGITS) for now, old in zip(new, node.logprobs, strict=True)]
            found.setdefault((node.rollout_id, node.call), []).extend(ratios)
