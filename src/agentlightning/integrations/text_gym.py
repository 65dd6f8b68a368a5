"""Text games as an agent of the policy: environments of `textarena`, and any with `reset` and `step` over strings.

    agl train --env "textarena:GuessTheNumber-v0?size=200" --model path/to/model

Each move is one call of the model, with the conversation so far. A game of several players is played against itself by
default: the policy makes every move, each player as the agent `player_0`, `player_1` ..., and the reward of the
rollout is that of player 0. An `opponent`, a function from observation to move, plays the others instead.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, Literal, cast

import httpx

from agentlightning.errors import ConfigError, MissingExtraError
from agentlightning.integrations.base import Address, Message, chat, model_client
from agentlightning.runner.agents.agent import function_spec, load_object
from agentlightning.tracing.emit import emit_reward, track_agent

Move = Callable[[str], str]
MAX_MOVES: Final = 100


class TextArenaGame:
    """A game of textarena as an environment of gymnasium whose info has the `current_player`; its rewards come at the
    end. `players`: how many play; None: the fewest it allows."""

    def __init__(self, name: str, players: int | None = None, **options: Any) -> None:
        try:
            import textarena  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as error:
            raise MissingExtraError("textarena", "textarena") from error
        make: Any = textarena.make
        try:
            self.env: Any = make(name, **options)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"textarena cannot make {name!r} with {options}: {error}") from error
        self._seen: dict[int, str] = {}
        self.players = players
        self.rewards: Mapping[int, float] | None = None

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        counts = range(1, 16) if self.players is None else (self.players,)
        for count in counts:
            with suppress(AssertionError, ValueError):
                self.env.reset(num_players=count, seed=seed)
                return self._turn()
        raise ConfigError(f"textarena starts no game of {counts[0]} to {counts[-1]} players; set players=N")

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        done, _ = self.env.step(action)
        if done:
            self.rewards = cast("Mapping[int, float] | None", self.env.close()[0])
            return "", float((self.rewards or {}).get(0, 0.0)), True, {}
        observation, info = self._turn()
        return observation, 0.0, False, info

    def _turn(self) -> tuple[str, dict[str, Any]]:
        """What is new to the player to move: textarena repeats all it has shown before."""
        player, found = self.env.get_observation()
        observation, seen = str(found), self._seen.get(player, "")
        self._seen[player] = observation
        return observation.removeprefix(seen) or observation, {"current_player": int(player)}


def load(address: Address) -> list[Any]:
    """A task for each game: the same game with another seed. Raises ConfigError if it cannot be made."""
    options = {key: value for key, value in address.options.items() if key not in ("opponent", "max_moves")}
    TextArenaGame(address.name, **options)
    seeds = (random.Random(f"{address.seed}:{number}").getrandbits(31) for number in range(100 * address.size))
    kept = [seed for seed in dict.fromkeys(seeds) if address.keeps(str(seed))][: address.size]
    return [{"env": address.name, "seed": seed, "options": address.options} for seed in kept]


async def play(task: Mapping[str, Any], base_url: str, api_key: str, model: str) -> None:
    """An agent that plays the game of a task of `textarena:NAME`. The options `opponent` and `max_moves` are those of
    `play_game`, `players` is that of `TextArenaGame`, and others are the game's own."""
    options = dict(task.get("options", {}))
    opponent, moves = options.pop("opponent", None), options.pop("max_moves", MAX_MOVES)
    game = TextArenaGame(task["env"], **options)
    player = None if opponent is None else load_object(function_spec(opponent, "opponent"), "opponent")
    async with model_client(base_url, api_key) as client:
        await play_game(game, client, model, seed=task["seed"], opponent=player, max_moves=moves)


async def play_game(
    env: Any,
    client: httpx.AsyncClient,
    model: str,
    *,
    seed: int = 0,
    opponent: Move | None = None,
    max_moves: int = MAX_MOVES,
    rewards: Literal["total", "moves"] = "total",
) -> None:
    """Play an environment to its end, or for `max_moves` moves, and record its rewards.

    env: in the way of gymnasium, `reset(seed=)` returns (observation, info), and `step(text)` (observation, reward,
    terminated, truncated, info), or as older ones do, without the first `info` or `truncated`. Where several play,
    `info["current_player"]` is whose turn it is, from 0 on, and rewards are those of player 0. rewards: with "total",
    one at the end, the sum of all moves; none for a game that was cut off and gave none. With "moves", one after each
    move of the model, with what its opponents' moves brought: for credit rules that use intermediate rewards.
    """
    histories: dict[int, list[Message]] = {}
    begun = env.reset(seed=seed)
    observation, info = begun if isinstance(begun, tuple) else (begun, {})
    found, recorded, ended = list[float](), 0, False
    while not ended and len(found) < max_moves:
        player = (info or {}).get("current_player", 0)
        if player and opponent is not None:
            text = opponent(str(observation))
        else:
            if rewards == "moves" and histories:
                emit_reward(sum(found[recorded:]), name="move")
                recorded = len(found)
            history = histories.setdefault(player, [])
            history.append({"role": "user", "content": str(observation)})
            with track_agent(f"player_{player}"):
                text = await chat(client, model, history)
            history.append({"role": "assistant", "content": text})
        observation, reward, *ends, info = env.step(text)
        found.append(float(reward))
        ended = any(ends)
    if ended or any(found):
        emit_reward(sum(found[recorded:]))


def gym_agent(make: Callable[[], Any], rewards: Literal["total", "moves"] = "total") -> Callable[..., Any]:
    """An agent that plays a gymnasium-like environment, made anew for each rollout; a task may have a `seed`."""

    async def agent(task: Any, base_url: str, api_key: str, model: str) -> None:
        seed = int(task.get("seed", 0)) if isinstance(task, Mapping) else 0
        async with model_client(base_url, api_key) as client:
            await play_game(make(), client, model, seed=seed, rewards=rewards)

    return agent
