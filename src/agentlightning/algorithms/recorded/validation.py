"""The loss on conversations that are not learned from, and the weights at which it was lowest."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from agentlightning.trajectory import TokenTree


class Validated(Protocol):
    """What learns."""

    keeps_best: bool
    """Whether it can return to earlier weights."""

    async def logprobs(self, trees: Sequence[TokenTree]) -> Sequence[tuple[Any, ...]]:
        """The log-probability of each sampled token under the present weights."""
        ...

    async def keep(self, directory: Path) -> None: ...

    async def restore(self, directory: Path) -> None: ...


class Validation:
    """Measures the loss on trees; a context, within which it keeps the best weights in a temporary directory."""

    def __init__(self, trees: Sequence[TokenTree], learner: Validated) -> None:
        self.trees = [tree for tree in trees if tree.num_sampled]
        self.losses: dict[int, float] = {}
        """By step."""
        self.best_step: int | None = None
        """None where nothing is measured, or no weights are kept."""
        self._learner = learner
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    async def __aenter__(self) -> Self:
        if self.trees and self._learner.keeps_best:
            self._folder = tempfile.TemporaryDirectory(prefix="agl-best-")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    async def measure(self, step: int) -> Mapping[str, float]:
        """The mean loss of a token after `step`, for the step's metrics; empty without validation conversations."""
        if not self.trees:
            return {}
        scores = await self._learner.logprobs(self.trees)
        total = sum(float(each.sum()) for tree in scores for each in tree)
        loss = -total / sum(tree.num_sampled for tree in self.trees)
        if self._folder is not None and loss < min(self.losses.values(), default=float("inf")):
            self.best_step = step
            await self._learner.keep(Path(self._folder.name) / "best")
        self.losses[step] = loss
        return {"validation_loss": loss}

    async def restore_best(self) -> None:
        """Return to the weights with the lowest loss, if these are not the present ones."""
        if self._folder is not None and self.best_step not in (None, max(self.losses)):
            await self._learner.restore(Path(self._folder.name) / "best")
