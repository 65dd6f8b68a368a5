"""The simulated worlds for prompt optimisation keep their own rules."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest
from tests.support.prompt_worlds import (
    ADVICE,
    HEAD,
    START,
    TAIL,
    InteractingWorld,
    PromptWorld,
    PromptWorldServer,
    grade,
    report_tasks,
)


def prompt(*lines: str) -> str:
    return "\n".join([HEAD, *(f"- {line}" for line in lines), TAIL])


@pytest.mark.parametrize("world", [PromptWorld(3), InteractingWorld(3)])
def test_the_mean_reward_of_many_answers_is_the_quality_of_the_prompt(world):
    text = prompt(*world.instructions[:8], ADVICE[0])
    tasks = report_tasks(1500)
    rewards = [grade(world.answer(text.format(**task))) for task in tasks]
    assert sum(rewards) / len(rewards) == pytest.approx(world.quality(text), abs=0.03)


def test_all_instructions_are_the_optimum_and_a_lost_placeholder_is_worth_nothing():
    world = PromptWorld(0)
    assert world.optimum == pytest.approx(0.95)
    assert world.quality(START) == pytest.approx(0.15)
    assert world.quality(prompt(*world.instructions[:11])) < 0.95 * world.optimum
    assert world.quality(prompt(*world.instructions).replace("{task}", "it")) == 0


def test_instructions_of_the_second_world_interact():
    world = InteractingWorld(0)
    alone, partner, rival, other = world.instructions[2], world.instructions[0], *world.instructions[1:5:3]
    assert world.quality(prompt(alone)) == world.quality(START)
    assert world.quality(prompt(alone, partner)) > world.quality(prompt(partner))
    both = world.quality(prompt(rival, other))
    assert both < world.quality(prompt(rival)) + world.quality(prompt(other)) - world.quality(START)
    assert world.quality(prompt(*world.instructions, *ADVICE)) < 0.95 * world.optimum


def test_the_critic_names_what_an_answer_ignores_six_times_in_ten():
    world = PromptWorld(1)
    said = [world.critique(f"answer {turn}: report 0001 ignores: 4 of 2 points") for turn in range(400)]
    assert sum(world.instructions[4] in each for each in said) / 400 == pytest.approx(0.6, abs=0.08)
    assert any(advice in said[0] + said[1] + said[2] + said[3] for advice in (*ADVICE, world.instructions[4]))


def test_edits_and_rewrites_make_the_same_change():
    world, critique = PromptWorld(0), f"The answers lack this: {ADVICE[0]}"
    shown = "\n".join(f"[{number}] {line}" for number, line in enumerate(prompt("Use units.").splitlines(), 1))
    [edit] = json.loads(world.edits(f"{shown}\n{critique}"))["edits"]
    assert edit == {"op": "add", "after": 2, "text": f"- {ADVICE[0]}"}
    assert world.rewrite(f"{prompt('Use units.')}\n{critique}") == prompt("Use units.", ADVICE[0])


def test_the_editor_of_the_second_world_loses_lines():
    world = InteractingWorld(0)
    lines = [f"- {line}" for line in world.instructions]
    lost = [len(world.edited(lines, f"turn {turn}")) < len(lines) for turn in range(300)]
    assert sum(lost) / 300 == pytest.approx(world.loss, abs=0.1)


def test_the_same_seed_gives_the_same_answers_in_any_order():
    def answers(order):
        world = PromptWorld(5)
        return {task: world.answer(f"report {task}") for task in order}

    tasks = [task["task"] for task in report_tasks(30)]
    assert answers(tasks) == answers(tasks[::-1])


def test_the_server_answers_as_the_model_that_is_named():
    def ask(model: str, text: str) -> str:
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": text}]}).encode()
        request = urllib.request.Request(f"{server.url}/chat/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request) as response:
            return json.load(response)["choices"][0]["message"]["content"]

    with PromptWorldServer(PromptWorld(0)) as server:
        assert ask("follower", "report 0001").startswith("report 0001")
        assert ask("critic", "nothing").startswith("The answers lack this:")
        server.models["critic"] = lambda text: "overridden"
        assert ask("critic", "nothing") == "overridden"
        assert server.calls == {"follower": 1, "critic": 2}
        request = urllib.request.Request(f"{server.url}/quality", json.dumps({"prompt": START}).encode())
        with urllib.request.urlopen(request) as response:
            assert json.load(response) == {"quality": pytest.approx(0.15), "optimum": pytest.approx(0.95), "calls": 1}
        with pytest.raises(urllib.error.HTTPError):
            ask("gpt", "nothing")
