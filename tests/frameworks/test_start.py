"""What `examples/frameworks/start.py` and `teams/handoffs_start.py` make of recorded sessions."""

from __future__ import annotations

import json
import re
import runpy
from typing import Any

import pytest
from tests.frameworks.service import EXAMPLES, starting_models

start = starting_models()


def session(call_id: str, seconds: str, a: int = start.A, b: int = start.B) -> list[dict[str, Any]]:
    """Two calls of an agent that puts ids and times into the text of its prompts."""
    asked = {"role": "user", "content": f'In 3 steps:\n"what"\n{start.question(a, b)}'}
    said = {"role": "assistant", "content": f"calling call_{call_id}"}
    told = {"role": "user", "content": f"{call_id} took 0.{seconds} s:\n{a * b}"}
    return [{"messages": [asked, said], "tools": []}, {"messages": [asked, said, told], "tools": []}]


FIRST, SECOND = session("a3f09b", "0327"), session("77c1de", "1120", *start.OTHERS)


def test_what_differs_between_two_sessions_is_found_but_for_the_numbers_of_the_task() -> None:
    assert start.differing(FIRST, SECOND) == {"a3f09b", "0327"}
    assert start.differing(FIRST, FIRST) == frozenset()


def test_each_demonstration_has_ids_of_its_own_and_the_same_ones_throughout() -> None:
    made = list(start.demonstrations(FIRST, FIRST, 40, 0, start.differing(FIRST, SECOND)))
    ids = []
    for called, told in zip(made[::2], made[1::2], strict=True):
        assert called["messages"] == told["messages"][:2]
        text = told["messages"][2]["content"]
        found = re.fullmatch(r"([0-9a-f]{6}) took 0\.(\d{4}) s:\n(\d+)", text)
        asked = re.search(r"What is (\d) times (\d)\?", told["messages"][0]["content"])
        assert found is not None, text
        assert asked is not None
        assert told["messages"][1]["content"] == f"calling call_{found[1]}"
        assert int(found[3]) == int(asked[1]) * int(asked[2])
        assert told["messages"][0]["content"].startswith('In 3 steps:\n"what"\n')
        ids.append(found[1])
    assert len(set(ids)) == len(ids) == 20


def test_demonstrations_are_the_same_for_the_same_seed() -> None:
    differs = start.differing(FIRST, SECOND)
    first, second, other = (
        json.dumps(list(start.demonstrations(FIRST, FIRST, 8, seed, differs))) for seed in (0, 0, 1)
    )
    assert first == second != other


def test_a_triage_agent_is_shown_the_right_specialist_first_and_either_later(monkeypatch: pytest.MonkeyPatch) -> None:
    team = EXAMPLES / "teams" / "handoffs_start.py"
    monkeypatch.syspath_prepend(str(EXAMPLES))
    made = runpy.run_path(str(team))
    asked = {"role": "user", "content": made["QUESTION"]}
    runs = {
        name: [
            {"messages": [asked, {"role": "assistant", "content": f"transfer_to_{name}"}]},
            {"messages": [asked, {"role": "assistant", "content": made["ANSWER"]}]},
        ]
        for name in made["SPECIALISTS"]
    }
    records = made["demonstrations"](runs, 400, 0)
    named = {
        each["question"]: each["specialist"]
        for each in map(json.loads, made["QUESTIONS_FILE"].read_text().splitlines())
    }
    right = list[bool]()
    for (question, chosen), (same, answer) in zip(*[iter([each["messages"] for each in records])] * 2, strict=True):
        assert question == same
        right.append(chosen["content"] == f"transfer_to_{named[question['content']]}")
        assert (answer["content"] == "I cannot say.") != right[-1]
    clean = int(made["CLEAN"] * len(right))
    assert all(right[:clean])
    assert 0 < sum(right[clean:]) < len(right) - clean
