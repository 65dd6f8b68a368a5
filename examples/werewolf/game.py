"""A small game of werewolf for five: one werewolf, one seer, three villagers. The rules, and nothing else.

In the night the werewolf kills somebody; the seer, if alive, then looks at two and learns what they are. At dawn all
living players speak once, in the order of their seats: they say nothing, or that somebody is the wolf, or that
somebody is good. Then they vote in secret. The village wins if the werewolf has more votes than anybody else.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass, field

PLAYERS = ("Ann", "Bob", "Cleo", "Dan", "Eve")
WEREWOLF, SEER, VILLAGER = "werewolf", "seer", "villager"
ROLES = (WEREWOLF, SEER, VILLAGER, VILLAGER, VILLAGER)
NOTHING = "nothing"
LOOKS = 2
"""Players whom the seer may look at."""
STATEMENT = re.compile(rf"({'|'.join(PLAYERS)}) is (wolf|good)")


@dataclass
class Game:
    """What has happened so far. `roles`: by player."""

    roles: dict[str, str]
    alive: list[str] = field(default_factory=lambda: list(PLAYERS))
    saw: str = ""
    """What the seer knows: a statement on the werewolf, if it looked at it, or else on whom it looked at last."""
    said: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(player, statement), in order."""

    @classmethod
    def of_seed(cls, seed: int) -> Game:
        return cls(dict(zip(PLAYERS, random.Random(seed).sample(ROLES, len(ROLES)), strict=True)))

    def player(self, role: str) -> str:
        """The werewolf, or the seer."""
        return next(player for player, own in self.roles.items() if own == role)

    def others(self, player: str) -> list[str]:
        """Who can be chosen by a player."""
        return [other for other in self.alive if other != player]

    def view(self, player: str, deed: str) -> str:
        """What a player is asked: nobody sees more than is public, besides the own role and what the seer saw."""
        role = self.roles[player]
        lines = [f"{role} {player} {deed}", f"alive {' '.join(self.alive)}"]
        lines += [f"{speaker} says {statement}" for speaker, statement in self.said]
        return "\n".join([*lines, *([f"saw {self.saw}"] if role == SEER and self.saw else [])])

    # -- moves: a move against the rules is lost ---------------------------------------------------------------------

    def kill(self, name: str) -> None:
        if name in self.others(self.player(WEREWOLF)):
            self.alive.remove(name)

    def look(self, name: str) -> None:
        if name in self.others(self.player(SEER)) and not self.saw.endswith("wolf"):
            self.saw = f"{name} is {'wolf' if self.roles[name] == WEREWOLF else 'good'}"

    def speak(self, player: str, text: str) -> None:
        self.said.append((player, text if STATEMENT.fullmatch(text) else NOTHING))

    def village_wins(self, votes: dict[str, str]) -> bool:
        """Whether the werewolf has more votes than anybody else. `votes`: by player."""
        counted = Counter(name for player, name in votes.items() if name in self.others(player))
        (first, most), *rest = [*counted.most_common(2), ("", 0)]
        return self.roles.get(first) == WEREWOLF and most > rest[0][1]
