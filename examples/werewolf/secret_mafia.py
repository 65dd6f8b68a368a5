"""Plays SecretMafia of textarena with models of usual size: six players or more, days of discussion, several nights.

Needs `pip install 'agentlightning[textarena]'`. As in `agent.py`, each role is an agent of its own.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

from agent import AT_START, http_client

import agentlightning as agl
from agentlightning.integrations.text_gym import TextArenaGame

MAFIA = "mafia"
ROLES = ("villager", "doctor", "detective", MAFIA)
MOST_MOVES = 200


async def play(task: dict[str, Any], llm: agl.LLM) -> None:
    """One game, as `agent.play`. A game that is cut off has no reward."""
    players, rounds = task.get("players", 6), task.get("rounds", 1)
    game = TextArenaGame("SecretMafia-v0", players=players, discussion_rounds=rounds)
    (observation, info), names = game.reset(task["seed"]), dict[int, str]()
    for player, role in game.env.player_roles.items():
        name = str(role).lower()
        names[player] = AT_START.format(role=name) if name in task.get("untrained", ()) else name
    histories: dict[int, list[dict[str, str]]] = {player: [] for player in names}
    spoken, ended = set[int](), False
    for _ in range(MOST_MOVES):
        if ended:
            break
        player = info["current_player"]
        spoken.add(player)
        histories[player].append({"role": "user", "content": observation})
        limit = int(os.environ.get("MAX_TOKENS", "256"))
        body = {"model": llm.model, "messages": histories[player], "max_tokens": limit}
        with agl.track_agent(names[player]):
            reply = await http_client().post(f"{llm.base_url}/chat/completions", json=body)
        reply.raise_for_status()
        text = str(reply.json()["choices"][0]["message"]["content"] or "")
        histories[player].append({"role": "assistant", "content": text})
        observation, _, ended, info = game.step(text)
    if game.rewards is None:
        return
    for agent in sorted({names[player] for player in spoken}):
        own = [game.rewards.get(player, 0.0) for player in spoken if names[player] == agent]
        agl.emit_reward(statistics.fmean(own), agent=agent)
    village = [game.rewards.get(player, 0.0) for player, name in names.items() if not name.startswith(MAFIA)]
    agl.emit_reward(float(max(village) > 0))
