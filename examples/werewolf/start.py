"""A tiny model to begin with: it can say what the seer saw, and vote as it hears, but often does neither."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from game import LOOKS, NOTHING, SEER, STATEMENT, WEREWOLF, Game

import agentlightning as agl

STEPS, BATCH = 400, 40
CLEAN = 0.75
"""The first share of the demonstrations, by players who keep to what they know. It teaches to copy names, which RL
alone would not; the habits of the others are what RL changes."""


EASY = 0.25
"""The share that is kept of moves that copy nothing, of which a game has the most."""
TELLING = 3
"""How often a move of the seer that speaks is shown, which a game has at most once."""


@dataclass(frozen=True)
class Habits:
    """How players move."""

    tells: float
    """How often the seer says what it saw."""
    believes: float
    """How often a vote follows the last accusation."""
    claims: float
    """How often anybody else says something, of somebody by chance."""


KNOWING, START = Habits(1.0, 1.0, 0.5), Habits(0.4, 0.6, 0.2)


def move(game: Game, player: str, deed: str, habits: Habits, rng: random.Random) -> str:
    """What a player says."""
    others = game.others(player)
    if deed == "speaks":
        if game.roles[player] == SEER and game.saw and rng.random() < habits.tells:
            return game.saw
        return f"{rng.choice(others)} is {rng.choice(['wolf', 'good'])}" if rng.random() < habits.claims else NOTHING
    accused = [
        found[1]
        for _, said in game.said
        if (found := STATEMENT.fullmatch(said)) and found[2] == "wolf" and found[1] in others
    ]
    if deed == "votes" and accused and rng.random() < habits.believes:
        return accused[-1]
    return rng.choice([name for name in others if deed != "looks" or not game.saw.startswith(name)])


def moves(game: Game, habits: Habits, rng: random.Random) -> list[tuple[str, str]]:
    """Plays a game to its votes: what each player was asked, and said."""
    found: list[tuple[str, str]] = []

    def ask(player: str, deed: str) -> str:
        said = move(game, player, deed, habits, rng)
        found.append((game.view(player, deed), said))
        return said

    game.kill(ask(game.player(WEREWOLF), "kills"))
    for _ in range(LOOKS if game.player(SEER) in game.alive else 0):
        game.look(ask(game.player(SEER), "looks"))
    for player in game.alive:
        game.speak(player, ask(player, "speaks"))
    for player in game.alive:
        ask(player, "votes")
    return found


def demonstrations(count: int, seed: int, habits: Habits) -> list[dict[str, Any]]:
    """`count` moves of such games, as conversations."""
    rng = random.Random(seed)
    found: list[tuple[str, str]] = []
    while len(found) < count:
        played = moves(Game.of_seed(rng.getrandbits(32)), habits, rng)
        told = [each for each in played if " speaks" in each[0] and "saw" in each[0]]
        found += TELLING * told
        found += [each for each in played if each not in told and (" wolf" in each[0] or rng.random() < EASY)]
    rng.shuffle(found)
    roles = ("user", "assistant")
    return [
        {"messages": [{"role": role, "content": text} for role, text in zip(roles, each, strict=True)]}
        for each in found[:count]
    ]


def make_start(folder: Path, seed: int, steps: int = STEPS) -> Path:
    """A new model that imitates players who keep to what they know, and then such as have the habits of the start."""
    from agentlightning.models.tiny import make_tiny  # with torch, which the game itself does not need

    clean = round(CLEAN * steps * BATCH)
    shown = demonstrations(clean, seed, KNOWING) + demonstrations(steps * BATCH - clean, seed + 1, START)
    model = make_tiny(folder / "new", shown, seed=seed, context_length=256)
    optimizer: Any = {"type": "muon", "muon_lr": 0.02, "lr": 6e-3, "schedule": "linear", "warmup_steps": 10}
    settings: Any = {"steps": steps, "batch_size": BATCH, "shuffle": False, "optimizer": optimizer, "seed": seed}
    agl.SFTAlgorithm(model, shown, output=folder / "start", **settings).train()
    return folder / "start"
