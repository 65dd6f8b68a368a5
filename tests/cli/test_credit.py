"""`agl credit compare`: what a user types, and what comes back."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agentlightning import span as names
from agentlightning.cli.main import build
from agentlightning.rollouts import Attempt, Rollout
from agentlightning.span import Span
from agentlightning.store import LightningStore
from agentlightning.store.types import RolloutRecord

pytestmark = pytest.mark.integration

Agl = Callable[..., Result]


@pytest.fixture
def agl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Agl:
    """Runs `agl credit ...` in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    app = build()
    return lambda *words: CliRunner().invoke(app, ["credit", *words])


def span(rollout_id: str, number: int, name: str, **attributes: Any) -> Span:
    named = {getattr(names, key): value for key, value in attributes.items()}
    return Span(rollout_id, f"at-{rollout_id}", name, 1.0, 2.0, number, "", f"{rollout_id}-{number}", attributes=named)


def record(group: int, member: int, *, mode: Any = "train", reward: Any = "final") -> RolloutRecord:
    """A rollout of four calls, the second of which decides."""
    rng = random.Random(f"{group}/{member}")
    rollout_id, state = f"ro-{mode}-{group}-{member}", 0
    spans: list[Span] = []
    for place in range(4):
        action = rng.choice((1, 2))
        tokens: Any = {"PROMPT_TOKEN_IDS": [10 + place, 30 + state], "RESPONSE_TOKEN_IDS": [action]}
        spans.append(span(rollout_id, place + 1, "chat", OPERATION_NAME="chat", LOGPROBS=[-0.7], **tokens))
        state = action if place == 1 else state
    if reward == "final":
        spans.append(span(rollout_id, 9, names.REWARD, SCORE_VALUE=float(state == 1)))
    elif reward is not None:
        spans.append(span(rollout_id, 9, names.REWARD, REWARD_VALUES=reward))
    rollout = Rollout(rollout_id, {"task": group}, 1.0, status="succeeded", mode=mode, end_time=2.0, queue="train")
    attempt = Attempt(rollout_id, f"at-{rollout_id}", 1, 1.0, "succeeded", 2.0)
    return RolloutRecord(rollout, (attempt,), tuple(spans))


