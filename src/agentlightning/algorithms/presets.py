"""Presets of LightningRL: the settings that published algorithms consist of, by name.

A preset fills in the settings that are not given; those that are given win. The configuration of a run shows the
settings in effect. All but `dapo` keep groups whose rewards are all equal, as their papers do.

    grpo        Shao et al. 2024, arXiv:2402.03300, section 4.1: clipped ratio and k3 divergence from the reference
    dr_grpo     Liu et al. 2025, arXiv:2503.20783: no division by the standard deviation or by the length of a response
    dapo        Yu et al. 2025, arXiv:2503.14476: clip-higher, dynamic sampling, groups with equal rewards filtered,
                tokens of equal weight; `overlong`, which depends on the task, is left to you
    gspo        Zheng et al. 2025, arXiv:2507.18071: one ratio for each rollout
    cispo       MiniMax 2025, arXiv:2506.13585: the clipped ratio as a weight
    sapo        Gao et al. 2025, arXiv:2511.20347: a smooth gate in place of a clip
    dppo        arXiv:2602.04879: a mask by the change of probability, advantages as in Dr. GRPO
    reinforce++ Hu et al. 2025, arXiv:2501.03262: rewards less a divergence, normalised over the batch, clipped ratio
    rloo        Ahmadian et al. 2024, arXiv:2402.14740: leave-one-out baseline, REINFORCE, whole responses as actions
    loop        Chen et al. 2025, arXiv:2502.01600: leave-one-out baseline, clipped ratio, one model in memory
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from agentlightning.errors import ConfigError

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


def expanded(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with those of their preset that are not among them. Raises ConfigError for an unknown preset."""
    name = settings.get("preset")
    if name in (None, "none"):
        return dict(settings)
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}; choose one of {', '.join(PRESETS)}")
    given = {"credit": ...} if "credit_assignment" in settings else {}  # Another name of the same setting.
    return {**{field: value for field, value in PRESETS[name].items() if field not in given}, **settings}
