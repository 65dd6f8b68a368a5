"""The example of a negotiation: two agents with private values, trained in the same games."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Load = Callable[[str, str], ModuleType]
HERE = Path(__file__).parents[2] / "examples" / "negotiation"
GAME = {"number": 1, "ann": {"book": 5, "hat": 3, "ball": 1}, "bob": {"book": 1, "hat": 3, "ball": 5}}


def test_the_values_of_held_out_games_are_never_trained_on(module_of: Load) -> None:
    agent = module_of("negotiation", "agent")

    def pairs(games: list) -> set[str]:
        return {json.dumps([game["ann"], game["bob"]]) for game in games}

    known, held_out = pairs(agent.tasks(500, 0)), pairs(agent.tasks(200, 1, held_out=True))
    assert not known & held_out
    assert len(known | held_out) == 36


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        (["book hat", "deal"], {"ann": 8, "bob": 5}),
        (["book", "ball hat", "deal"], {"ann": 5, "bob": 8}),
        (["book", "ball", "no"], {"ann": 0, "bob": 0}),
        (["book", "ball", "hat"], {"ann": 0, "bob": 0}),
        (["all of it", "deal"], {"ann": 0, "bob": 0}),
        (["book", "never"], {"ann": 0, "bob": 0}),
    ],
)
async def test_who_asks_gets_it_and_without_a_deal_nobody_gets_anything(
    answers: list[str], wanted: dict[str, float], module_of: Load, played: Callable[..., Awaitable[Any]]
) -> None:
    game = await played(module_of("negotiation", "agent"), GAME, answers)
    assert game.reward == game.rewards == wanted
    assert [agent for agent, _ in game.asked] == ["ann", "bob", "ann"][: len(answers)]


async def test_nobody_is_told_the_values_of_the_other(module_of: Load, played: Callable[..., Awaitable[Any]]) -> None:
    game = await played(module_of("negotiation", "agent"), GAME, ["book", "ball", "deal"])
    assert [text for _, text in game.asked] == [
        "ann asks: book 5, hat 3, ball 1",
        "bob hears book: book 1, hat 3, ball 5",
        "ann hears ball: book 5, hat 3, ball 1",
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rewards", ["shared", "own"])
def test_both_learn_from_their_rewards(rewards: str, tmp_path: Path) -> None:
    short = "train.TASKS, train.GROUP, train.HELD_OUT, train.WARM = 2, 4, 6, 3"
    program = f"import json, train; {short}; o = train.parse(); print(json.dumps(train.figures(o, train.train(o))))"
    options = ["--rewards", rewards, "--steps", "2", "--run-dir", str(tmp_path)]
    ran = subprocess.run([sys.executable, "-c", program, *options], cwd=HERE, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert json.loads(ran.stdout.splitlines()[-1])["games"] == 6
    config = (tmp_path / "run" / "config.toml").read_text()
    assert f'agent_rewards = "{rewards}"' in config
    assert {each.name for each in (tmp_path / "run").rglob("adapters/*")} == {"ann", "bob"}
