"""The example of a prompt: an agent that books rooms, the rules of a house, and a search that finds them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

Load = Callable[[str, str], ModuleType]
HERE = Path(__file__).parents[2] / "examples" / "prompts"


@pytest.fixture
def house(module_of: Load) -> ModuleType:
    return module_of("prompts", "house")


def test_request_and_rooms_are_read_back_from_the_text_that_a_model_sees(house: ModuleType, module_of: Load) -> None:
    import random

    template = module_of("prompts", "agent").TEMPLATE
    for seed in range(50):
        request, rooms = house.make(random.Random(seed))
        (task,) = house.tasks(1, seed)
        assert house.read(template.format(**task)) == (request, rooms)


def test_the_right_room_keeps_every_rule_and_is_worth_one(house: ModuleType) -> None:
    for task in house.tasks(100, 1):
        request, rooms = house.read(f"{task['request']}\n{task['rooms']}")
        right = house.right_room(request, rooms)
        assert set(house.score(task, right.name).values()) == {1.0}
        assert set(house.score(task, f"{right.name}.\n").values()) == {1.0}
        assert not any(house.score(task, "Any room will do").values())
        others = [house.score(task, room.name) for room in rooms if room != right]
        assert all(each["right"] == 0 and 0 in [each[rule] for rule in house.RULES] for each in others)


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        ({"seats": 3}, "seats"),
        ({"floor": 1}, "wheelchair"),
        ({"screen": False}, "screen"),
        ({"quiet": False}, "quiet"),
        ({"free_from": 0}, "gap"),
        ({"name": "Board"}, "board"),
    ],
)
def test_the_reward_names_the_rule_that_was_broken(changed: dict, broken: str, house: ModuleType) -> None:
    request = house.Request(4, wheelchair=True, remote=True, interview=True, director=False)
    good = house.Room("Oslo", 6, 0, True, True, 20)
    bad = replace(replace(good, name="Rome", seats=5), **changed)
    task = {"request": str(request), "rooms": f"{good}\n{bad}"}
    found = house.score(task, bad.name)
    assert [rule for rule in house.RULES if found[rule] == 0] == [broken]
    assert house.score(task, "Oslo")["right"] == 1


def test_the_simulated_model_follows_the_rules_that_its_prompt_gives(house: ModuleType, module_of: Load) -> None:
    world = module_of("prompts", "simulated").BookingWorld(0)
    template = module_of("prompts", "agent").TEMPLATE
    rules = "\n".join(f"- {rule}" for rule in house.RULES.values())

    def share(before: str) -> float:
        given = house.tasks(150, 2)
        return sum(house.score(task, world.answer(before + template.format(**task)))["right"] for task in given) / 150

    assert share("") < 0.35
    assert share(f"{rules}\n") > 0.7


def test_without_a_key_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    ran = subprocess.run([sys.executable, "train.py"], cwd=HERE, capture_output=True, text=True)
    assert ran.returncode == 2
    assert "OPENAI_API_KEY is not set; set it, or try --simulated" in ran.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_search_finds_rules_and_the_gain_is_certified(tmp_path: Path) -> None:
    short = "train.TRAINING, train.VALIDATION, train.HELD_OUT = 80, 20, 40"
    program = f"import json, train; {short}; print(json.dumps(train.train(train.parse()).as_json()))"
    options = ["--simulated", "--budget", "150", "--run-dir", str(tmp_path / "run")]
    ran = subprocess.run([sys.executable, "-c", program, *options], cwd=HERE, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["held_out"]["sampled"]["interval"][0] > 0
    prompt = result["prompts"]["prompt"]
    assert "{request}" in prompt
    assert "{rooms}" in prompt
    assert prompt.count("\n- ") >= 2
