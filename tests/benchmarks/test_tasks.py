"""The tasks that learning is measured on: seeded, solvable, with held-out tasks that no training task equals."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "studies"
sys.path.insert(0, str(BENCHMARKS))
try:
    from tasks.base import Call, Environment
    from tasks.corridor import Corridor
    from tasks.learning import Recipe, learn, make_start, record, sampled_reward
    from tasks.negotiation import Negotiation
    from tasks.rollouts import mean_reward
    from tasks.sql import TextToSql, query_of, run_query, true_slots, wrong_slots
    from tasks.two_hop import TwoHop
finally:
    sys.path.remove(str(BENCHMARKS))

ENVIRONMENTS = [Corridor(1, 4), Corridor(3), Corridor(5), TextToSql(), Negotiation(), TwoHop()]
every_environment = pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda each: each.name)


def key(task: Any) -> str:
    return repr(sorted(task.items()))


@every_environment
def test_the_best_answers_reach_the_optimum_on_both_splits(environment: Environment) -> None:
    for split in ("train", "held_out"):
        tasks = environment.tasks(split, 40)
        assert mean_reward(environment, tasks, environment.best_answer) == pytest.approx(environment.optimum)


@every_environment
def test_a_careless_policy_is_far_from_the_optimum(environment: Environment) -> None:
    answers = iter(answer for _, answer in environment.demonstrations(5_000, seed=3))
    assert mean_reward(environment, environment.tasks("train", 40), lambda task, call: next(answers)) < 0.7


@every_environment
def test_tasks_follow_from_their_seed(environment: Environment) -> None:
    assert environment.tasks("train", 20, 5) == environment.tasks("train", 20, 5)
    assert environment.tasks("train", 20, 5) != environment.tasks("train", 20, 6)
    assert environment.demonstrations(50, 5) == environment.demonstrations(50, 5)


@every_environment
def test_no_held_out_task_is_a_training_task(environment: Environment) -> None:
    train = {key(task) for seed in range(3) for task in environment.tasks("train", 60, seed)}
    held_out = {key(task) for seed in range(3) for task in environment.tasks("held_out", 60, seed)}
    assert not train & held_out


@every_environment
def test_every_word_of_a_call_and_an_answer_is_a_token(environment: Environment) -> None:
    known = {*environment.words}
    for call, answer in environment.demonstrations(200):
        assert {*call.prompt.split(), *answer.split()} <= known
        assert len(answer.split()) <= call.max_words


@pytest.mark.parametrize("decisive", [1, 3, 5])
def test_only_decisive_steps_of_the_corridor_matter_and_the_next_state_shows_it(decisive: int) -> None:
    corridor = Corridor(decisive)
    (task,) = corridor.tasks("train", 1)
    assert len(corridor.right) == decisive

    def wrong_at(positions: set[int]) -> tuple[float, list[str]]:
        seen: list[str] = []

        def answer(task: Any, call: Call) -> str:
            seen.append(call.prompt.split()[-1])
            right = corridor.best_answer(task, call)
            return next(d for d in corridor.directions if d != right) if len(seen) - 1 in positions else right

        return mean_reward(corridor, [task], answer), seen

    others = {*range(30)} - {*corridor.right}
    assert wrong_at(others) == (1.0, ["fine"] * 30)
    for position in corridor.right:
        assert wrong_at({position}) == (0.0, ["fine"] * (position + 1) + ["lost"] * (29 - position))


def test_sql_is_judged_by_what_the_query_gives() -> None:
    environment = TextToSql()
    for task in environment.tasks("train", 10):
        question, true, wrong = task["question"], true_slots(task["question"]), wrong_slots(task["question"])
        truth = run_query(task["database"], query_of(question, true))
        assert truth not in ("error", "nothing", None)
        for slot in true:
            assert run_query(task["database"], query_of(question, true | {slot: wrong[slot]})) != truth
        nonsense = mean_reward(environment, [task], lambda task, call: "ok")
        assert nonsense == 0.0
    assert run_query(0, "DROP TABLE cars") == "error"


def test_sql_goes_on_until_the_checker_is_content_or_its_revisions_are_used() -> None:
    environment = TextToSql()
    (task,) = environment.tasks("train", 1)
    said: list[str] = []

    def answer(task: Any, call: Call) -> str:
        said.append(call.agent)
        return "sign" if call.agent == "checker" else environment.best_answer(task, call)

    assert mean_reward(environment, [task], answer) == 1.0
    assert said == ["writer"] * 4 + ["checker", "rewriter"] * 2


def test_the_checker_finds_what_the_writer_got_wrong() -> None:
    environment = TextToSql()
    (task,) = environment.tasks("train", 1)

    def answer(task: Any, call: Call) -> str:
        slot = call.prompt.split()[1]
        careless = call.agent == "writer" and slot in ("first", "sign")
        return wrong_slots(task["question"])[slot] if careless else environment.best_answer(task, call)

    assert mean_reward(environment, [task], answer) == 1.0


def test_negotiation_pays_nothing_without_a_deal_and_less_for_a_worse_one() -> None:
    task = {"names": "ana bo", "first": "book much", "second": "book little"}
    environment = Negotiation()
    assert mean_reward(environment, [task], environment.best_answer) == 1.0
    rewards = {}
    for taken in ("book", "hat"):
        for verdict in ("accept", "refuse"):
            said = {"ask": "book much", "take": taken, "close": verdict}
            rewards[taken, verdict] = mean_reward(environment, [task], lambda _, call: said[call.prompt.split()[0]])  # noqa: B023
    assert rewards["hat", "accept"] == 1.0
    assert 0 < rewards["book", "accept"] < 1
    assert rewards["book", "refuse"] == rewards["hat", "refuse"] == 0.0


def test_two_hop_needs_both_documents() -> None:
    environment = TwoHop()
    task = {"book": "emma", "documents": {"emma": "emma by ada", "ada": "ada in kyoto"}}
    calls: list[str] = []

    def answer(task: Any, call: Call) -> str:
        calls.append(call.prompt)
        return environment.best_answer(task, call)

    assert mean_reward(environment, [task], answer) == 1.0
    assert calls == ["question emma", "question emma emma by ada", "question emma emma by ada ada in kyoto"]
    assert mean_reward(environment, [task], lambda *_: "search nobody") == 0.0


def test_answers_have_the_probability_that_the_model_gives_them() -> None:
    recipe = Recipe(TextToSql(), lr=1e-3, imitation_steps=2)
    start = make_start(recipe, 0)
    groups = record(start, 2)
    policy = start.policy
    call = groups[0][0].transitions[0]
    total = 0.0
    for place, token in enumerate(call.response_token_ids):
        row = [*call.prompt_token_ids, *call.response_token_ids[:place]]
        total += float(policy.next_word([row])[0, token])
    assert total == pytest.approx(sum(call.logprobs), abs=1e-4)
    asyncio.run(policy.local.close())


@pytest.mark.slow
def test_a_run_is_repeated_exactly_from_its_seed_and_learns() -> None:
    recipe = Recipe(Corridor(1), lr=1e-2, imitation_steps=20, most_rollouts=240, evaluation_rollouts=64)
    start = make_start(recipe, 0)
    first, second = (asyncio.run(learn(start, "group_relative")) for _ in range(2))
    assert first == second
    assert first.rewards[-1] > first.rewards[0] - 0.05
    assert max(first.rewards) > 0.6


def test_recording_trains_nothing() -> None:
    start = make_start(Recipe(Negotiation(), lr=1e-2, imitation_steps=5), 0)
    groups = record(start, 3)
    assert [len(group) for group in groups] == [8, 8, 8]
    assert len({trajectory.group for group in groups for trajectory in group}) == 3
    before = {name: value.clone() for name, value in start.policy.model.state_dict().items()}
    assert all(before[name].equal(value) for name, value in start.weights.items())
    assert 0 <= sampled_reward(start) <= 1
    asyncio.run(start.policy.local.close())
