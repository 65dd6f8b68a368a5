"""A tiny model to begin with: it knows how to speak and to vote, and has no idea of the game."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from game import NOTHING, SEER, STATEMENT, WEREWOLF, Game

import agentlightning as agl

STEPS, BATCH = 150, 40
TELLS, BELIEVES = 0.5, 0.5
"""How often the seer says what it saw, and how often a vote follows what somebody said."""
CLAIMS = 0.2
"""How often anybody else says something."""


def move(game: Game, player: str, deed: str, rng: random.Random) -> str:
    """What a player of the start says."""
    others = game.others(player)
    if deed == "speaks":
        if game.roles[player] == SEER and game.saw and rng.random() < TELLS:
            return game.saw
        return f"{rng.choice(others)} is {rng.choice(['wolf', 'good'])}" if rng.random() < CLAIMS else NOTHING
    accused = [
        found[1]
        for _, said in game.said
        if (found := STATEMENT.fullmatch(said)) and found[2] == "wolf" and found[1] in others
    ]
    if deed == "votes" and accused and rng.random() < BELIEVES:
        return accused[-1]
    return rng.choice(others)


def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Moves of such games, as conversations."""
    rng = random.Random(seed)
    found: list[dict[str, Any]] = []
    while len(found) < count:
        game = Game.of_seed(rng.getrandbits(32))

        def ask(player: str, deed: str, game: Game = game) -> str:
            said = move(game, player, deed, rng)
            asked = {"role": "user", "content": game.view(player, deed)}
            found.append({"messages": [asked, {"role": "assistant", "content": said}]})
            return said

        game.kill(ask(game.player(WEREWOLF), "kills"))
        if game.player(SEER) in game.alive:
            game.look(ask(game.player(SEER), "looks"))
        for player in game.alive:
            game.speak(player, ask(player, "speaks"))
        for player in game.alive:
            ask(player, "votes")
    rng.shuffle(found)
    return found[:count]


def make_start(folder: Path, seed: int, steps: int = STEPS) -> Path:
    """A new model that imitates such moves."""
    from agentlightning.models.tiny import make_tiny  # with torch, which the game itself does not need

    shown = demonstrations(steps * BATCH, seed)
    model = make_tiny(folder / "new", shown, seed=seed, context_length=256)
    optimizer: Any = {"type": "muon", "muon_lr": 0.02, "lr": 6e-3, "schedule": "linear", "warmup_steps": 10}
    settings: Any = {"steps": steps, "batch_size": BATCH, "optimizer": optimizer, "seed": seed}
    agl.SFTAlgorithm(model, shown, output=folder / "start", **settings).train()
    return folder / "start"
