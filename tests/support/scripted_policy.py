"""A policy without a model: scripted answers, recorded updates, checkpoints of a few bytes.

It runs a whole training loop (updates, checkpoints, resumption) in milliseconds and without torch:

    policy = ScriptedPolicy(lambda messages, updates: "good" if updates else "bad")
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from agentlightning.chat.base import Message
from agentlightning.errors import PolicyError
from agentlightning.policy.base import UPDATE, Capabilities, Columns, ScoreColumn, UpdateOptions
from agentlightning.testing import ScriptedEngine
from agentlightning.trajectory import TokenTree, TrainingSample

WEIGHTS = "scripted_policy.json"


@dataclass(frozen=True, slots=True)
class RecordedUpdate:
    """The arguments of one call of `ScriptedPolicy.train`."""

    samples: tuple[TrainingSample, ...]
    options: UpdateOptions


class ScriptedPolicy(ScriptedEngine):
    """A `Policy` whose weights are the number of its updates.

    `script(messages, updates)` returns the answer that weights with so many updates give. `updates` counts those of the
    present weights: `load` sets it back to that of the checkpoint, while `policy_version` only grows.
    """

    capabilities = Capabilities(in_flight=True)
    vocab_size: int | None = None

    def __init__(self, script: Callable[[list[Message], int], str], *, model: str = "policy") -> None:
        super().__init__(lambda messages: script(messages, self.updates), model=model)
        self.updates = 0
        self.recorded: list[RecordedUpdate] = []
        self.closed = False

    async def train(
        self, samples: Sequence[TrainingSample], options: UpdateOptions = UPDATE, *, in_flight: bool = False
    ) -> Mapping[str, float]:
        self.recorded.append(RecordedUpdate(tuple(samples), options))
        self.updates += 1
        self.policy_version += 1
        return {"loss": 1.0 / self.updates}

    async def kv_cache_usage(self) -> float | None:
        """None: there is no cache."""
        return None

    async def score(
        self,
        trees: Sequence[TokenTree],
        what: AbstractSet[ScoreColumn],
        *,
        reference: Path | None = None,
        adapter: str | None = None,
    ) -> Columns:
        """`logprobs` and `ref_logprobs` are those that the tokens were sampled with; other columns are 0."""
        import numpy as np

        def column(tree: TokenTree, name: ScoreColumn) -> tuple[Any, ...]:
            scale = float(name.endswith("logprobs"))
            return tuple(np.asarray(node.logprobs, dtype=np.float32) * np.float32(scale) for node in tree.nodes)

        return {name: [column(tree, name) for tree in trees] for name in what}

    async def save(self, directory: Path, *, training_state: bool = False) -> None:
        weights = orjson.dumps({"updates": self.updates, "version": self.policy_version})
        await asyncio.to_thread(_write, directory, weights)

    async def load(self, directory: Path, *, in_flight: bool = False, above: int = 0) -> None:
        """Raises PolicyError where there is no checkpoint of a ScriptedPolicy."""
        saved = scripted_weights(directory)
        self.updates = saved["updates"]
        self.policy_version = max(self.policy_version, saved["version"], above) + 1

    async def close(self) -> None:
        self.closed = True


def _write(directory: Path, weights: bytes) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    new = directory / f".{WEIGHTS}"
    new.write_bytes(weights)
    new.replace(directory / WEIGHTS)  # A checkpoint may share its file with another.


def scripted_weights(directory: Path) -> dict[str, int]:
    """The contents of a checkpoint: `updates` and `version`. Raises PolicyError where there is none."""
    try:
        return orjson.loads((directory / WEIGHTS).read_bytes())
    except (OSError, ValueError) as error:
        raise PolicyError(f"{directory} is no checkpoint of a ScriptedPolicy: {error}") from error
