"""Plays the game of `game.py` with models: each role is an agent of its own, and has its own reward."""

from __future__ import annotations

import asyncio
import os
from functools import cache
from typing import Any

import httpx
from game import LOOKS, SEER, WEREWOLF, Game

import agentlightning as agl

AT_START = "{role} at the start"
"""The name of an agent that plays a role in an evaluation without what training has taught it: it has no adapter."""


@cache
def http_client() -> httpx.AsyncClient:
    """One for all rollouts of a process."""
    return httpx.AsyncClient(trust_env=False, timeout=60)


async def play(task: dict[str, Any], llm: agl.LLM) -> None:
    """One game. `task["untrained"]` lists the roles that are played by the model of the start.

    The reward of the rollout is whether the village wins. The roles of the village share it, and the werewolf has the
    opposite.
    """
    game, spoken = Game.of_seed(task["seed"]), set[str]()

    async def ask(player: str, deed: str) -> str:
        role = game.roles[player]
        agent = AT_START.format(role=role) if role in task.get("untrained", ()) else role
        spoken.add(agent)
        limit = int(os.environ.get("MAX_TOKENS", "8"))
        messages = [{"role": "user", "content": game.view(player, deed)}]
        with agl.track_agent(agent):
            body = {"model": llm.model, "messages": messages, "max_tokens": limit}
            reply = await http_client().post(f"{llm.base_url}/chat/completions", json=body)
        reply.raise_for_status()
        return str(reply.json()["choices"][0]["message"]["content"]).strip()

    game.kill(await ask(game.player(WEREWOLF), "kills"))
    for _ in range(LOOKS if game.player(SEER) in game.alive else 0):
        game.look(await ask(game.player(SEER), "looks"))
    for player in game.alive:
        game.speak(player, await ask(player, "speaks"))
    votes = await asyncio.gather(*(ask(player, "votes") for player in game.alive))
    village = float(game.village_wins(dict(zip(game.alive, votes, strict=True))))
    for agent in spoken:
        agl.emit_reward(1 - village if agent.startswith(WEREWOLF) else village, agent=agent)
    agl.emit_reward(village)
