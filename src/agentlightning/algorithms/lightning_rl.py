"""LightningRL: reinforcement learning of an agent from whole rollouts (arXiv 2508.03680, section 3).

It has two levels. For the episode, a *credit rule* gives every model call of a rollout its advantage; with
`credit="group_relative"` and groups of rollouts of one task it is that of GRPO (arXiv 2402.03300, equation 4):

    A_i = (R_i - mean(R)) / std(R)         over the group, the same for every call of rollout i

For the token, a *loss* uses that advantage; `ppo` is the clipped ratio (arXiv 1707.06347, equation 7)

    L = - sum_t  w_t  min( r_t A,  clip(r_t, 1 - clip_low, 1 + clip_high) A ),   r_t = pi(t) / pi_sampled(t)

with w_t such that every rollout has the same weight whatever its number of calls (`aggregate="rollout"`), or every
token has (`aggregate="token"`). `preset` names published combinations of the two. Groups whose rewards are all equal
have advantages of 0; they are counted, and stay in the batch unless `equal_groups` filters them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Final, Self

from pydantic import (
    BeforeValidator,
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    field_validator,
    model_validator,
)

from agentlightning.algorithms.agents import AgentRoles, without_calls, without_target
from agentlightning.algorithms.base import RolloutsAlgorithm, RolloutsConfig
from agentlightning.algorithms.step import (
    SIZE,
    CreditAssigner,
    Feedback,
    OverlongPenalty,
    Replay,
    ReplayBuffer,
    check_critic,
    check_losses,
    groups_with_spread,
    most_uncertain,
    needed_columns,
    reward_metrics,
    trains_values,
    truncated_rollouts,
    with_columns,
    with_feedback,
    with_kl_penalty,
    with_overlong_penalty,
    without_weight,
)
from agentlightning.algorithms.training import Collected, Training
from agentlightning.credit import (
    AgentRewards,
    Aggregate,
    Assignment,
    EqualGroups,
    Normalization,
    group_trajectories,
    is_target,
    read_normalization,
    rejections,
)
from agentlightning.credit.base import canonical_credit
from agentlightning.credit.rejection import Rejection
from agentlightning.credit.rules import ANSWER_LOGPROBS
from agentlightning.errors import ConfigError
from agentlightning.policy.base import Metrics, UpdateOptions
from agentlightning.policy.config import AgentSetting
from agentlightning.policy.losses import (
    ADVANTAGES,
    LOSSES,
    REF_LOGPROBS,
    TEACHER_LOGPROBS,
    Loss,
    PPOLoss,
    PreferenceLoss,
    TokenLoss,
    token_losses,
)
from agentlightning.policy.mismatch import Mismatch, Proximal, check_combination, check_proximal
from agentlightning.trajectory import TrainingSample, Trajectory
from agentlightning.util.settings import AtLeastOne, PositiveShare

# -- presets -----------------------------------------------------------------------------------------------------------

# Presets of LightningRL: the settings that published algorithms consist of, by name.
#
# A preset fills in the settings that are not given; those that are given win. The configuration of a run shows the
# settings in effect. All but `dapo` keep groups whose rewards are all equal, as their papers do.
#
#     grpo        Shao et al. 2024, arXiv:2402.03300, section 4.1: clipped ratio and k3 divergence from the reference
#     dr_grpo     Liu et al. 2025, arXiv:2503.20783: no division by the standard deviation or by a response's length
#     dapo        Yu et al. 2025, arXiv:2503.14476: clip-higher, dynamic sampling, groups with equal rewards filtered,
#                 tokens of equal weight; `overlong`, which depends on the task, is left to you
#     gspo        Zheng et al. 2025, arXiv:2507.18071: one ratio for each rollout
#     cispo       MiniMax 2025, arXiv:2506.13585: the clipped ratio as a weight
#     sapo        Gao et al. 2025, arXiv:2511.20347: a smooth gate in place of a clip
#     dppo        arXiv:2602.04879: a mask by the change of probability, advantages as in Dr. GRPO
#     reinforce++ Hu et al. 2025, arXiv:2501.03262: rewards less a divergence, normalised over the batch, clipped ratio
#     rloo        Ahmadian et al. 2024, arXiv:2402.14740: leave-one-out baseline, REINFORCE, whole responses as actions
#     loop        Chen et al. 2025, arXiv:2502.01600: leave-one-out baseline, clipped ratio, one model in memory

LENGTH: Final = 1024
"""Tokens by which "constant" normalizers divide, unless `aggregate` says otherwise."""
BY_LENGTH: Final = {"type": "constant", "length": LENGTH}
WITHOUT_STD: Final = {"type": "group_relative", "normalize_std": False}
CLIP: Final = {"type": "ppo", "clip_low": 0.2, "clip_high": 0.2}

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "grpo": {
            "credit": "group_relative",
            "aggregate": "rollout",
            "loss": [CLIP, {"type": "kl", "coefficient": 0.04, "estimator": "k3"}],
        },
        "dr_grpo": {"credit": WITHOUT_STD, "aggregate": BY_LENGTH, "loss": CLIP},
        "dapo": {
            "credit": "group_relative",
            "aggregate": "token",
            "loss": {"type": "ppo", "clip_low": 0.2, "clip_high": 0.28},
            "dynamic_sampling": 3,
        },
        "gspo": {"credit": "group_relative", "aggregate": "rollout", "loss": "gspo"},
        "cispo": {"credit": "group_relative", "aggregate": "token", "loss": "cispo"},
        "sapo": {"credit": "group_relative", "aggregate": "rollout", "loss": "sapo"},
        "dppo": {"credit": WITHOUT_STD, "aggregate": "token", "loss": "dppo"},
        "reinforce++": {
            "credit": "reinforce",
            "normalization": {"type": "batch", "center": True},
            "aggregate": "token",
            "loss": CLIP,
            "kl_in_reward": 0.01,
        },
        "rloo": {"credit": "leave_one_out", "aggregate": BY_LENGTH, "loss": {"type": "importance", "level": "rollout"}},
        "loop": {"credit": "leave_one_out", "aggregate": "rollout", "loss": CLIP},
    }
)
"""By name, the settings of `LightningRLConfig` that a preset fills in."""


class LightningRLConfig(RolloutsConfig):
    """The settings of LightningRL.

    >>> agl.config.LightningRLConfig(steps=50, group_size=4).tasks_per_step
    16
    """

    type: str = "lightning_rl"
    """Which algorithm this is."""
    preset: str | None = None
    """A published algorithm whose settings are used where none are given: grpo, dr_grpo, dapo, gspo, cispo, sapo, dppo,
    reinforce++, rloo or loop."""
    group_size: int = 8
    """Rollouts of each task; their mean reward is the baseline."""
    top_p: PositiveShare = 1.0
    """Training rollouts are sampled from the most likely tokens that together have this probability. Below 1 these sets
    are recorded, and the policy's probabilities are those over them (`policy.max_kept_tokens`)."""
    top_k: NonNegativeInt = 0
    """Training rollouts are sampled from so many of the most likely tokens, recorded likewise. 0: from all."""
    credit: Annotated[str | dict[str, Any], BeforeValidator(canonical_credit)] = "group_relative"
    """The episode-level credit rule: its name, or a table with its `type` and settings. `credit_assignment` is another
    name of this setting."""
    normalization: Annotated[Normalization, BeforeValidator(read_normalization)] = Normalization()
    """What advantages are divided by: rule (as the formula of the credit rule says), none, group, batch, agent, max_rl
    or gdpo; or a table with `type` and `center`."""
    agent_rewards: AgentRewards = "shared"
    """Whose reward the calls of an agent are credited with where rewards were emitted for single agents: shared (the
    rollout's), own (the agent's), or difference (the rollout's less the agent's, which is then what the rollout would
    have earned without it)."""
    aggregate: Aggregate = "rollout"
    """What has the same weight in the loss: every rollout, or every sampled token; or a table with type "constant" and
    the length that each rollout's loss is divided by."""
    loss: Loss = PPOLoss()
    """The token-level loss: a name, a table with its `type` and settings, or a list of these, which add up."""
    mismatch: Mismatch | None = None
    """Corrections of the difference between the sampler's probabilities and the trainer's: truncate, icepop,
    geometric_mask, sequence_mask, off, a table with settings, or a list of these, which multiply. They need one more
    forward pass over each batch. None: truncation at 2 where samples have `proximal_logprobs` anyway."""
    proximal: Proximal | None = None
    """What ratios are against and clipped around: behavior (the recorded log-probabilities), pass (those of the weights
    that the update starts from, by one more forward pass), or interpolate (between the recorded ones and those being
    trained, by the age of a token and without a pass; for rollouts of older weights). The difference from the recorded
    ones is corrected as `mismatch` says. None: pass where `mismatch` is set and with loss "gspo", else behavior."""
    reference: str | None = None
    """The model that loss "kl" and `kl_in_reward` keep the policy near, named as `policy.model`. None: the
    weights that the run started from; with adapters, those below them."""
    teacher: str | None = None
    """The model that loss "distill" learns from, named as `policy.model`, with the policy's tokenizer."""
    feedback: Feedback | None = None
    """What the policy is shown after it has answered, for loss "sdpo": errors of tools, answers of better rollouts.
    None: both."""
    kl_in_reward: NonNegativeFloat = 0.0
    """What each nat of divergence from the reference costs a rollout, taken from its reward."""
    overlong: OverlongPenalty | None = None
    """A penalty for rollouts with too many sampled tokens (DAPO): a table with `max_tokens` and `buffer`."""
    truncated_reward: FiniteFloat | None = None
    """The reward of a rollout in which an answer was cut off by its token limit, or that ended at its limit of turns.
    None: the reward it was given."""
    mask_truncated: bool = False
    """Whether such rollouts count in the baseline of their group only, and are not learned from."""
    dynamic_sampling: NonNegativeInt = 0
    """How often a step may request further tasks in place of those whose rollouts all had the same reward (DAPO)."""
    equal_groups: EqualGroups | None = None
    """What becomes of groups whose rewards are all equal: keep, they count in what the loss is divided by, and in
    losses that read no advantages, such as kl and distill (GRPO); filter, they are left out of the batch (DAPO). None:
    filter with `dynamic_sampling`, which requests others in their place, and with loss "awr", which would imitate
    groups that all failed; else keep."""
    replay: Replay | None = None
    """Recent successful rollouts that join groups of their task in which none succeeded: a table with `capacity`,
    `max_age`, `success` and `rollouts`. None: none are kept."""
    keep_groups: PositiveShare = 1.0
    """The share of a step's groups that is learned from: those whose rewards differ most (StarPO-S)."""
    minibatches: AtLeastOne = 1
    """Optimiser steps for each batch of rollouts, each over its own share of the groups."""
    timeout_reward: FiniteFloat | None = None
    """The reward of a rollout that timed out, whose calls are then learned from. None: it has failed and is left out,
    so that nothing teaches the policy to be quicker."""
    agents: dict[str, AgentSetting] = Field(default={})
    """What the calls of each agent train: an adapter of its own (a table with type "lora", r ...), nothing ("frozen"),
    or what all "shared" agents train together. Agents that are not listed are frozen; without any, all are shared."""

    @classmethod
    def expand_preset(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings with those of their preset that are not among them, and `credit` in place of
        `credit_assignment`. Raises ConfigError for an unknown preset, and where these two differ."""
        given = dict(settings)
        if "credit_assignment" in given:
            other = given.pop("credit_assignment")
            if canonical_credit(credit := given.setdefault("credit", other)) != canonical_credit(other):
                raise ConfigError(
                    f"credit={credit!r} and credit_assignment={other!r} are two names of one setting; give one of them"
                )
        name = given.get("preset")
        if name in (None, "none"):
            return given
        if name not in PRESETS:
            raise ConfigError(f"there is no preset {name!r}; choose one of {', '.join(PRESETS)}")
        return {**PRESETS[name], **given}

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, settings: Any) -> Any:
        return cls.expand_preset(settings) if isinstance(settings, Mapping) else settings

    @property
    def losses(self) -> tuple[TokenLoss, ...]:
        """The losses, one or several."""
        return token_losses(self.loss)

    @property
    def reads_advantages(self) -> bool:
        """Whether rewards play a part in one of the losses."""
        return any(ADVANTAGES in loss.needs for loss in self.losses)

    @model_validator(mode="after")
    def _check_losses(self) -> Self:
        if self.mismatch is not None:
            check_combination(self.mismatch, self.losses)
        check_proximal(self.proximal, self.losses, self.mismatch)
        if self.proximal == "interpolate" and self.agents:
            raise ValueError('proximal="interpolate" counts versions of one policy; with agents use "pass"')
        if self.replay is not None:
            check_losses(self.losses)
        if self.equal_groups == "filter" and not self.reads_advantages:
            names = ", ".join(f'"{loss.type}"' for loss in self.losses)
            raise ValueError(f'equal_groups="filter" goes by rewards, which play no part in loss {names}; keep them')
        types = {loss.type for loss in self.losses}
        if pairs := [loss.type for loss in self.losses if isinstance(loss, PreferenceLoss)]:
            raise ValueError(
                f'loss "{pairs[0]}" learns from preferences, which rollouts with rewards do not give; use'
                f' algorithm.type="dpo" with algorithm.loss="{pairs[0]}" (agl dpo, agl.DPO)'
            )
        # The teacher of "sdpo" is the policy itself.
        taught = [loss.type for loss in self.losses if TEACHER_LOGPROBS in loss.needs and loss.type != "sdpo"]
        if taught and self.teacher is None:
            raise ValueError(f'loss "{taught[0]}" learns from a teacher; set teacher=DIRECTORY of a model')
        if self.teacher is not None and not taught:
            raise ValueError(f'teacher={self.teacher!r} is used by no loss; add "distill", or leave it out')
        if self.feedback is not None and "sdpo" not in types:
            raise ValueError('feedback is used by no loss; add "sdpo", or leave it out')
        shapes = self.kl_in_reward or self.overlong is not None or self.truncated_reward is not None
        if shapes and (self.agent_rewards != "shared" or self.normalization.type == "gdpo"):
            raise ValueError(
                "kl_in_reward, overlong and truncated_reward change the one reward of a rollout; use them with"
                ' agent_rewards="shared" and without normalization "gdpo"'
            )
        if taught and "sdpo" in types:
            raise ValueError(
                f'losses "sdpo" and "{taught[0]}" have different teachers for the same tokens; use one of them'
            )
        return self

    @field_validator("loss", mode="before")
    @classmethod
    def _refuse_presets(cls, setting: Any) -> Any:
        if isinstance(setting, str) and setting in PRESETS.keys() - {*LOSSES.names()}:
            raise ValueError(f'"{setting}" is a preset, a loss with its credit rule: set preset="{setting}"')
        return setting

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        self.optimizer.check_warmup(self.steps * self.minibatches)
        roles, rule = AgentRoles(self.agents), assignment_of(self).rule
        roles.check(self.target_agent)
        rule.check_group_size(self.group_size)
        check_critic(rule, self.loss)
        if ANSWER_LOGPROBS in rule.needs:
            roles.check_answers(rule.type)
        return self


def assignment_of(config: LightningRLConfig) -> Assignment:
    """The credit rule and the settings around it. Raises ConfigError where they do not go together."""
    imitates = any(ADVANTAGES in loss.needs and loss.trains_zero_advantage for loss in config.losses)
    filters = imitates or (config.dynamic_sampling > 0 and config.reads_advantages)
    equal_groups = config.equal_groups or ("filter" if filters else "keep")
    made = Assignment.of(config.credit, config.normalization, config.agent_rewards, config.reward_weights, equal_groups)
    return replace(made, uses_rewards=config.reads_advantages)


def shape_rewards(
    trajectories: Sequence[Trajectory], config: LightningRLConfig, target: str | None
) -> tuple[Sequence[Trajectory], dict[str, float]]:
    """The trajectories with what they themselves change of their rewards, and its metrics."""
    metrics: dict[str, float] = {}
    if config.truncated_reward is not None:
        cut, reward = truncated_rollouts(trajectories, target), config.truncated_reward
        trajectories = [replace(each, reward=reward) if each.rollout_id in cut else each for each in trajectories]
    if config.overlong is not None:
        trajectories, metrics = with_overlong_penalty(trajectories, config.overlong, target)
    return trajectories, metrics


class LightningRL(RolloutsAlgorithm[LightningRLConfig]):
    """Reinforcement learning with a credit rule for the episode and a loss for the token.

    `settings` are the fields of `LightningRLConfig`, over those of `config`; `store` holds the sessions that
    `Trainer.train` learns from, unless the trainer has one. Raises ConfigError for settings that cannot work.

        >>> agl.LightningRL(steps=50, group_size=4).total_steps
        50
    """

    name = "lightning_rl"
    config_class = LightningRLConfig

    def __init__(self, config: LightningRLConfig | None = None, *, store: Any = None, **settings: Any) -> None:
        self.store = store
        super().__init__(config, **settings)
        self._roles = AgentRoles(self.config.agents)
        self._credit = CreditAssigner(
            assignment_of(self.config), self.config.aggregate, trains_values=trains_values(self.config.loss)
        )
        replay = self.config.replay
        self._replay = None if replay is None else ReplayBuffer(replay)

    def with_settings(self, values: Mapping[str, Any], source: str) -> Self:
        found = super().with_settings(values, source)
        LightningRL.__init__(found, found.config, store=self.store)
        return found

    def state_dict(self) -> Mapping[str, Any]:
        """What the credit rule remembers of tasks, and the ids of rollouts to replay; empty if there is neither."""
        memory, replay = self._credit.memory, self._replay
        return {
            **({"credit_memory": memory.state_dict()} if memory.size else {}),
            **({"replay": replay.state_dict()} if replay is not None and replay.size else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._credit.memory.load_state_dict(state.get("credit_memory", {"tables": {}}))
        if self._replay is not None:
            self._replay.load_state_dict(state.get("replay", {}))

    def check_staleness(self, max_staleness: int) -> None:
        if self.config.proximal == "interpolate" and not max_staleness and self.config.replay is None:
            raise ConfigError(
                'proximal="interpolate" does nothing with run.max_staleness=0, where no token is of older weights;'
                " raise max_staleness, or leave proximal out"
            )

    async def _step(self, training: Training) -> None:
        config, target = self.config, self._target(training)
        collected, replayed, counts = await self._collect(training, target)
        learned = (*collected.trajectories, *replayed)
        if training.step == 0:
            self._roles.check_seen(collected.trajectories, target)
        trajectories, shaping = await self._shaped(training, learned, target)
        trajectories, filtered = self._filtered(trajectories)
        trains = partial(self._roles.trains, target=target)
        samples, report = await self._credit.samples(training, trajectories, trains)
        counts |= filtered | self._roles.counts(collected.trajectories)
        metrics = {
            **reward_metrics(collected),
            **counts,
            "rollouts_truncated": float(len(truncated_rollouts(collected.trajectories, target))),
            **shaping,
            **report.metrics(),
        }
        if config.mask_truncated:
            samples = without_weight(samples, truncated_rollouts(learned, target))
        average = None
        if "sdpo" in {loss.type for loss in config.losses}:
            feedback = config.feedback or Feedback()
            samples, own = await with_feedback(training, samples, learned, feedback, trains)
            metrics, average = metrics | own, feedback.rate if feedback.rate < 1 else None
        if self._learns(samples):
            metrics |= await self._update(training, samples, average)
        await training.finish_step(collected, metrics)

    def _learns(self, samples: Sequence[TrainingSample]) -> bool:
        """Whether an update has anything to learn: not where all advantages are 0 and no loss does without them."""
        if any(loss.trains_zero_advantage for loss in self.config.losses):
            return bool(samples)
        return any(advantages.any() for sample in samples for advantages in sample.advantages)

    def _filtered(self, trajectories: Sequence[Trajectory]) -> tuple[list[Trajectory], dict[str, float]]:
        """The groups to learn from, and how many were left out."""
        if self.config.keep_groups == 1:
            return list(trajectories), {}
        groups = group_trajectories(trajectories)
        kept = most_uncertain(groups, self.config.keep_groups)
        return [each for group in kept for each in group], {"groups_filtered": float(len(groups) - len(kept))}

    async def _update(self, training: Training, samples: Sequence[TrainingSample], average: float | None) -> Metrics:
        config = self.config
        needed = needed_columns(config.losses, config.mismatch, config.proximal)
        models = {REF_LOGPROBS: config.reference, TEACHER_LOGPROBS: config.teacher}
        samples = await with_columns(training, samples, needed, models, lambda each: self._learns([each]))
        options = UpdateOptions(config.loss, config.minibatches, config.mismatch, average)
        return await training.update(samples, options)

    async def _collect(
        self, training: Training, target: str | None
    ) -> tuple[Collected, tuple[Trajectory, ...], dict[str, float]]:
        """The rollouts of a step, the earlier ones that join their groups, and what became of groups in which all had
        the same reward."""
        config, counts = self.config, Counter[str]()

        check = partial(self.rejections, target_agent=target)
        collect = partial(
            training.collect,
            group_size=config.group_size,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            check=check,
            timeout_reward=config.timeout_reward,
        )

        async def replay(new: Collected, joined: tuple[Trajectory, ...] = ()) -> tuple[Trajectory, ...]:
            if self._replay is None:
                return ()
            found, own = await self._replay.for_groups(training, new.trajectories, check, joined)
            counts.update(own)
            return (*joined, *found)

        collected = await collect(tasks=config.tasks_per_step)
        replayed, resampled = await replay(collected), 0
        for _ in range(config.dynamic_sampling):
            missing = config.tasks_per_step - groups_with_spread((*collected.trajectories, *replayed))
            if missing <= 0:
                break
            more = await collect(tasks=missing)
            replayed = await replay(more, replayed)
            collected, resampled = collected + more, resampled + missing
        if config.dynamic_sampling:
            counts["groups_resampled"] = resampled
        if self._replay is not None:
            self._replay.add(collected.trajectories)
            counts[SIZE] = self._replay.size
        return collected, replayed, {name: float(count) for name, count in counts.items()}

    async def _shaped(
        self, training: Training, trajectories: Sequence[Trajectory], target: str | None
    ) -> tuple[Sequence[Trajectory], dict[str, float]]:
        """The trajectories with the rewards that they are learned from."""
        trajectories, metrics = shape_rewards(trajectories, self.config, target)
        if (coefficient := self.config.kl_in_reward) and trajectories:
            reference = self.config.reference
            trajectories, own = await with_kl_penalty(training, trajectories, coefficient, reference, target)
            metrics |= own
        return trajectories, metrics

    def rejections(self, trajectories: Sequence[Trajectory], target_agent: str | None = None) -> list[Rejection]:
        """The rollouts that it cannot learn from: all of them if they hold no call of the policy, or none of the agents
        to train."""
        found = rejections(trajectories, self._credit.assignment, target_agent=target_agent)
        rejected = {each.rollout_id for each in found}
        left = [trajectory for trajectory in trajectories if trajectory.rollout_id not in rejected]
        agents = {call.agent for trajectory in left for call in trajectory.transitions}
        if not agents:
            return [*found, *without_calls(left)]
        if any(is_target(agent, target_agent) for agent in agents):
            return found
        return [*found, *without_target(left, str(target_agent), agents)]
