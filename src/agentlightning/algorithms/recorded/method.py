"""How an algorithm for rollouts of the present policy learns from sessions that were recorded earlier.

    importance   the policy gradient, each token weighed by a clipped importance ratio without gradient (CISPO,
                 arXiv:2506.13585, equations 4 and 5): needs the log-probability each token was sampled with
    awr          advantage-weighted regression (arXiv:1910.00177, equation 3): needs rewards that differ
    rejection    rejection sampling fine-tuning (arXiv:2308.01825): imitates the successful sessions, and needs some

The clip of PPO is for data of the present policy: beyond its bounds a token has no gradient, so that sessions of
another policy would soon teach nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.credit.base import SMALLEST_SPREAD, spread
from agentlightning.errors import ConfigError, DatasetError
from agentlightning.policy.losses import SAMPLED_LOGPROBS, AWRLoss, CISPOLoss, TokenLoss

Method: TypeAlias = Literal["importance", "awr", "rejection"]
MethodSetting: TypeAlias = Literal["auto", "importance", "awr", "rejection"]
METHODS: Final = ("auto", "importance", "awr", "rejection")
NAMES: Final = {
    "importance": "importance-weighted policy gradient",
    "awr": "advantage-weighted regression",
    "rejection": "rejection sampling fine-tuning",
}


@dataclass(frozen=True, slots=True)
class DataCounts:
    """What sessions have to learn from."""

    sessions: int
    """Those with a reward, in tokens of the model."""
    logprobs: int
    """Those whose calls have the log-probabilities they were sampled with."""
    groups: int
    groups_with_spread: int
    """Tasks whose sessions differ in reward."""
    successful: int
    """Sessions with at least the reward that counts as success."""

    @classmethod
    def of(cls, groups: Sequence[Sequence[float]], logprobs: int, threshold: float) -> DataCounts:
        """`groups`: the rewards of each task's sessions."""
        rewards = [reward for group in groups for reward in group]
        varied = sum(spread(group) > SMALLEST_SPREAD for group in groups if group)
        return cls(len(rewards), logprobs, len(groups), varied, sum(reward >= threshold for reward in rewards))


def choose(setting: MethodSetting, counts: DataCounts, threshold: float) -> Method:
    """The method that the data has what it needs for. Raises DatasetError, saying what is missing."""
    if setting not in METHODS:
        raise ConfigError(f"method={setting!r} is none; choose one of {', '.join(METHODS)}")
    if counts.sessions == 0:
        raise DatasetError(
            "no session has a reward, so nothing says which to learn from; emit rewards with agl.emit_reward, or score"
            " recorded sessions with `agl rescore`"
        )
    if setting == "importance" and not counts.logprobs:
        raise DatasetError(
            f'method="importance" needs log-probabilities of the sampler, and none of {counts.sessions} sessions has'
            ' them in tokens of this model: record through the gateway with this model, or use method="awr"'
        )
    if setting in ("importance", "awr") and not counts.groups_with_spread:
        raise DatasetError(
            f'method="{setting}" learns from differences in reward, and the sessions of each of {counts.groups} tasks'
            ' have the same one; record more of the same task, or use method="rejection"'
        )
    if setting != "auto" and (setting != "rejection" or counts.successful):
        return setting
    if setting == "auto" and counts.groups_with_spread:
        return "importance" if counts.logprobs * 2 >= counts.sessions else "awr"
    if counts.successful:
        return "rejection"
    raise DatasetError(
        f"the sessions of each of {counts.groups} tasks have the same reward, and none of {counts.sessions} has"
        f" {threshold:g} or more: there is nothing to prefer. Record sessions that differ, or lower success_threshold"
    )


def for_recorded(algorithm: LightningRL, method: Method, target_agent: str | None, steps: int | None) -> LightningRL:
    """The algorithm with the loss of a method, unless a loss that fits was set; it shares nothing with the original."""
    changes: dict[str, Any] = {}
    fits = _fits(algorithm.config.losses, method)
    if not (fits and "loss" in algorithm.config.model_fields_set):
        changes["loss"] = CISPOLoss() if method == "importance" else AWRLoss()
    if method != "importance":
        changes["mismatch"] = None
    if target_agent is not None:
        changes["target_agent"] = target_agent
    if steps is not None:
        changes["steps"] = steps
    found = copy.copy(algorithm)
    LightningRL.__init__(found, algorithm.config, **changes)
    found.objective = "reinforcement" if method == "importance" else "supervised"
    return found


def _fits(losses: Sequence[TokenLoss], method: Method) -> bool:
    needs_sampler = any(SAMPLED_LOGPROBS in loss.needs for loss in losses)
    return needs_sampler if method == "importance" else not needs_sampler
