"""Promises about sessions that hold several rewards: each belongs to the calls between it and the one before."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import agentlightning as agl
from agentlightning.chat.hf import HFChatFormat
from agentlightning.policy.config import OptimizerConfig

pytestmark = pytest.mark.integration


def say(store: Any, *turns: Any, task: Any = None) -> None:
    """A session of (prompt, answer) and rewards, in this order."""
    with agl.track_session(task, store=store):
        for turn in turns:
            if isinstance(turn, tuple):
                agl.emit_prompt(*turn)
            else:
                agl.emit_reward(turn)


def chosen(store: Any, **query: Any) -> list[tuple[list[str], float]]:
    found = store.get_successful_trajectories(**query)
    assert len(found) == len(list(found))
    weights = query.get("reward_weights")
    return [([call.answer["content"] for call in each.calls], each.reward(weights)) for each in found]


TURNS = ("a", "go away"), 0.0, ("b", "done"), 0.2, ("c", "hello friend"), 1.0


@pytest.mark.parametrize(
    ("turns", "parts"),
    [
        (TURNS, [(["hello friend"], 1.0)]),
        ((*TURNS[4:], *TURNS[:2]), [(["hello friend"], 1.0)]),  # the last one earned nothing
        ((("a", "x"), ("b", "y"), 1.0, ("c", "z"), 0.0), [(["x", "y"], 1.0)]),
        ((("a", "x"), 0.0, ("a", "y"), 0.3, 0.4), [(["y"], 0.7)]),  # rewards of one call add up
        ((("a", "x"), 1.0, ("a", "y"), 1.0, ("a", "z")), [(["x"], 1.0), (["y"], 1.0)]),  # nothing is known of z
        ((("a", "x"), 0.0, 1.0), [(["x"], 1.0)]),  # one part: the last is final
        ((("a", "x"), ("a", "y"), 1.0), [(["x", "y"], 1.0)]),
        ((0.9, ("a", "x"), 1.0), [(["x"], 1.0)]),
    ],
)
def test_demonstrations_are_the_parts_that_earned_it(tmp_path: Path, turns: Any, parts: Any) -> None:
    store = agl.LightningStore(tmp_path / "sessions.db")
    say(store, *turns)
    assert chosen(store) == parts


def test_so_are_those_of_named_dimensions_and_of_several_sessions(tmp_path: Path) -> None:
    store = agl.LightningStore(tmp_path / "sessions.db")
    good, bad = {"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 1.0}
    say(store, ("a", "x"), bad, ("b", "y"), good)
    say(store, ("a", "z"), good, ("b", "w"), bad)
    weights = {"right": 1.0, "short": 0.1}
    assert chosen(store, reward_weights=weights) == [(["y"], 1.0), (["z"], 1.0)]
    assert chosen(store, threshold=2.0, reward_weights=weights) == []


def learned(store: Any, tiny: Path, tmp_path: Path, steps: int = 12, **options: Any) -> agl.TrainingResult:
    algorithm = options.pop("algorithm", None) or agl.LightningRL(tasks_per_step=3, optimizer=OptimizerConfig(lr=3e-3))
    made = agl.Trainer(store=store, algorithm=algorithm, model=tiny, run_dir=Path(mkdtemp(dir=tmp_path)) / "run")
    result = made.train(steps, **options)
    assert isinstance(result, agl.TrainingResult)
    return result


def gain(before: Path, after: Path, chat: HFChatFormat, prompt: str, answer: str) -> float:
    """By how much learning has raised log p(answer | prompt)."""

    def score(directory: Path) -> float:
        model = AutoModelForCausalLM.from_pretrained(directory)
        asked, tokens = chat.encode(chat.render([{"role": "user", "content": prompt}])), chat.encode(answer)
        with torch.no_grad():
            logits = model(torch.tensor([asked + tokens])).logits[0, len(asked) - 1 : -1]
        return float(logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).sum())

    return score(after) - score(before)


@pytest.mark.parametrize("algorithm", [None, agl.SFTAlgorithm(optimizer=OptimizerConfig(lr=3e-3))])
def test_an_answer_that_earned_nothing_is_not_taught(
    algorithm: Any, tiny: Path, chat: HFChatFormat, tmp_path: Path
) -> None:
    store = agl.LightningStore(tmp_path / "sessions.db")
    say(store, ("first", "apples"), 0.0, ("second", "coins"), 0.2, ("third", "yes"), 1.0)
    result = learned(store, tiny, tmp_path, algorithm=algorithm)
    assert result.recorded.sessions == 1
    gains = [
        gain(tiny, result.checkpoint, chat, *call)
        for call in (("first", "apples"), ("second", "coins"), ("third", "yes"))
    ]
    assert gains[2] > max(1.0, gains[0] + 1.0, gains[1] + 1.0)
    if algorithm is None:
        assert result.recorded.method == "rejection"
        assert (
            "1 sessions hold several rewards; each belongs to the calls since the one before it"
            in result.recorded.notes
        )


def test_where_only_an_early_part_earned_something_it_is_taught(tiny: Path, tmp_path: Path) -> None:
    store = agl.LightningStore(tmp_path / "sessions.db")
    say(store, ("first", "yes"), 1.0, ("second", "no"), 0.0, ("third", "perhaps"))
    result = learned(store, tiny, tmp_path, 1)
    assert (result.recorded.method, result.recorded.sessions, result.recorded.left_out) == (
        "rejection",
        1,
        {"missing_reward": 1},
    )


def test_regression_weighs_independent_parts_and_keeps_a_conversation_whole(tiny: Path, tmp_path: Path) -> None:
    store = agl.LightningStore(tmp_path / "sessions.db")
    for answer in "xy":
        say(store, ("a", answer), 0.0, ("b", answer), float(answer == "x"), task="apart")
    longer = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "b"}]
    say(store, ("a", "x"), 0.5, (longer, "y"), 1.0, task="conversation")
    result = learned(store, tiny, tmp_path, 1)
    assert (result.recorded.method, result.recorded.sessions) == ("awr", 5)


@pytest.mark.slow
def test_each_part_of_a_followed_session_is_learned_from_once(tiny: Path, tmp_path: Path) -> None:
    store = agl.LightningStore(tmp_path / "sessions.db")
    for answer in "xy":
        say(store, ("a", answer), 0.0, ("b", answer), float(answer == "x"), task="apart")
    learning = agl.LightningRL(tasks_per_step=1, group_size=4, optimizer=OptimizerConfig(lr=3e-3))
    result = learned(store, tiny, tmp_path, 9, algorithm=learning, follow=True, follow_timeout=0.1)
    assert (result.steps, result.recorded.sessions) == (1, 4), "two sessions of two parts"


def test_preferences_compare_the_parts_that_answer_the_same_prompt(
    tiny: Path, chat: HFChatFormat, tmp_path: Path
) -> None:
    """The last reward of the second session is the higher one, and its first answer earned nothing."""
    store = agl.LightningStore(tmp_path / "sessions.db")
    say(store, ("first", "yes"), 1.0, ("second", "apples"), 0.0)
    say(store, ("first", "no"), 0.0, ("second", "coins"), 1.0)
    result = learned(store, tiny, tmp_path, algorithm=agl.DPO(optimizer=OptimizerConfig(lr=3e-3)))
    assert result.recorded.counts["pairs"] == 2 * 12, "each prompt once a step"
    pairs = [("first", "yes", "no"), ("second", "coins", "apples")]
    for prompt, good, bad in pairs:
        moved = [gain(tiny, result.checkpoint, chat, prompt, answer) for answer in (good, bad)]
        assert moved[0] > moved[1] + 1.0
    assert "2 sessions hold several rewards; each belongs to the calls since the one before it" in result.recorded.notes


@pytest.mark.parametrize(
    ("sessions", "pairs"),
    [
        ([[("a", "x"), 1.0, ("a", "y"), 0.0]], 1),  # two answers to one prompt, in one session
        ([[("a", "x"), 1.0, ("b", "y"), 0.0], [("b", "x"), 1.0, ("c", "y"), 0.0]], 1),
    ],
)
def test_every_pair_is_of_one_prompt(tiny: Path, tmp_path: Path, sessions: Any, pairs: int) -> None:
    store = agl.LightningStore(tmp_path / "sessions.db")
    for turns in sessions:
        say(store, *turns)
    assert learned(store, tiny, tmp_path, 1, algorithm=agl.DPO()).recorded.counts["pairs"] == pairs


def test_a_conversation_is_preferred_as_a_whole(tiny: Path, tmp_path: Path) -> None:
    store = agl.LightningStore(tmp_path / "sessions.db")
    for answer in "xy":
        longer = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "b"},
        ]
        say(store, ("a", answer), 0.5, (longer, answer), float(answer == "x"), task="conversation")
    result = learned(store, tiny, tmp_path, 1, algorithm=agl.DPO())
    assert (result.recorded.sessions, result.recorded.counts["pairs"]) == (2, 1)
