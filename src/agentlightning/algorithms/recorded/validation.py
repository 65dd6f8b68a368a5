"""The loss on conversations that are not learned from, and the weights at which it was lowest."""

from __future__ import annotations

import shutil
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
    best_directory: Path | None
    """Where the best weights are kept, beyond the end of the process. None: in a temporary directory."""
    validation_losses: dict[int, float]
    """By step, what was measured; of a run that is resumed, from the beginning."""

    async def logprobs(self, trees: Sequence[TokenTree]) -> Sequence[tuple[Any, ...]]:
        """The log-probability of each sampled token under the present weights."""
        ...

    async def keep(self, directory: Path) -> None: ...

    async def restore(self, directory: Path) -> None: ...


class Validation:
    """Measures the loss on trees; a context, within which it keeps the best weights."""

    def __init__(self, trees: Sequence[TokenTree], learner: Validated) -> None:
        self.trees = [tree for tree in trees if tree.num_sampled]
        self.losses = learner.validation_losses
        self._learner = learner
        self._folder: Path | None = None

    async def __aenter__(self) -> Self:
        if self.trees and self._learner.keeps_best:
            self._folder = self._learner.best_directory or Path(tempfile.mkdtemp(prefix="agl-best-"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._folder is not None and self._learner.best_directory is None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def best_step(self) -> int | None:
        """The step with the lowest loss, the first of equal ones. None where nothing is measured, or no weights are
        kept."""
        if self._folder is None or not self.losses:
            return None
        return min(self.losses, key=lambda step: (self.losses[step], step))

    async def measure(self, step: int) -> Mapping[str, float]:
        """The mean loss of a token after `step`, for the step's metrics; empty without validation conversations."""
        if not self.trees:
            return {}
        if step not in self.losses:
            scores = await self._learner.logprobs(self.trees)
            total = sum(float(each.sum()) for tree in scores for each in tree)
            self.losses[step] = -total / sum(tree.num_sampled for tree in self.trees)
            if self.best_step == step:
                await self._learner.keep(self._place(step))
                if self._learner.best_directory is None:  # Else a resumed run could still need the one before.
                    forget_all_but(self._place(step))
        return {"validation_loss": self.losses[step]}

    async def restore_best(self) -> None:
        """Return to the weights with the lowest loss, if these are not the present ones."""
        if self.best_step is not None and self.best_step != max(self.losses):
            await self._learner.restore(self._place(self.best_step))

    def _place(self, step: int) -> Path:
        assert self._folder is not None
        return self._folder / f"step-{step:06d}"


def forget_all_but(best: Path) -> None:
    """Remove the weights that were the best before."""
    for entry in best.parent.glob("step-*"):
        if entry.name != best.name:
            shutil.rmtree(entry)