def write(path: Path, records: Iterable[RolloutRecord]) -> str:
    async def fill() -> None:
        store = LightningStore(path)
        await store.add_records(list(records))
        await store.close()

    asyncio.run(fill())
    return str(path)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with 20 groups of eight rollouts, and one group of the validation."""
    records = [record(group, member) for group in range(20) for member in range(8)]
    records += [record(99, member, mode="val") for member in range(8)]
    return write(tmp_path_factory.mktemp("store") / "some.db", records)


def result(done: Result) -> dict[str, Any]:
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout.splitlines()[-1])


def test_every_rule_is_ranked_or_has_a_reason_why_not(agl: Agl, recorded: str) -> None:
    from agentlightning.credit.base import RULES

    found = result(agl("compare", recorded, "--json"))
    ranked = [each["rule"] for each in found["rules"]]
    assert {*ranked, *found["unusable"]} == {*RULES}
    assert ranked.index("state_value") < ranked.index("group_relative")
    assert all(found["unusable"].values())
    assert found["groups"] == 21


def test_people_see_a_table_with_intervals(agl: Agl, recorded: str) -> None:
    done = agl("compare", recorded, "--rule", "group_relative", "--rule", '{"type": "discounted", "gamma": 0.5}')
    assert done.exit_code == 0
    assert "21 groups, 168 rollouts" in done.output
    for line in ("group_relative", "discounted"):
        (row,) = [each for each in done.output.splitlines() if each.strip().startswith(line)]
        assert " to " in row


def test_the_options_choose_the_groups(agl: Agl, recorded: str) -> None:
    only = ("--rule", "group_relative", "--json")
    assert result(agl("compare", recorded, "--mode", "train", *only))["groups"] == 20
    assert result(agl("compare", recorded, "--groups", "6", *only))["groups"] == 6


def test_rollouts_that_measured_a_run_afterwards_take_no_place_of_groups(agl: Agl, tmp_path: Path) -> None:
    records = [record(group, member) for group in range(6) for member in range(4)]
    store = write(tmp_path / "run.db", [*records, *(record(task, 0, mode="test") for task in range(100, 140))])
    found = result(agl("compare", "--store", store, "--groups", "6", "--rule", "group_relative", "--json"))
    assert (found["groups"], found["rollouts"]) == (6, 24)


def test_named_dimensions_are_weighed(agl: Agl, tmp_path: Path) -> None:
    records = [
        record(group, member, reward={"right": float(member % 2), "short": 1.0})
        for group in range(5)
        for member in range(4)
    ]
    path = write(tmp_path / "named.db", records)
    refused = agl("compare", path)
    assert refused.exit_code == 2
    assert "20 bad reward" in refused.output
    weights = '{"right": 1.0, "short": 0.0}'
    found = result(agl("compare", path, "--reward-weights", weights, "--rule", "group_relative", "--json"))
    assert found["groups"] == 5


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "no finished rollout"),
        ([record(group, 0) for group in range(6)], "0 of 6 groups have two rollouts or more with a reward, 6 groups"),
        ([record(0, i, reward=None) for i in range(6)], "6 missing reward"),
    ],
    ids=["empty", "groups of one", "no rewards"],
)
def test_too_little_data_is_refused_in_words(agl: Agl, tmp_path: Path, records: Any, message: str) -> None:
    done = agl("compare", write(tmp_path / "few.db", records))
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rule", "{oops"), "is not JSON"),
        (("--mode", "tests"), "'tests' is not one of"),
        (("--reward-weights", "1"), "reward_weights"),
        (("--target-agent", "nobody"), "nobody"),
    ],
)
def test_impossible_options_are_refused_in_words(
    agl: Agl, recorded: str, options: tuple[str, str], message: str
) -> None:
    done = agl("compare", recorded, *options)
    assert done.exit_code == 2
    assert message in done.output


def test_the_store_may_be_given_as_before_and_its_option_is_named(agl: Agl, recorded: str) -> None:
    before, now = agl("compare", recorded, "--json"), agl("compare", "--store", recorded, "--json")
    assert result(before) == result(now)
    assert before.stderr.splitlines() == [f"STORE is an option now: --store {recorded}"]
    assert now.stderr == ""


def test_it_ends_with_the_command_that_trains_with_the_best_rule(agl: Agl, recorded: str) -> None:
    last = agl("compare", "--store", recorded, "--rule", "group_relative").stdout.splitlines()[-1]
    assert last == "next  agl train algorithm.credit=group_relative --dry-run"


def test_no_rule_is_advised_where_none_has_a_signal(agl: Agl, tmp_path: Path) -> None:
    records = [record(group, member, reward={"luck": float(member // 2)}) for group in range(8) for member in range(4)]
    store = write(tmp_path / "luck.db", records)
    options = ("--store", store, "--rule", "group_relative", "--reward-weights", '{"luck": 1}')
    assert result(agl("compare", *options, "--json"))["rules"][0]["snr"] < 0
    assert "next" not in agl("compare", *options).stdout


def test_the_command_that_trains_has_the_settings_of_the_run(agl: Agl, tmp_path: Path) -> None:
    store = write(tmp_path / "store.db", [record(group, member) for group in range(20) for member in range(4)])
    settings = tmp_path / "config.toml"
    settings.touch()
    last = agl("compare", "--store", store, "--rule", "group_relative").stdout.splitlines()[-1]
    assert last == f"next  agl train --config {settings} algorithm.credit=group_relative --dry-run"


def test_rules_that_need_the_task_are_given_it(agl: Agl, recorded: str) -> None:
    reason = result(agl("compare", "--store", recorded, "--rule", "information_gain", "--json"))["unusable"]
    assert "it has no fields" not in reason["information_gain"]


def test_a_store_that_is_not_there_is_not_made(agl: Agl, tmp_path: Path) -> None:
    done = agl("compare", "missing.db")
    assert done.exit_code == 2
    assert "there is no store" in done.output
    assert not (tmp_path / "missing.db").exists()
