"""The proximal policy of losses with a ratio: what the ratio of a token is against, and is clipped around.

Decoupled PPO (Hilton et al. 2022, "Batch size-invariance for policy optimization", arXiv:2110.00641, section 3) takes
the ratio against a policy that is near the one being trained, and weighs a token by what lies between it and the policy
that sampled the token, so that older rollouts are neither clipped for their age nor biased:

    behavior      prox = sampled                           the ratio is against the recorded log-probabilities
    pass          prox = log p under the weights that the update starts from, by one forward pass
    interpolate   prox = sampled + a (logprob - sampled),   a = (v_prox - v_sampled) / (v_theta - v_sampled)

The weight is exp(prox - sampled), corrected as `policy.mismatch` says. Interpolation (Fu et al. 2025, AReaL,
arXiv:2505.24298, and its log-linear approximation) needs no pass: v_theta is the version that the update makes,
v_prox = v_theta - 1 the one that it starts from, v_sampled that of the token, and no gradient flows through prox. A
token of the present version has a = 0. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from agentlightning.errors import ConfigError, PolicyError
from agentlightning.policy.losses import TokenLoss
from agentlightning.policy.mismatch import Correction, MismatchSetting, corrections, is_off
from agentlightning.trajectory import FloatArray, TokenTree

Proximal: TypeAlias = Literal["behavior", "pass", "interpolate"]
"""The setting `proximal`."""


def check_proximal(proximal: Proximal | None, losses: Sequence[TokenLoss], mismatch: MismatchSetting | None) -> None:
    """Raises ConfigError for a proximal policy that no loss uses, or that contradicts `mismatch`."""
    several = () if mismatch is None else corrections(mismatch)
    if proximal == "behavior" and not is_off(several):
        raise ConfigError(
            'proximal="behavior" computes no log-probabilities for mismatch to compare with; use proximal="pass", or '
            "leave mismatch out"
        )
    if proximal not in ("pass", "interpolate"):
        return
    if not any(loss.decoupled for loss in losses):
        names = ", ".join(f'"{loss.type}"' for loss in losses)
        raise ConfigError(f'proximal="{proximal}" is used by none of the losses {names}; leave it out, or use ppo')
    if proximal == "interpolate":
        check_token_level(several)


def check_token_level(several: Sequence[Correction]) -> None:
    """Raises ConfigError for corrections of whole rollouts, whose tokens are not all known in a micro-batch."""
    for each in several:
        if each.of_rollout:
            raise ConfigError(
                f'proximal="interpolate" is known in the forward pass only, where mismatch "{each.type}" over whole '
                'rollouts cannot be computed; use proximal="pass", or truncate (level="token") or icepop'
            )


def interpolations(tree: TokenTree, version: int, updates_of: Callable[[int], int] = int) -> tuple[FloatArray, ...]:
    """For each node, `a` of its tokens, where the update starts from weights of this version; empty for prompts.
    `updates_of` counts the updates behind a version, which resumes raise too.

    Raises PolicyError for a token whose version is not recorded."""
    import numpy as np

    found: list[FloatArray] = []
    for node in tree.nodes:
        if node.sampled and node.policy_version is None:
            raise PolicyError(
                f"call {node.call} of rollout {node.rollout_id} has no policy_version to interpolate from; use "
                'proximal="pass"'
            )
        age = max(0, updates_of(version) - updates_of(node.policy_version or 0)) if node.sampled else 0
        found.append(np.full(len(node.token_ids) if node.sampled else 0, age / (age + 1), np.float32))
    return tuple(found)
