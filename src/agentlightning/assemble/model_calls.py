"""The model calls among an attempt's spans, as transitions: those that count, whose tokens are known and plausible."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from agentlightning import span as names
from agentlightning.span import Span, counts
from agentlightning.trajectory import Transition
from agentlightning.util.kept_sets import KeptSets

CALL_OPERATIONS = frozenset({"chat", "text_completion", "generate_content"})
"""Values of `gen_ai.operation.name` that mean a model call."""


# -- validation --------------------------------------------------------------------------------------------------------

# Validation of recorded model calls: a call whose tokens no policy can have sampled is not trained on.
#
# It runs for every call, so tokens are examined one by one only after a check of all of them has failed.

LEAST_LOGPROB = -104.0
"""The smallest positive number of float32 is e^-103.3: no token is sampled with less."""
_ROUNDING = 1e-3
"""By how much a log-probability may exceed 0."""


class TokenLimits(NamedTuple):
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
    return next(_defects(attributes, limits), "")


def _defects(attributes: Mapping[str, Any], limits: TokenLimits) -> Iterator[str]:
    """What is wrong. Each check relies on those before it, so only the first is sure."""
    prompt, sampled, logprobs = (attributes[name] for name in names.TOKEN_ATTRIBUTES)
    last = 2**31 if limits.vocabulary is None else limits.vocabulary
    for name, ids in ((names.PROMPT_TOKEN_IDS, prompt), (names.RESPONSE_TOKEN_IDS, sampled)):
        if set(map(type, ids)) != {int}:
            yield f"{name} holds {next(item for item in ids if type(item) is not int)!r:.80}, which is no token id"
        if min(ids) < 0 or max(ids) >= last:
            yield f"{name} holds {next(item for item in ids if not 0 <= item < last)}; ids are from 0 to {last - 1}"
    count = len(prompt) + len(sampled)
    if limits.context is not None and count > limits.context:
        yield f"it has {count} tokens, more than the {limits.context} that the policy takes"
    numbers = set(map(type, logprobs)) <= {float, int}
    within = numbers and min(logprobs) >= LEAST_LOGPROB and max(logprobs) <= _ROUNDING
    if not within or math.isnan(sum(logprobs)):
        bad = next(item for item in logprobs if not _is_within(item, LEAST_LOGPROB, _ROUNDING))
        yield f"{names.LOGPROBS} holds {bad!r:.80}; a sampled token has one from {LEAST_LOGPROB:g} to 0"
    for name, low, high in _NUMBERS:
        value = attributes.get(name)
        if value is not None and not _is_within(value, low, high):
            yield f"{name}={value!r:.80} is no number from {low:g} to {high:g}"
    if (kept := attributes.get(names.KEPT_SETS)) is not None:
        yield from _defects_of_kept_sets(kept, sampled, last)


def _defects_of_kept_sets(text: Any, sampled: Sequence[int], last: int) -> Iterator[str]:
    import numpy as np  # Here, because a machine that only serves or runs agents need not have it.

    if not isinstance(text, str):
        yield f"{names.KEPT_SETS} is {text!r:.80}, which is no text"
    try:
        sets = KeptSets.from_text(text, len(sampled))
    except ValueError as error:
        yield f"{names.KEPT_SETS} cannot be read: {error}"
        return
    sizes, ids = sets.size_array(), sets.id_array()
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < last:
        yield f"{names.KEPT_SETS} holds ids from {ids.min()} to {ids.max()}; ids are from 0 to {last - 1}"
    position = np.repeat(np.arange(len(sizes)), sizes)
    holding = np.unique(position[ids == np.array(sampled)[position]])
    if missing := sorted(set(np.flatnonzero(sizes).tolist()) - set(holding.tolist())):
        yield f"{names.KEPT_SETS} lacks {sampled[missing[0]]}, the token sampled at position {missing[0]}"


_NUMBERS = (
    (names.REQUEST_TEMPERATURE, 0.0, 1e6),
    (names.REQUEST_TOP_P, 0.0, 1.0),
    (names.REQUEST_TOP_K, -1.0, 2.0**31),
    (names.POLICY_VERSION, 0.0, 2.0**53),
)
"""Sampling parameters, and their smallest and largest value."""


def _is_within(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


# -- calls -------------------------------------------------------------------------------------------------------------


def calls(spans: Iterable[Span]) -> list[Span]:
    """The model calls that count, by sequence number. Superseded and failed calls do not, nor do those whose response
    was lost, so that the agent sent the request again."""
    counted = sorted((span for span in spans if is_call(span) and not has_failed(span)), key=lambda s: s.sequence_id)
    lost = _lost_responses(counted)
    return [span for span in counted if span.span_id not in lost] if lost else counted


def is_call(span: Span) -> bool:
    """Whether a span is a model call of the agent."""
    operation = span.attributes.get(names.OPERATION_NAME)
    return isinstance(operation, str) and operation in CALL_OPERATIONS and names.JUDGE not in span.attributes


def model_of(span: Span) -> str | None:
    """The model that answered."""
    model = span.attributes.get(names.RESPONSE_MODEL)
    return model if isinstance(model, str) else None


def has_failed(span: Span) -> bool:
    """Whether a span does not count, or ended with an error."""
    return not counts(span) or span.status_code == "ERROR" or names.ERROR_TYPE in span.attributes


def _lost_responses(counted: Sequence[Span]) -> set[str]:
    """span_ids of responses to a request that was sent again. If the same request had several responses before, any of
    them may be the lost one, so all of them stay."""
    responses: dict[tuple[str, str], dict[str, list[str]]] = {}
    lost: set[str] = set()
    for span in counted:
        request = span.attributes.get(names.REQUEST)
        if not isinstance(request, str):
            continue
        known = responses.setdefault((span.attempt_id, request), {})
        response = str(span.attributes.get(names.RESPONSE_ID, span.span_id))
        again = request.startswith(names.SENT_ONCE) or bool(span.attributes.get(names.RETRIES))
        if again and len(known) == 1 and response not in known:
            lost.update(known.popitem()[1])
        known.setdefault(response, []).append(span.span_id)
    return lost


def transition(span: Span) -> Transition:
    """A call that has tokens."""
    attributes = span.attributes
    reasons, agent, version, messages = (
        attributes.get(name)
        for name in (names.FINISH_REASONS, names.AGENT_NAME, names.POLICY_VERSION, names.INPUT_MESSAGES)
    )
    return Transition(
        rollout_id=span.rollout_id,
        attempt_id=span.attempt_id,
        span_id=span.span_id,
        sequence_id=span.sequence_id,
        prompt_token_ids=tuple(attributes[names.PROMPT_TOKEN_IDS]),
        response_token_ids=tuple(attributes[names.RESPONSE_TOKEN_IDS]),
        logprobs=tuple(attributes[names.LOGPROBS]),
        policy_version=None if version is None else int(version),
        versions=_versions(attributes),
        agent=agent if isinstance(agent, str) else None,
        temperature=_number(attributes, names.REQUEST_TEMPERATURE, 1.0),
        top_p=_number(attributes, names.REQUEST_TOP_P, 1.0),
        top_k=int(_number(attributes, names.REQUEST_TOP_K, 0)),
        kept_sets=_kept_sets(attributes),
        reshaped=tuple(map(str, _items(attributes.get(names.RESHAPED)))),
        finish_reason=str(next(iter(_items(reasons)), "stop")),
        model=model_of(span),
        replays=_replays(attributes),
        input_messages=messages if isinstance(messages, str) else None,
    )


def _items(value: Any) -> Sequence[Any]:
    return cast("Sequence[Any]", value) if isinstance(value, list | tuple) else () if value is None else (value,)


def _versions(attributes: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """(version of the weights, tokens it sampled); empty if these do not add up to the span's tokens."""
    numbers = _items(attributes.get(names.POLICY_VERSIONS))
    if not all(isinstance(number, int) for number in numbers) or len(numbers) % 2:
        return ()
    runs = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    counts = [count for _, count in runs]
    return runs if min(counts, default=0) > 0 and sum(counts) == len(attributes[names.RESPONSE_TOKEN_IDS]) else ()


def _kept_sets(attributes: Mapping[str, Any]) -> KeptSets | None:
    """None also for what cannot be read, which `find_defect` names."""
    text = attributes.get(names.KEPT_SETS)
    try:
        return KeptSets.from_text(text, len(attributes[names.RESPONSE_TOKEN_IDS])) if isinstance(text, str) else None
    except ValueError:
        return None


def _replays(attributes: Mapping[str, Any]) -> tuple[str, str] | None:
    ids = _items(attributes.get(names.REPLAYS))
    return (str(ids[0]), str(ids[1])) if len(ids) == 2 else None


def _number(attributes: Mapping[str, Any], name: str, default: float) -> float:
    value = attributes.get(name)
    return float(default if value is None else value)
