"""A harder world for prompt optimisation than `PromptWorld`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from agentlightning.testing.prompt_world import ADVICE, PromptWorld


class InteractingWorld(PromptWorld):
    """Instructions that interact, and edits that are not localised.

    Four instructions help only beside their partner, two pairs weaken each other (.95 to .85), and each line that is no
    instruction costs all .01. With probability .3 an edit also loses another line.
    """

    partners: Final = {2: 0, 5: 3, 7: 6, 10: 9}
    rivals: Final = {1: 4, 4: 1, 8: 11, 11: 8}
    loss: Final = 0.3

    def probability(self, number: int, given: frozenset[int], prompt: str) -> float:
        if number not in given or self.partners.get(number, number) not in given:
            return self.luck
        clutter = 0.01 * sum(advice in prompt for advice in ADVICE)
        rivalry = 0.1 if self.rivals.get(number) in given else 0.0
        return self.follow - clutter - rivalry

    def edited(self, lines: Sequence[str], critique: str) -> list[str]:
        kept = list(lines)
        rng = self._random("edit", critique)
        if kept and rng.random() < self.loss:
            kept.remove(rng.choice(kept))
        return super().edited(kept, critique)
