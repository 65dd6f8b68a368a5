"""Overrides sampling parameters in training rollouts that would keep the policy from learning.

A `seed` makes all rollouts of a group equal, so that none is better than another; top_p, top_k, min_p, penalties and
biases sample from another distribution than the one a trainer computes; temperature 0 explores nothing. In rollouts of
the mode train these parameters have the neutral values below, unless the rollout's LLM resource sets them. All other
calls are sampled with the caller's parameters. Overridden parameters are logged once, recorded on the span
(`span.OVERRIDDEN`) and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from agentlightning.engine.base import SamplingParams
from agentlightning.gateway.callers.attempts import AttemptContext
from agentlightning.gateway.metrics import Counters

logger = logging.getLogger(__name__)

NEUTRAL: Final[Mapping[str, Any]] = {
    "seed": None,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": (),
    "repetition_penalty": 1.0,
    "min_tokens": 0,
}
"""Fields of `SamplingParams` -> neutral values."""
_WIRE_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    **{name: () if value is None else (value,) for name, value in NEUTRAL.items()},
    "top_k": (0, -1),
    "logit_bias": ({},),
    "temperature": (),
}
"""Fields of a request -> values that need no override."""


def is_policy(context: AttemptContext, model: str) -> bool:
    """Whether a model is the policy of a rollout: its resources name this model, or none at all."""
    return not context.llms or model in context.llms


def is_training(context: AttemptContext, url_mode: str | None, model: str) -> bool:
    """Whether a call is for training. `url_mode` (1.0) counts if the rollout has no mode."""
    return (context.mode or url_mode) == "train" and is_policy(context, model)


class OnPolicySampling:
    """Overrides sampling parameters, and logs each name once."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._logged: set[str] = set()

    def neutral_params(self, params: SamplingParams) -> SamplingParams:
        """The parameters of a training rollout, before its LLM resource is applied."""
        warm = {"temperature": 1.0} if params.temperature == 0 else {}
        return replace(params, **NEUTRAL, **warm)

    def strip_request(self, request: Mapping[str, Any], forced: Mapping[str, Any]) -> dict[str, Any]:
        """A request without the overridden parameters. `forced` are those that the LLM resource sets."""
        stripped = dict(request)
        for name, neutral in _WIRE_NEUTRAL.items():
            value = stripped.get(name)
            warm = name == "temperature" and (name in forced or value != 0)
            if value is not None and value not in neutral and not warm:
                del stripped[name]
        self._report(tuple(name for name in request if name not in stripped))
        return stripped

    def report_overridden(self, requested: SamplingParams, used: SamplingParams) -> tuple[str, ...]:
        """Count the overridden parameters of a request, and return their names."""
        changed = tuple(
            name
            for name, default in ({"temperature": 1.0} | dict(NEUTRAL)).items()
            if getattr(requested, name) not in (getattr(used, name), default)
        )
        self._report(changed)
        return changed

    def _report(self, changed: tuple[str, ...]) -> None:
        self._counters.overridden += bool(changed)
        if new := [name for name in changed if name not in self._logged]:
            self._logged.update(new)
            logger.warning(
                "agents set %s in training rollouts; this is overridden, since learning needs samples of the policy "
                "itself (evaluation uses it); set it in the sampling_parameters of the LLM resource to force it",
                ", ".join(new),
            )
