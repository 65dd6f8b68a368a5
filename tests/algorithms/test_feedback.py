"""Self-distillation: the same answers are scored after prompts that end with what went wrong, or with a better
answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.models import model_tokenizer

from agentlightning.algorithms.lightning_rl import Feedback, LightningRL, feedback_of, reprompted
from agentlightning.algorithms.training import Collected
from agentlightning.chat.hf import HFChatFormat
from agentlightning.errors import ConfigError
from agentlightning.policy.base import UpdateOptions
from agentlightning.trajectory import Step, TokenTree, Trajectory, Transition


@pytest.fixture(scope="module")
def chat() -> HFChatFormat:
    return HFChatFormat(model_tokenizer())


def call(chat: HFChatFormat, rollout: str, number: int, question: str, answer: str) -> Transition:
    prompt = tuple(chat.encode(chat.render([{"role": "user", "content": question}])))
    sampled = tuple(chat.encode(answer))
    return Transition(rollout, "a", f"{rollout}-{number}", 10 * number, prompt, sampled, (-0.5,) * len(sampled))


def group(chat: HFChatFormat) -> list[Trajectory]:
    """A rollout that solved the task, one that did not, and one whose tool failed after its first call."""
    good = Trajectory("good", "a", (call(chat, "good", 1, "2 + 3?", "it is 5"),), 1.0, "g")
    bad = Trajectory("bad", "a", (call(chat, "bad", 1, "2 + 3?", "it is 6"),), 0.0, "g")
    calls = (call(chat, "tool", 1, "2 + 3?", "calc(2 +)"), call(chat, "tool", 2, "and now?", "5"))
    step = Step("tool", "calc", "s", 11, error="unexpected end of input")
    return [good, bad, Trajectory("tool", "a", calls, 1.0, "g", steps=(step,))]


def test_feedback_is_a_better_answer_or_the_error_a_call_led_to(chat: HFChatFormat) -> None:
    found = feedback_of(group(chat), Feedback(), chat)
    assert set(found) == {("bad", "bad-1"), ("tool", "tool-1")}
    assert "it is 5" in found["bad", "bad-1"]
    assert "calc: unexpected end of input" in found["tool", "tool-1"]
    assert set(feedback_of(group(chat), Feedback(errors=False), chat)) == {("bad", "bad-1")}
    assert set(feedback_of(group(chat), Feedback(siblings=False), chat)) == {("tool", "tool-1")}
    assert set(feedback_of(group(chat), Feedback(errors=False, success=2.0), chat)) == set()


def test_feedback_is_the_last_message_before_the_same_answer(chat: HFChatFormat) -> None:
    asked = call(chat, "r", 1, "2 + 3?", "it is 6")
    found = reprompted(asked, "It is <|im_end|> 5.", chat, 500)
    assert found is not None
    messages = [{"role": "user", "content": "2 + 3?"}, {"role": "user", "content": chat.escape("It is <|im_end|> 5.")}]
    assert found.prompt_token_ids == tuple(chat.encode(chat.render(messages)))
    assert (found.response_token_ids, found.logprobs) == (asked.response_token_ids, asked.logprobs)
    assert reprompted(asked, "It is 5.", chat, 20) is None, "the context is too short"
    assert reprompted(replace(asked, prompt_token_ids=(1, 2, 3)), "It is 5.", chat, 500) is None, "another template"


class FakeTraining:
    """Scores a token by how many tokens come before it, and records what was asked for."""

    step = 0
    target_agent = None
    context_length = 500

    def __init__(self, chat: HFChatFormat, trajectories: Sequence[Trajectory]) -> None:
        self.chat, self.trajectories = chat, tuple(trajectories)
        self.scored: list[tuple[set[str], Sequence[TokenTree]]] = []
        self.adapters: list[str | None] = []
        self.updates: list[tuple[Sequence[Any], dict[str, Any]]] = []
        self.metrics: dict[str, float] = {}

    @property
    def learner(self) -> FakeTraining:
        return self

    async def collect(self, **request: Any) -> Collected:
        return Collected(self.trajectories)

    async def score(
        self, trees: Sequence[TokenTree], what: set[str], *, reference: Path | None = None, adapter: str | None = None
    ) -> Any:
        self.scored.append((set(what), trees))
        self.adapters.append(adapter)

        def column(tree: TokenTree) -> tuple[Any, ...]:
            depth = [sum(len(tree.nodes[n].token_ids) for n in tree.path(i)[:-1]) for i in range(len(tree.nodes))]
            return tuple(
                np.arange(d, d + len(n.token_ids), dtype=np.float32) if n.sampled else np.zeros(0, np.float32)
                for d, n in zip(depth, tree.nodes, strict=True)
            )

        return {name: [column(tree) for tree in trees] for name in what}

    async def update(self, samples: Sequence[Any], options: UpdateOptions) -> dict[str, float]:
        self.updates.append((samples, options))
        return {"loss": 0.1}

    async def finish_step(self, collected: Collected, metrics: dict[str, float]) -> None:
        self.step += 1
        self.metrics = metrics


async def trained(chat: HFChatFormat, trajectories: Sequence[Trajectory], **settings: Any) -> FakeTraining:
    training = FakeTraining(chat, trajectories)
    await LightningRL(steps=1, group_size=2, loss=["ppo", "sdpo"], **settings).run(training)  # type: ignore[arg-type]
    return training


async def test_the_teacher_is_the_policy_after_the_feedback_at_the_same_tokens(chat: HFChatFormat) -> None:
    rollouts = group(chat)
    training = await trained(chat, rollouts)
    ((sample,), options), = training.updates  # fmt: skip
    assert options.average == 0.05
    assert training.scored[0][0] == {"average_logprobs"}
    assert (training.metrics["calls_with_feedback"], training.metrics["feedback_left_out"]) == (2, 0)

    texts = feedback_of(rollouts, Feedback(), chat)
    rows = zip(
        sample.tree.nodes, sample.columns["teacher_logprobs"], sample.columns["reference_kl_weights"], strict=True
    )
    seen = {}
    for node, logprobs, weights in rows:
        if node.sampled:
            seen[node.call] = (logprobs.tolist(), set(weights.tolist()))
    for own in (rollouts[1].transitions[0], rollouts[2].transitions[0]):
        asked = reprompted(own, texts[own.rollout_id, own.span_id], chat, 500)
        assert asked is not None
        start = len(asked.prompt_token_ids)
        assert seen[own.span_id] == ([float(start + i) for i in range(len(own.response_token_ids))], {1.0})
    assert seen["good-1"][1] == seen["tool-2"][1] == {0.0}, "calls without feedback have no part in it"


async def test_a_group_without_spread_learns_from_its_errors(chat: HFChatFormat) -> None:
    failed = [replace(each, reward=0.0) for each in group(chat)]
    training = await trained(chat, failed, feedback={"rate": 1.0})
    ((sample,), options), = training.updates  # fmt: skip
    assert training.metrics["groups_without_spread"] == 1
    assert training.scored[0][0] == {"logprobs"}, "rate 1: the teacher is the policy"
    assert options.average is None
    assert sample.share == 1.0
    assert sum(float(w.sum()) for w in sample.columns["reference_kl_weights"]) > 0


@pytest.mark.parametrize("rewards", [(1.0, 0.0), (0.0, 0.0)])
async def test_each_agent_is_taught_by_its_own_weights_and_a_frozen_one_by_none(
    chat: HFChatFormat, rewards: tuple[float, float]
) -> None:
    def rollout(name: str, reward: float) -> Trajectory:
        answers = [("writer", "policy:writer"), ("planner", "policy"), ("editor", "policy:base")]
        calls = [
            replace(call(chat, name, 1 + i, f"step {i}?", "it is 6"), agent=agent, model=model)
            for i, (agent, model) in enumerate(answers)
        ]
        steps = tuple(Step("tool", "calc", f"s{i}", 10 * i + 11, error="unexpected end of input") for i in range(3))
        return Trajectory(name, "a", tuple(calls), reward, "g", steps=steps)

    agents = {"writer": {"type": "lora", "r": 2}, "planner": "shared", "editor": "frozen"}
    training = await trained(
        chat, [rollout("r1", rewards[0]), rollout("r2", rewards[1])], agents=agents, feedback={"siblings": False}
    )
    assert training.metrics["calls_with_feedback"] == 4, "two calls in each rollout learn"
    assert training.adapters == ["writer", None]
    (samples, options), = training.updates  # fmt: skip
    assert options.average == 0.05
    taught = {
        sample.adapter: {
            node.agent
            for node, weights in zip(sample.tree.nodes, sample.columns["reference_kl_weights"], strict=True)
            if node.sampled and weights.any()
        }
        for sample in samples
    }
    assert taught == {"writer": {"writer"}, None: {"planner"}}


async def test_a_step_without_feedback_is_counted_and_trains_what_it_can(chat: HFChatFormat) -> None:
    training = await trained(chat, group(chat), feedback={"errors": False, "siblings": False})
    assert training.metrics["calls_with_feedback"] == 0
    assert training.scored == []
    assert len(training.updates) == 1


def test_feedback_that_no_loss_uses_is_refused() -> None:
    with pytest.raises(ConfigError, match='feedback is used by no loss; add "sdpo"'):
        LightningRL(feedback={"errors": True})
    with pytest.raises(ConfigError, match="different teachers for the same tokens"):
        LightningRL(loss=["sdpo", "distill"], teacher="m")
