"""What is added to the reward of a rollout before credit is assigned: a penalty for its length, and one for its
distance from a reference.

    R'_i = R_i + penalty * L(n_i) - beta * sum_t ( logprob_t - ref_logprob_t )            over the n_i sampled tokens

    L(n) = 0 if n <= max_tokens - buffer;  (max_tokens - buffer - n) / buffer up to max_tokens;  -1 above

L is the soft overlong punishment of DAPO (Yu et al. 2025, arXiv:2503.14476, equation 13); the KL term is that of
reinforcement learning from human feedback (Ouyang et al. 2022, arXiv:2203.02155, equation 2), estimated at the recorded
tokens (k1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentlightning.algorithms.columns import Models, scores
from agentlightning.algorithms.training import Training
from agentlightning.assemble import shared_calls, token_tree
from agentlightning.credit import group_trajectories, is_target
from agentlightning.credit.agent_rewards import team_score
from agentlightning.policy.losses import REF_LOGPROBS
from agentlightning.trajectory import FloatArray, TokenTree, Trajectory


class OverlongPenalty(BaseModel):
    """A penalty for rollouts with too many sampled tokens, which grows from 0 over the last `buffer` tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    max_tokens: int = Field(ge=1)
    """Sampled tokens of a rollout from which the whole penalty applies."""
    buffer: int = Field(ge=1)
    """The number of tokens before these over which it grows."""
    penalty: float = Field(default=1.0, gt=0)
    """What is taken from the reward of a rollout that is too long."""

    @model_validator(mode="after")
    def _check_buffer(self) -> OverlongPenalty:
        if self.buffer > self.max_tokens:
            raise ValueError(f"buffer={self.buffer} is longer than max_tokens={self.max_tokens}; make it shorter")
        return self

    def of_length(self, tokens: int) -> float:
        """What is added to the reward, 0 or negative."""
        free = self.max_tokens - self.buffer
        return self.penalty * max(-1.0, min(0.0, (free - tokens) / self.buffer))


def with_overlong_penalty(
    trajectories: Sequence[Trajectory],
    setting: OverlongPenalty,
    target_agent: str | None = None,
    weights: Mapping[str, float] | None = None,
) -> tuple[list[Trajectory], dict[str, float]]:
    """The trajectories with the penalty in their rewards, and its mean and the number of rollouts it applies to."""
    penalties = [setting.of_length(sampled_tokens(each, target_agent)) for each in trajectories]
    shaped = [_add(each, penalty, weights) for each, penalty in zip(trajectories, penalties, strict=True)]
    return shaped, {
        "overlong_penalty": _mean(penalties),
        "overlong_rollouts": float(sum(penalty < 0 for penalty in penalties)),
    }


async def with_kl_penalty(
    training: Training,
    trajectories: Sequence[Trajectory],
    coefficient: float,
    models: Models,
    target_agent: str | None = None,
    weights: Mapping[str, float] | None = None,
) -> tuple[list[Trajectory], dict[str, float]]:
    """The trajectories with `coefficient` times their divergence from the reference taken from their rewards, and the
    mean divergence of a rollout in nats."""
    groups = group_trajectories(trajectories)
    trees = [token_tree(group) for group in groups]
    columns = await scores(training, trees, REF_LOGPROBS, models)
    by_call: dict[tuple[str, str], float] = {}
    for tree, column in zip(trees, columns, strict=True):
        by_call |= divergences(tree, column, target_agent)
    shared = {call: first for group in groups for call, first in shared_calls(group).items()}
    keys = [[(call.rollout_id, call.span_id) for call in each.transitions] for each in trajectories]
    divergence = [sum(by_call.get(shared.get(key, key), 0.0) for key in own) for own in keys]
    shaped = [_add(each, -coefficient * own, weights) for each, own in zip(trajectories, divergence, strict=True)]
    return shaped, {"reward_kl": _mean(divergence)}


def divergences(
    tree: TokenTree, reference: tuple[FloatArray, ...], target_agent: str | None = None
) -> dict[tuple[str, str], float]:
    """sum_t (logprob_t - ref_logprob_t) over the sampled tokens of each call, by (rollout_id, span_id)."""
    found: dict[tuple[str, str], float] = {}
    for node, values in zip(tree.nodes, reference, strict=True):
        if node.sampled and is_target(node.agent, target_agent):
            call = str(node.rollout_id), str(node.call)
            found[call] = found.get(call, 0.0) + sum(node.logprobs) - float(values.sum(dtype="float64"))
    return found


def sampled_tokens(trajectory: Trajectory, target_agent: str | None = None) -> int:
    """The number of tokens that the agents to train sampled."""
    calls = trajectory.transitions
    return sum(len(call.response_token_ids) for call in calls if is_target(call.agent, target_agent))


def _add(trajectory: Trajectory, change: float, weights: Mapping[str, float] | None) -> Trajectory:
    reward = team_score(trajectory, weights)
    return trajectory if reward is None or not change else replace(trajectory, reward=reward + change)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / max(1, len(numbers))
