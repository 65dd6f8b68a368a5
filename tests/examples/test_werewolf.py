"""The example of a game with hidden roles: its rules, who sees what, and roles that learn apart."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

Load = Callable[[str, str], ModuleType]
Play = Callable[..., Awaitable[Any]]
HERE = Path(__file__).parents[2] / "examples" / "werewolf"
ROLES = {"Ann": "werewolf", "Bob": "seer", "Cleo": "villager", "Dan": "villager", "Eve": "villager"}


@pytest.fixture
def seed(module_of: Load) -> int:
    """A seed whose game has the roles above."""
    game = module_of("werewolf", "game")
    return next(seed for seed in range(10_000) if game.Game.of_seed(seed).roles == ROLES)


def test_a_seed_gives_one_werewolf_one_seer_and_three_villagers(module_of: Load) -> None:
    game = module_of("werewolf", "game").Game
    assert sorted(game.of_seed(3).roles.values()) == ["seer", "villager", "villager", "villager", "werewolf"]
    assert game.of_seed(3).roles == game.of_seed(3).roles
    assert len({tuple(game.of_seed(seed).roles.items()) for seed in range(200)}) == 20


@pytest.mark.parametrize(
    ("votes", "wins"),
    [
        ({"Bob": "Ann", "Cleo": "Ann", "Eve": "Ann", "Ann": "Bob"}, True),
        ({"Bob": "Ann", "Cleo": "Ann", "Eve": "Bob", "Ann": "Cleo"}, True),
        ({"Bob": "Ann", "Cleo": "Bob"}, False),
        ({"Bob": "Ann", "Cleo": "nobody", "Eve": "Eve", "Ann": "Dan"}, True),
        ({"Bob": "nobody"}, False),
        ({}, False),
    ],
)
def test_the_village_wins_if_the_werewolf_alone_has_the_most_votes(
    votes: dict[str, str], wins: bool, module_of: Load
) -> None:
    game = module_of("werewolf", "game").Game(dict(ROLES))
    game.kill("Dan")
    assert game.village_wins(votes) == wins


async def test_only_the_seer_knows_what_the_seer_saw_until_it_says_so(seed: int, module_of: Load, played: Play) -> None:
    answers = {"kills": "Dan", "looks": "Ann", "votes": "Ann"}

    def answer(agent: str, asked: str) -> str:
        deed = asked.splitlines()[0].split()[-1]
        return answers.get(deed) or ("Ann is wolf" if agent == "seer" else "nothing")

    found = await played(module_of("werewolf", "agent"), {"seed": seed, "untrained": []}, answer)
    assert [agent for agent, _ in found.asked] == [
        *("werewolf", "seer", "seer"),
        *("werewolf", "seer", "villager", "villager"),
        *("werewolf", "seer", "villager", "villager"),
    ]
    spoken = [text for _, text in found.asked if " speaks" in text]
    assert spoken[1] == "seer Bob speaks\nalive Ann Bob Cleo Eve\nAnn says nothing\nsaw Ann is wolf"
    assert "saw" not in spoken[2]
    assert "Bob says Ann is wolf" in spoken[2]
    assert not any(role in text for _, text in found.asked[1:] for role in ROLES.values() if not text.startswith(role))
    assert found.reward == 1.0
    assert found.rewards == {"werewolf": 0.0, "seer": 1.0, "villager": 1.0}


def test_the_seer_remembers_the_werewolf_or_whom_it_looked_at_last(module_of: Load) -> None:
    game = module_of("werewolf", "game").Game(dict(ROLES))
    seen = []
    for name in ("Dan", "Cleo", "Ann", "Eve"):
        game.look(name)
        seen.append(game.saw)
    assert seen == ["Dan is good", "Cleo is good", "Ann is wolf", "Ann is wolf"]


async def test_a_seer_that_died_has_no_reward_and_a_bad_answer_is_a_lost_move(
    seed: int, module_of: Load, played: Play
) -> None:
    found = await played(
        module_of("werewolf", "agent"),
        {"seed": seed, "untrained": []},
        lambda _, asked: "Bob" if "kills" in asked else "I do not know",
    )
    assert found.rewards == {"werewolf": 1.0, "villager": 0.0}
    assert found.reward == 0.0


async def test_roles_of_the_start_are_agents_without_an_adapter(seed: int, module_of: Load, played: Play) -> None:
    task = {"seed": seed, "untrained": ["werewolf"]}
    found = await played(module_of("werewolf", "agent"), task, lambda _, asked: "Dan" if "kills" in asked else "Ann")
    assert set(found.rewards) == {"werewolf at the start", "seer", "villager"}


def test_each_side_is_measured_against_the_other_one_of_the_start(module_of: Load) -> None:
    train = module_of("werewolf", "train")
    games = train.held_out_games(1, "all")
    assert {tuple(each["untrained"]) for each in games} == {(), ("werewolf",), ("seer", "villager")}
    assert len({each["seed"] for each in games}) == train.HELD_OUT
    assert not {each["seed"] for each in games} & set(train.seeds(1000, 0))
    assert {tuple(each["untrained"]) for each in train.held_out_games(1, "village")} == {("werewolf",)}


def test_the_share_of_games_won_is_that_of_the_side_that_learns(
    module_of: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train = module_of("werewolf", "train")
    won = {"before": {("werewolf",): {1: 0.0, 2: 0.0}}, "after": {("werewolf",): {2: 1.0, 1: 0.0, 3: 1.0}}}
    monkeypatch.setattr(train, "wins", lambda _, when: won[when])
    found = train.figures(SimpleNamespace(run_dir=tmp_path))["village, other side untrained"]
    assert (found["games"], found["before"], found["after"]) == (2, 0.0, 0.5)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("learn", ["all", "village"])
def test_roles_learn_apart(learn: str, tmp_path: Path) -> None:
    short = "train.TASKS, train.GROUP, train.HELD_OUT = 2, 6, 4; start.make_start.__defaults__ = (20,)"
    program = f"import json, start, train; {short}; print(json.dumps(train.figures(train.train(train.parse()))))"
    options = ["--learn", learn, "--steps", "2", "--run-dir", str(tmp_path)]
    ran = subprocess.run([sys.executable, "-c", program, *options], cwd=HERE, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    wanted = {"village, other side untrained"}
    assert set(found) == (
        wanted | {"werewolf, other side untrained", "village, all trained"} if learn == "all" else wanted
    )
    assert all(each["games"] == 4 for each in found.values())
    adapters = {each.name for each in (tmp_path / "run").rglob("adapters/*")}
    assert adapters == {"seer", "villager"} | ({"werewolf"} if learn == "all" else set())


class Mafia:
    """A stand-in for SecretMafia of textarena: two players speak once each."""

    player_roles: ClassVar = {0: "Mafia", 1: "Doctor"}

    def __init__(self) -> None:
        self.said: list[str] = []

    def reset(self, **options: Any) -> None:
        assert options["num_players"] == 2

    def get_observation(self) -> tuple[int, str]:
        return len(self.said), "speak"

    def step(self, text: str) -> tuple[bool, dict[str, Any]]:
        self.said.append(text)
        return len(self.said) == 2, {}

    def close(self) -> tuple[dict[int, float], dict[str, Any]]:
        return {0: -1.0, 1: 1.0}, {}


async def test_each_role_of_secret_mafia_is_given_its_reward(
    module_of: Load, played: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "textarena", SimpleNamespace(make=lambda name, **options: Mafia()))
    secret_mafia = module_of("werewolf", "secret_mafia")
    found = await played(secret_mafia, {"seed": 5, "players": 2}, lambda agent, asked: "nothing")
    assert found.asked == [("mafia", "speak"), ("doctor", "speak")]
    assert (found.reward, found.rewards) == (1.0, {"mafia": -1.0, "doctor": 1.0})


@pytest.mark.slow
async def test_a_real_game_of_secret_mafia_tells_roles_apart(module_of: Load, played: Play) -> None:
    pytest.importorskip("textarena")
    secret_mafia = module_of("werewolf", "secret_mafia")

    def answer(agent: str, asked: str) -> str:
        targets = re.findall(r"\[(\d)\]", asked)
        return f"[{targets[0]}]" if targets else "I do not know."

    found = await played(secret_mafia, {"seed": 5, "untrained": ["doctor"]}, answer)
    assert {agent for agent, _ in found.asked} <= {"villager", "doctor at the start", "detective", "mafia"}
    assert found.asked[0][0] == "mafia"
    assert "Your role: Mafia" in found.asked[0][1]
    assert found.reward in (0.0, 1.0)
    assert found.rewards["mafia"] == (-1.0 if found.reward else 1.0)
    again = await played(secret_mafia, {"seed": 5, "untrained": ["doctor"]}, answer)
    assert again.asked[0] == found.asked[0]


def test_the_large_game_needs_a_model_that_can_read(module_of: Load, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        module_of("werewolf", "train").parse(["--mafia"])
    assert "--mafia needs a --model" in capsys.readouterr().err
