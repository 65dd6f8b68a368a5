"""LightningRL: reinforcement learning of an agent from whole rollouts (arXiv 2508.03680, section 3).

It has two levels. For the episode, a *credit rule* gives every model call of a rollout its advantage; with
`credit="group_relative"` and groups of rollouts of one task it is that of GRPO (arXiv 2402.03300, equation 4):

    A_i = (R_i - mean(R)) / std(R)         over the group, the same for every call of rollout i

For the token, a *loss* uses that advantage; `ppo` is the clipped ratio (arXiv 1707.06347, equation 7)

    L = - sum_t  w_t  min( r_t A,  clip(r_t, 1 - clip_low, 1 + clip_high) A ),   r_t = pi(t) / pi_sampled(t)

with w_t such that every rollout has the same weight whatever its number of calls (`aggregate="rollout"`), or every
token has (`aggregate="token"`). Groups whose rewards are all equal teach nothing; they are skipped and counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Literal, Self, TypedDict, Unpack

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from agentlightning.algorithms.agents import AgentRoles
from agentlightning.algorithms.base import Algorithm, register
from agentlightning.algorithms.credit_assignment import (
    CreditAssigner,
    check_critic,
    one_credit_setting,
    trains_values,
)
from agentlightning.algorithms.training import Collected, Training
from agentlightning.assemble import OTHER_MODELS, OVERRIDDEN_CALLS, UNTRAINABLE_CALLS, scalar_reward
from agentlightning.credit import (
    AgentRewards,
    Aggregate,
    Assignment,
    ConstantNormalizer,
    Normalization,
    canonical_credit,
    is_target,
    normalization,
    rejections,
)
from agentlightning.credit.agent_rewards import team_reward
from agentlightning.credit.rejection import NO_POLICY_CALLS, NO_TARGET_CALLS, UNKNOWN_TOKENS, Rejection
from agentlightning.policy.lora_config import AgentSetting
from agentlightning.policy.losses import Loss, LossSetting, PPOLoss
from agentlightning.policy.optimizer_config import OptimizerConfig
from agentlightning.trajectory import Trajectory
from agentlightning.util.settings import SettingsSignature, settings_from


class LightningRLConfig(BaseModel):
    """The settings of LightningRL.

    >>> agl.LightningRLConfig(steps=50, group_size=4).tasks_per_step
    16
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    type: Literal["lightning_rl"] = "lightning_rl"
    """Which algorithm this is."""
    steps: int = Field(default=100, ge=1)
    """Updates of the whole run, one for each batch of rollouts."""
    tasks_per_step: int = Field(default=16, ge=1)
    """Tasks of each step."""
    group_size: int = Field(default=8)
    """Rollouts of each task; their mean reward is the baseline."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of the training rollouts."""
    credit: str | dict[str, Any] = "group_relative"
    """The episode-level credit rule: its name, or a table with its `type` and settings. `credit_assignment` is another
    name of this setting."""
    normalization: Normalization = Normalization()
    """What advantages are divided by: rule (as the formula of the credit rule says), none, group, batch, agent, max_rl
    or gdpo; or a table with `type` and `center`."""
    agent_rewards: AgentRewards = "shared"
    """Whose reward the calls of an agent are credited with where rewards were emitted for single agents: shared (the
    rollout's), own (the agent's), or difference (the rollout's less the agent's, which is then what the rollout would
    have earned without it)."""
    aggregate: Aggregate = "rollout"
    """What has the same weight in the loss: every rollout, or every sampled token; or a table with type "constant" and
    the length that each rollout's loss is divided by."""
    loss: Loss = Field(default_factory=PPOLoss)
    """The token-level loss: a name, a table with its `type` and settings, or a list of these, which add up."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps for each batch of rollouts, each over its own share of the groups."""
    reward_weights: dict[str, float] | None = None
    """Weights of the named dimensions of a reward."""
    timeout_reward: float | None = Field(default=None, allow_inf_nan=False)
    """The reward of a rollout that timed out, whose calls are then learned from. None: it has failed and is left out,
    so that nothing teaches the policy to be quicker."""
    target_agent: str | None = None
    """Only calls of agents whose whole name matches this regular expression are trained. None: those that the agent
    itself declares (`LitAgent.trained_agents`), else all."""
    agents: dict[str, AgentSetting] = Field(default_factory=dict[str, AgentSetting])
    """What the calls of each agent train: an adapter of its own (a table with type "lora", r ...), nothing ("frozen"),
    or what all "shared" agents train together. Agents that are not listed are frozen; without any, all are shared."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """How weights are updated."""

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        self.optimizer.check_warmup(self.steps * self.minibatches)
        return self

    @model_validator(mode="before")
    @classmethod
    def _rename_credit(cls, settings: Any) -> Any:
        return one_credit_setting(settings)

    @field_validator("normalization", mode="before")
    @classmethod
    def _read_normalization(cls, setting: Any) -> Any:
        return normalization(setting)

    @field_validator("credit", mode="before")
    @classmethod
    def _resolve_alias(cls, credit: Any) -> Any:
        return canonical_credit(credit)

    @field_validator("target_agent")
    @classmethod
    def _check_pattern(cls, target: str | None) -> str | None:
        try:
            re.compile(target or "")
        except re.error as error:
            raise ValueError(f"{target!r} is no regular expression: {error}") from error
        return target

    @model_validator(mode="after")
    def _check_agents(self) -> Self:
        AgentRoles(self.agents).check(self.target_agent)
        return self

    @model_validator(mode="after")
    def _check_group_size(self) -> Self:
        rule = _assignment(self).rule
        rule.check_group_size(self.group_size)
        check_critic(rule, self.loss)
        return self


def _assignment(config: LightningRLConfig) -> Assignment:
    """The credit rule and the settings around it. Raises ConfigError where they do not go together."""
    return Assignment.of(config.credit, config.normalization, config.agent_rewards, config.reward_weights)


class LightningRLSettings(TypedDict, total=False):
    """The fields of `LightningRLConfig` as arguments, for editors and type checkers; a section may be a table."""

    steps: int
    tasks_per_step: int
    group_size: int
    temperature: float
    credit: str | Mapping[str, Any]
    credit_assignment: str | Mapping[str, Any]
    normalization: str | Mapping[str, Any] | Normalization
    agent_rewards: AgentRewards
    aggregate: Literal["rollout", "token"] | ConstantNormalizer | Mapping[str, Any]
    loss: LossSetting
    minibatches: int
    reward_weights: Mapping[str, float] | None
    timeout_reward: float | None
    target_agent: str | None
    agents: Mapping[str, AgentSetting | Mapping[str, Any]]
    optimizer: OptimizerConfig | Mapping[str, Any]


@register
class LightningRL(Algorithm[LightningRLConfig]):
    """Reinforcement learning with a credit rule for the episode and a loss for the token.

    `settings` are the fields of `LightningRLConfig`; they replace those of `config`. Raises ConfigError for settings
    that cannot work.

        >>> agl.LightningRL(steps=50, group_size=4).total_steps
        50
    """

    name: ClassVar[str] = "lightning_rl"

    __signature__ = SettingsSignature(LightningRLConfig)

    def __init__(self, config: LightningRLConfig | None = None, **settings: Unpack[LightningRLSettings]) -> None:
        self.config = settings_from(
            LightningRLConfig, one_credit_setting(settings), base=config, source="from the arguments of LightningRL"
        )
        self._roles = AgentRoles(self.config.agents)
        self._credit = CreditAssigner(
            _assignment(self.config), self.config.aggregate, trains_values=trains_values(self.config.loss)
        )

    def state_dict(self) -> Mapping[str, Any]:
        """What the credit rule remembers of tasks; empty if it remembers nothing."""
        memory = self._credit.memory
        return {"credit_memory": memory.state_dict()} if memory.size else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._credit.memory.load_state_dict(state.get("credit_memory", {"forgotten": 0, "tables": {}}))

    @property
    def total_steps(self) -> int:
        return self.config.steps

    async def run(self, training: Training) -> None:
        while training.step < self.total_steps:
            await self._step(training)

    async def _step(self, training: Training) -> None:
        config = self.config
        target = self._target(training)
        collected = await training.collect(
            tasks=config.tasks_per_step,
            group_size=config.group_size,
            temperature=config.temperature,
            check=lambda trajectories: self.rejections(trajectories, target),
            timeout_reward=config.timeout_reward,
        )
        if training.step == 0:
            self._roles.check_seen(collected.trajectories, target)
        samples, report = await self._credit.samples(training, collected.trajectories, target, self._roles.trains)
        counts = self._roles.counts(collected.trajectories)
        metrics = {**reward_metrics(collected, config.reward_weights), **counts, **report.metrics()}
        if samples:
            metrics |= await training.update(samples, loss=config.loss, minibatches=config.minibatches)
        await training.finish_step(collected, metrics)

    def _target(self, training: Training) -> str | None:
        return self.config.target_agent if self.config.target_agent is not None else training.target_agent

    def rejections(self, trajectories: Sequence[Trajectory], target_agent: str | None = None) -> list[Rejection]:
        """The rollouts that it cannot learn from: all of them if they hold no call of the policy, or none of the agents
        to train."""
        found = rejections(trajectories, self._credit.assignment, target_agent=target_agent)
        rejected = {each.rollout_id for each in found}
        left = [trajectory for trajectory in trajectories if trajectory.rollout_id not in rejected]
        agents = {call.agent for trajectory in left for call in trajectory.transitions}
        if not agents:
            return [*found, *_without_calls(left)]
        if any(is_target(agent, target_agent) for agent in agents):
            return found
        return [*found, *_without_target(left, str(target_agent), agents)]


def reward_metrics(collected: Collected, weights: Mapping[str, float] | None) -> Mapping[str, float]:
    """Mean reward of a batch, without missing rewards, and counts of its calls."""
    known = [
        reward
        for trajectory in collected.trajectories
        if (reward := scalar_reward(team_reward(trajectory), weights)) is not None
    ]
    calls = sum(len(trajectory.transitions) for trajectory in collected.trajectories)
    return {
        "reward": sum(known) / len(known) if known else float("nan"),
        "calls_per_rollout": calls / max(1, len(collected.trajectories)),
        "calls_overridden": sum(each.metadata.get(OVERRIDDEN_CALLS, 0) for each in collected.trajectories),
    }


def _without_calls(trajectories: Sequence[Trajectory]) -> list[Rejection]:
    """Rejects rollouts that hold no call of the policy: another model answered, or no model was called."""
    metadata = [trajectory.metadata for trajectory in trajectories]
    unknown, others = (sum(counts.get(name, 0) for counts in metadata) for name in (UNTRAINABLE_CALLS, OTHER_MODELS))
    if unknown + others:
        reason = UNKNOWN_TOKENS
        message = (
            f"none of the {unknown + others} model calls of these rollouts can be learned from: {others} were answered"
            f" by other models than the policy, and of {unknown} the tokens are not known. LightningRL learns from the"
            " tokens of the policy: have the agent ask for the policy's name, or change the route that leads its model"
            " elsewhere ([gateway] routes); text alone is enough for SFT"
        )
    else:
        reason = NO_POLICY_CALLS
        message = (
            f"none of these {len(trajectories)} rollouts called the policy. The agent must send its model calls to"
            " OPENAI_BASE_URL (or the injected base_url), and not to an address of its own"
        )
    return [Rejection(trajectory.rollout_id, reason, message) for trajectory in trajectories]


def _without_target(
    trajectories: Sequence[Trajectory], target: str, agents: AbstractSet[str | None]
) -> list[Rejection]:
    found = ", ".join(sorted("calls without a name" if agent is None else repr(agent) for agent in agents))
    message = (
        f"no call of these {len(trajectories)} rollouts is of an agent called {target!r}; there are {found}. Change"
        " target_agent (or trained_agents), or name the agent with agl.track_agent"
    )
    return [Rejection(trajectory.rollout_id, NO_TARGET_CALLS, message) for trajectory in trajectories]
