"""Validation of recorded model calls: a call whose tokens no policy can have sampled is not trained on.

It runs for every call, so tokens are examined one by one only after a check of all of them has failed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning import span as names
from agentlightning.util.kept_sets import KeptSets

LEAST_LOGPROB = -104.0
"""The smallest positive number of float32 is e^-103.3: no token is sampled with less."""
_ROUNDING = 1e-3
"""By how much a log-probability may exceed 0."""


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """Limits of the policy that is to be trained; None: unknown."""

    vocabulary: int | None = None
    """Token ids are smaller than this."""
    context: int | None = None
    """The most tokens of a prompt and its response together."""


NO_LIMITS = TokenLimits()


def has_tokens(attributes: Mapping[str, Any]) -> bool:
    """Whether a call has prompt ids, sampled ids and one log-probability for each sampled id."""
    prompt, sampled, logprobs = (attributes.get(name) or () for name in names.TOKEN_ATTRIBUTES)
    if not all(isinstance(part, list | tuple) for part in (prompt, sampled, logprobs)):
        return False
    return bool(prompt) and 0 < len(sampled) == len(logprobs)


def find_defect(attributes: Mapping[str, Any], limits: TokenLimits) -> str:
    """Why the record of a call that has tokens cannot be true; "" if it can."""
    prompt, sampled, logprobs = (attributes[name] for name in names.TOKEN_ATTRIBUTES)
    return (
        _defect_in_ids(names.PROMPT_TOKEN_IDS, prompt, limits)
        or _defect_in_ids(names.RESPONSE_TOKEN_IDS, sampled, limits)
        or _defect_in_length(len(prompt) + len(sampled), limits)
        or _defect_in_logprobs(logprobs)
        or _defect_in_numbers(attributes)
        or _defect_in_kept_sets(attributes.get(names.KEPT_SETS), sampled, limits)
    )


def _defect_in_ids(name: str, ids: Sequence[Any], limits: TokenLimits) -> str:
    if set(map(type, ids)) != {int}:
        return f"{name} holds {next(item for item in ids if type(item) is not int)!r:.80}, which is no token id"
    last = 2**31 if limits.vocabulary is None else limits.vocabulary
    if min(ids) >= 0 and max(ids) < last:
        return ""
    return f"{name} holds {next(item for item in ids if not 0 <= item < last)}; ids are from 0 to {last - 1}"


def _defect_in_length(count: int, limits: TokenLimits) -> str:
    if limits.context is None or count <= limits.context:
        return ""
    return f"it has {count} tokens, more than the {limits.context} that the policy takes"


def _defect_in_logprobs(logprobs: Sequence[Any]) -> str:
    numbers = set(map(type, logprobs)) <= {float, int}
    within = numbers and min(logprobs) >= LEAST_LOGPROB and max(logprobs) <= _ROUNDING
    if within and not math.isnan(sum(logprobs)):
        return ""
    bad = next(item for item in logprobs if not _is_within(item, LEAST_LOGPROB, _ROUNDING))
    return f"{names.LOGPROBS} holds {bad!r:.80}; a sampled token has one from {LEAST_LOGPROB:g} to 0"


def _defect_in_numbers(attributes: Mapping[str, Any]) -> str:
    for name, low, high in _NUMBERS:
        value = attributes.get(name)
        if value is not None and not _is_within(value, low, high):
            return f"{name}={value!r:.80} is no number from {low:g} to {high:g}"
    return ""


def _defect_in_kept_sets(text: Any, sampled: Sequence[int], limits: TokenLimits) -> str:
    if text is None:
        return ""
    if not isinstance(text, str):
        return f"{names.KEPT_SETS} is {text!r:.80}, which is no text"
    import numpy as np  # Here, because a machine that only serves or runs agents need not have it.

    try:
        sets = KeptSets.from_text(text, len(sampled))
    except ValueError as error:
        return f"{names.KEPT_SETS} cannot be read: {error}"
    sizes, ids = sets.size_array(), sets.id_array()
    last = 2**31 if limits.vocabulary is None else limits.vocabulary
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < last:
        return f"{names.KEPT_SETS} holds ids from {ids.min()} to {ids.max()}; ids are from 0 to {last - 1}"
    position = np.repeat(np.arange(len(sizes)), sizes)
    holding = np.unique(position[ids == np.array(sampled)[position]])
    if missing := sorted(set(np.flatnonzero(sizes).tolist()) - set(holding.tolist())):
        return f"{names.KEPT_SETS} lacks {sampled[missing[0]]}, the token sampled at position {missing[0]}"
    return ""


_NUMBERS = (
    (names.REQUEST_TEMPERATURE, 0.0, 1e6),
    (names.REQUEST_TOP_P, 0.0, 1.0),
    (names.REQUEST_TOP_K, -1.0, 2.0**31),
    (names.POLICY_VERSION, 0.0, 2.0**53),
)
"""Sampling parameters, and their smallest and largest value."""


def _is_within(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
