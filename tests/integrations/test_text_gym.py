"""Text games: whose turn it is, what the model sees, and which rewards are recorded."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from agentlightning import span as names
from agentlightning.errors import ConfigError
from agentlightning.integrations import text_gym
from agentlightning.integrations.text_gym import gym_agent, play_game
from agentlightning.span import Span
from agentlightning.task import load_dataset
from agentlightning.tracing.scope import scope


async def play(game: Any, **options: Any) -> None:
    async with text_gym.model_client("http://model/v1", "key") as client:
        await play_game(game, client, "policy", **options)


class Counter:
    """Counts to three, one reward per step; "stop" ends it early."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self.count = seed
        return f"at {self.count}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return f"at {self.count}", float(self.count), self.count == 3, action == "stop", {}


class Duel:
    """Two players in turn; player 0 wins if it says "win"."""

    def __init__(self) -> None:
        self.moves: list[tuple[int, str]] = []

    def reset(self, seed: int) -> str:
        return "begin"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        player = len(self.moves) % 2
        self.moves.append((player, action))
        if len(self.moves) < 4:
            return f"after {action}", 0.0, False, {"current_player": 1 - player}
        return "", 1.0 if (0, "win") in self.moves else -1.0, True, {}


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, Any]]]:
    """The messages of each call of the model, which answers `win`."""
    seen: list[list[dict[str, Any]]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url == "http://model/v1/chat/completions"
        assert request.headers["authorization"] == "Bearer key"
        seen.append(json.loads(request.content)["messages"])
        return httpx.Response(200, json={"choices": [{"message": {"content": "win"}}]})

    async def handle(self: Any, request: httpx.Request) -> httpx.Response:
        return answer(request)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", handle)
    return seen


class Sink:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def put(self, spans: Any) -> None:
        self.spans += spans


async def rewards(work: Any) -> list[float]:
    """The rewards that the work records, in order."""
    sink = Sink()
    with scope("ro-1", "at-1", sink):
        await work
    return [span.attributes[names.SCORE_VALUE] for span in sink.spans if span.name == names.REWARD]


async def test_a_gymnasium_environment_is_played_move_by_move(requests: list[Any]) -> None:
    assert await rewards(gym_agent(Counter)({"seed": 1}, "http://model/v1", "key", "policy")) == [5.0]
    assert [message["content"] for message in requests[-1]] == ["at 1", "win", "at 2"]


async def test_rewards_of_moves_follow_their_calls_and_sum_to_the_total(requests: list[Any]) -> None:
    found = await rewards(play(Counter(), rewards="moves"))
    assert found == [1.0, 2.0, 3.0]


async def test_a_game_that_is_cut_off_keeps_the_rewards_of_its_moves(requests: list[Any]) -> None:
    assert await rewards(play(Counter(), max_moves=2)) == [3.0]
    assert await rewards(play(Counter(), max_moves=2, rewards="moves")) == [1.0, 2.0]


async def test_each_player_sees_its_own_conversation(requests: list[Any]) -> None:
    game = Duel()
    assert await rewards(play(game)) == [1.0]
    assert [player for player, _ in game.moves] == [0, 1, 0, 1]
    assert [[message["content"] for message in each] for each in requests] == [
        ["begin"],
        ["after win"],
        ["begin", "win", "after win"],
        ["after win", "win", "after win"],
    ]


async def test_an_opponent_plays_the_other_moves_without_the_model(requests: list[Any]) -> None:
    game = Duel()
    assert await rewards(play(game, opponent=lambda observation: observation.upper())) == [1.0]
    assert game.moves == [(0, "win"), (1, "AFTER WIN"), (0, "win"), (1, "AFTER WIN")]
    assert len(requests) == 2


async def test_an_unfinished_game_without_rewards_has_none(requests: list[Any]) -> None:
    assert await rewards(play(Duel(), max_moves=2)) == []


async def test_the_last_reward_of_the_moves_holds_what_the_opponent_brought_about(requests: list[Any]) -> None:
    assert await rewards(play(Duel(), opponent=str.upper, rewards="moves")) == [0.0, 1.0]


async def test_a_game_of_textarena_that_ends_without_rewards_has_a_reward_of_0(
    requests: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    env = SimpleNamespace(
        reset=lambda **_: None,
        get_observation=lambda: (0, "begin"),
        step=lambda text: (True, {}),
        close=lambda: (None, {}),
    )
    monkeypatch.setitem(sys.modules, "textarena", SimpleNamespace(make=lambda name: env))
    assert await rewards(play(text_gym.TextArenaGame("Endless-v0"))) == [0.0]


# -- the real package ------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_real_game_of_textarena_is_played_to_its_end(requests: list[Any]) -> None:
    pytest.importorskip("textarena")
    tasks = load_dataset("textarena:TicTacToe-v0?size=3&seed=1")
    assert len({task["seed"] for task in tasks}) == 3
    found = await rewards(text_gym.play(tasks[0], "http://model/v1", "key", "policy"))
    assert found in ([-1.0], [0.0], [1.0])
    requests.clear()
    guess = load_dataset("textarena:GuessTheNumber-v0?size=1")[0]
    assert len(await rewards(text_gym.play(guess, "http://model/v1", "key", "policy"))) == 1
    shown = "".join(message["content"] for message in requests[-1])
    assert shown.count("You are playing Guess The Number") == 1, "the game repeats all it has shown"
    with pytest.raises(ConfigError, match="Nothing-v0"):
        load_dataset("textarena:Nothing-v0")
