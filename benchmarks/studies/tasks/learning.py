"""Reinforcement learning on an environment in this process, and how many rollouts it takes to reach a reward.

The parts are those of a run: `training_samples` with a credit rule, `LocalPolicy.train` with a loss. There are no
servers, no store and no agent processes, so that thousands of rollouts take seconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from agentlightning.assemble import token_tree
from agentlightning.credit import CreditRule, group_trajectories, training_samples
from agentlightning.credit.base import CallColumns, CreditContext, by_call, credit_rule
from agentlightning.policy.base import UpdateOptions
from agentlightning.policy.config import OptimizerConfig, ValueHeadConfig
from agentlightning.trajectory import Trajectory
from tasks.base import Environment
from tasks.rollouts import play
from tasks.word_policy import WordPolicy, imitate

LATEST = 2
"""The reward is the mean of this number of evaluations."""


@dataclass(frozen=True)
class Recipe:
    """How an environment is learned; the same for every rule and loss that is compared."""

    environment: Environment
    lr: float
    hidden: int = 32
    layers: int = 1
    imitation_steps: int = 100
    """Of supervised learning for the starting policy, 64 demonstrations each."""
    train_tasks: int = 8
    tasks_per_step: int = 1
    group_size: int = 8
    evaluate_every: int = 3
    evaluation_rollouts: int = 96
    most_rollouts: int = 4000
    """Where a run that has not arrived ends."""


@dataclass(frozen=True)
class Start:
    """A starting policy, which all arms of a seed share."""

    recipe: Recipe
    seed: int
    policy: WordPolicy
    weights: Mapping[str, torch.Tensor]


@dataclass
class Learned:
    """What a run did."""

    rollouts: int
    arrived: bool
    """Whether it reached the target; else `rollouts` are those it was given."""
    seconds: float = field(default=0.0, compare=False)
    rewards: list[float] = field(default_factory=list[float])
    """Of each evaluation."""


def make_start(recipe: Recipe, seed: int) -> Start:
    policy = WordPolicy(recipe.environment, seed=seed, hidden=recipe.hidden, layers=recipe.layers)
    imitate(policy.model, policy.tokenizer, recipe.environment.demonstrations(64 * recipe.imitation_steps, seed))
    return Start(recipe, seed, policy, {name: value.clone() for name, value in policy.model.state_dict().items()})


async def learn(
    start: Start,
    rule: str | Mapping[str, Any] | CreditRule,
    *,
    target: float = 0.8,
    loss: Any = "ppo",
    lr: float | None = None,
    value_head: ValueHeadConfig | None = None,
) -> Learned:
    """Train until the reward on held-out tasks, sampled, is `target` of the optimum. With `value_head`, which the loss
    has to train, the rule is given its values."""
    recipe, policy, environment = start.recipe, start.policy, start.recipe.environment
    policy.start(start.weights, OptimizerConfig(lr=recipe.lr if lr is None else lr), start.seed, value_head)
    rule, context = credit_rule(rule), CreditContext()
    tasks = environment.tasks("train", recipe.train_tasks, start.seed)
    learned, began = Learned(0, False), time.perf_counter()
    step = 0
    while learned.rollouts < recipe.most_rollouts and not learned.arrived:
        chosen = [tasks[(step * recipe.tasks_per_step + i) % len(tasks)] for i in range(recipe.tasks_per_step)]
        groups = group_trajectories(play(environment, policy, chosen, recipe.group_size, batch=step))
        if value_head is not None:
            context = CreditContext(context.memory, await _values(policy, groups))
        samples, _ = training_samples(groups, rule, context=context)
        if samples:
            await policy.local.train(samples, UpdateOptions(loss=loss))
        step += 1
        learned.rollouts += len(chosen) * recipe.group_size
        if step % recipe.evaluate_every == 0:
            learned.rewards.append(sampled_reward(start))
            latest = learned.rewards[-LATEST:]
            learned.arrived = sum(latest) / LATEST >= target * environment.optimum
    await policy.local.close()
    learned.seconds = time.perf_counter() - began
    return learned


async def _values(policy: WordPolicy, groups: Sequence[Sequence[Trajectory]]) -> CallColumns:
    """What the value head predicts, before anything is learned from these groups."""
    trees = [token_tree(group) for group in groups]
    return {"values": by_call(trees, (await policy.local.score(trees, {"values"}))["values"])}


def sampled_reward(start: Start) -> float:
    """The mean reward on held-out tasks."""
    recipe = start.recipe
    tasks = recipe.environment.tasks("held_out", recipe.evaluation_rollouts // 4)
    played = play(recipe.environment, start.policy, tasks, 4)
    return sum(float(each.reward) for each in played if isinstance(each.reward, float)) / len(played)


def record(start: Start, groups: int) -> list[list[Trajectory]]:
    """Groups of the starting policy, nothing trained."""
    recipe = start.recipe
    start.policy.start(start.weights, OptimizerConfig(), start.seed)
    tasks: Sequence[Any] = recipe.environment.tasks("train", recipe.train_tasks, start.seed)
    chosen = [tasks[i % len(tasks)] for i in range(groups)]
    return [
        play(recipe.environment, start.policy, [task], recipe.group_size, batch=number)
        for number, task in enumerate(chosen)
    ]
