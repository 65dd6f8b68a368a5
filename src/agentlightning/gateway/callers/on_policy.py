"""Sampling of training rollouts: what an agent asks for that would keep the policy from learning is not followed.

A `seed` makes all rollouts of a group equal, so that no answer is better than another; top_p, top_k, min_p, penalties
and biases draw from another distribution than the one a trainer computes; at temperature 0 nothing is explored. In
rollouts of the mode train these parameters have the neutral values below, unless the rollout's LLM resource sets them.
Called by the gateway for each call of a model that learns; the caller's parameters hold for everything else. What was
overridden is named in the log once, on the span (`span.OVERRIDDEN`), and counted.
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
"""Fields of `SamplingParams`, and the values that change nothing."""
_WIRE_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "seed": (),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "temperature": (),
}
"""Fields of a request, and the values with which they may stay."""


def is_policy(context: AttemptContext, model: str) -> bool:
    """Whether a model is what a rollout is about: its resources name it, or no model at all."""
    return not context.llms or model in context.llms


def is_training(context: AttemptContext, url_mode: str | None, model: str) -> bool:
    """Whether somebody is to learn from a call. `url_mode` (1.0) counts where the rollout has no mode."""
    return (context.mode or url_mode) == "train" and is_policy(context, model)


class OnPolicySampling:
    """Applies the rule, and reports each name once."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._named: set[str] = set()

    def neutral_params(self, params: SamplingParams) -> SamplingParams:
        """`params` as a training rollout is sampled with, before its LLM resource is heard."""
        warm = {"temperature": 1.0} if params.temperature == 0 else {}
        return replace(params, **NEUTRAL, **warm)

    def strip_request(self, asked: Mapping[str, Any], forced: Mapping[str, Any]) -> dict[str, Any]:
        """A request on the wire, without what is not followed. `forced` says what the LLM resource sets."""
        kept = dict(asked)
        for name, neutral in _WIRE_NEUTRAL.items():
            value = kept.get(name)
            warm = name == "temperature" and (name in forced or value != 0)
            if value is not None and value not in neutral and not warm:
                del kept[name]
        self._report(tuple(name for name in asked if name not in kept))
        return kept

    def report_overridden(self, asked: SamplingParams, used: SamplingParams) -> tuple[str, ...]:
        """Names of what the request asked for and did not get, counted."""
        changed = tuple(
            name
            for name, default in ({"temperature": 1.0} | dict(NEUTRAL)).items()
            if getattr(asked, name) not in (getattr(used, name), default)
        )
        self._report(changed)
        return changed

    def _report(self, changed: tuple[str, ...]) -> None:
        self._counters.overridden += bool(changed)
        if fresh := [name for name in changed if name not in self._named]:
            self._named.update(fresh)
            logger.warning(
                "agents set %s in training rollouts; this is not followed, since learning needs samples of the policy "
                "itself (evaluation follows it); set it in the sampling_parameters of the LLM resource if you mean it",
                ", ".join(fresh),
            )
