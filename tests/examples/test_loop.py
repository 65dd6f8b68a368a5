"""The loop in one file is the framework's: both make the same gradients of the same rollouts. And it learns."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import agentlightning as agl
from agentlightning.algorithms.training import Collected
from agentlightning.policy.config import LocalPolicyConfig
from agentlightning.policy.local import LocalPolicy
from agentlightning.trajectory import Trajectory, Transition

Load = Callable[[str, str], ModuleType]
FILE = Path(__file__).parents[2] / "examples" / "loop.py"


@pytest.fixture
def loop(module_of: Load) -> ModuleType:
    return module_of("", "loop")


class RecordedTraining:
    """The side of a run that `LightningRL` sees: it returns the same rollouts, and updates a policy."""

    def __init__(self, policy: LocalPolicy, trajectories: list[Trajectory]) -> None:
        self.policy, self.trajectories = policy, trajectories
        self.step, self.target_agent = 0, None
        self.metrics: dict[str, float] = {}

    async def collect(self, **request: Any) -> Collected:
        return Collected(tuple(self.trajectories))

    async def update(self, samples: Any, options: Any) -> Any:
        self.metrics = dict(await self.policy.train(samples, options))
        return self.metrics

    async def finish_step(self, collected: Collected, metrics: Any) -> None:
        self.step += 1


def trajectories(groups: list[list[Any]]) -> list[Trajectory]:
    """The rollouts of the loop as the framework reads its own from a store."""
    found: list[Trajectory] = []
    for number, group in enumerate(groups):
        for index, rollout in enumerate(group):
            name = f"{number}.{index}"
            calls = (
                Transition(name, "at", f"{name}.{n}", n, call.prompt, call.sampled, call.logprobs)
                for n, call in enumerate(rollout.calls)
            )
            found.append(Trajectory(name, "at", tuple(calls), rollout.reward, group=str(number)))
    return found


def tokenizer(loop: ModuleType) -> PreTrainedTokenizerFast:
    words = {f"t{i}": i for i in range(loop.VOCABULARY)}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")))
    made.eos_token = made.pad_token = f"t{loop.END}"
    made.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return made


async def framework_gradients(loop: ModuleType, model: Any, groups: list[list[Any]]) -> tuple[dict[str, Any], Any]:
    """The gradients of one step of `LightningRL` with its default settings, and its metrics."""
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda own, name=name: gradients.update({name: own.grad.detach().clone()})
        )
    policy = LocalPolicy(LocalPolicyConfig(model="loop", device="cpu"), model, tokenizer(loop))
    training: Any = RecordedTraining(policy, trajectories(groups))
    try:
        await agl.LightningRL(steps=1, group_size=4).run(training)
    finally:
        await policy.close()
    return gradients, training.metrics


@pytest.mark.parametrize("seed", [0, 1])
async def test_the_loop_makes_the_gradients_of_the_framework(loop: ModuleType, seed: int) -> None:
    model = loop.make_model(seed)
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    groups = groups_of(loop, model, draw, generator)
    for rollout in (rollout for group in groups[1:] for rollout in group):
        rollout.reward = draw.choice((0.0, 0.5, 1.0))
    with torch.no_grad():  # The weights that learn are not those that sampled: ratios differ from 1, and are clipped.
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    other = copy.deepcopy(model)
    theirs, metrics = await framework_gradients(loop, other, groups)
    assert 0 < metrics["clip_fraction"] < 1
    loop.policy_loss(model, loop.batch_of(groups)).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name], rtol=1e-5, atol=1e-5 * theirs[name].abs().max().item())


def groups_of(loop: ModuleType, model: Any, draw: random.Random, generator: torch.Generator) -> list[list[Any]]:
    tasks = [tuple(draw.choices(range(loop.NUMBERS), k=loop.CALLS)) for _ in range(6)]
    rollouts = loop.play(model, [task for task in tasks for _ in range(4)], generator)
    for rollout in rollouts:
        rollout.reward = 0.0
    return [rollouts[start : start + 4] for start in range(0, len(rollouts), 4)]


def test_calls_that_continue_one_another_are_one_row_and_others_begin_a_new_one(loop: ModuleType) -> None:
    calls = [
        loop.Call((9, 1), (2, 4), (-0.1, -0.2)),
        loop.Call((9, 1, 2, 4, 0), (3,), (-0.3,)),
        loop.Call((9, 7), (5,), (-0.4,)),
    ]
    first, second = loop.rows_of(loop.Rollout((0,), calls))
    assert first.tokens == [9, 1, 2, 4, 0, 3]
    assert first.sampled == [False, False, True, True, False, True]
    assert first.logprobs == [0.0, 0.0, -0.1, -0.2, 0.0, -0.3]
    assert (second.tokens, second.sampled) == ([9, 7, 5], [False, False, True])


def test_a_sampled_token_has_the_probability_that_the_model_gives_it(loop: ModuleType) -> None:
    model = loop.make_model(0)
    [rollout] = loop.play(model, [(1, 2, 3)], torch.Generator().manual_seed(0))
    [row] = loop.rows_of(rollout)
    logprobs = model(input_ids=torch.tensor([row.tokens])).logits[0, :-1].log_softmax(-1)
    found = logprobs.gather(-1, torch.tensor(row.tokens)[1:, None])[:, 0]
    sampled = torch.tensor(row.sampled)[1:]
    torch.testing.assert_close(found[sampled], torch.tensor(row.logprobs)[1:][sampled], rtol=0, atol=1e-5)


def test_groups_of_equal_rewards_teach_nothing(loop: ModuleType) -> None:
    call = loop.Call((9, 1), (2,), (-0.1,))
    equal = [loop.Rollout((0,), [call], 1.0) for _ in range(2)]
    assert loop.batch_of([equal]) == []
    rows = loop.batch_of([equal, [loop.Rollout((0,), [call], reward) for reward in (1.0, 0.0)]])
    assert [(row.advantage, row.weight) for row in rows] == [(1.0, 0.25), (-1.0, 0.25)], "and count"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_loop_learns_its_task(loop: ModuleType) -> None:
    torch.set_num_threads(1)
    *rewards, last = loop.train()
    assert rewards[0] < 0.2
    assert last > 0.9


def test_the_loop_can_be_read_in_one_sitting_and_hides_nothing() -> None:
    text = FILE.read_text()
    assert len(text.splitlines()) < 300
    imported = set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))
    assert imported <= {"__future__", "argparse", "collections", "dataclasses", "itertools", "random", "statistics"} | {
        "torch",
        "transformers",
    }
