"""From spans to what an algorithm learns from: transitions, trajectories, token trees.

Pure functions over spans that were already read; they do no I/O and know no store. Trajectory readers call `trajectory`
for every rollout and hand groups of them to `agentlightning.credit`, which calls `token_tree`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

from agentlightning import span as names
from agentlightning.errors import RewardError, RolloutRejectedError
from agentlightning.span import MAX_REWARD, Span, counts, usable_reward
from agentlightning.trajectory import CallId, Node, Reward, Step, TokenTree, Trajectory, Transition, add_rewards
from agentlightning.util.common_prefix import common_prefix_length
from agentlightning.util.json_values import dumps, recorded_objects
from agentlightning.util.kept_sets import KeptSets

# The model calls among an attempt's spans, as transitions: those that count, whose tokens are known and plausible.

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


# -- agent steps -----------------------------------------------------------------------------------------------------

# What an agent did between its model calls: tool calls, and errors.

TOOL_OPERATION = "execute_tool"
"""Value of `gen_ai.operation.name` that means a tool call."""


def steps(spans: Iterable[Span]) -> tuple[Step, ...]:
    """The tool calls and errors that count, by sequence number: failed model calls and recorded exceptions are errors.
    What a reward function recorded is no part of it."""
    own = (span for span in spans if counts(span) and names.JUDGE not in span.attributes)
    found = (_step(span) for span in sorted(own, key=lambda span: span.sequence_id))
    return tuple(step for step in found if step is not None)


def _step(span: Span) -> Step | None:
    error = _error(span)
    attributes = span.attributes
    if attributes.get(names.OPERATION_NAME) == TOOL_OPERATION:
        return Step(
            kind="tool",
            name=str(attributes.get(names.TOOL_NAME, span.name)),
            span_id=span.span_id,
            sequence_id=span.sequence_id,
            arguments=attributes.get(names.TOOL_ARGUMENTS),
            result=attributes.get(names.TOOL_RESULT),
            error=error,
        )
    if error is None or not (is_call(span) or span.name == names.EXCEPTION):
        return None
    return Step(kind="error", name=span.name, span_id=span.span_id, sequence_id=span.sequence_id, error=error)


def _error(span: Span) -> str | None:
    """What went wrong in a span; None where nothing did."""
    attributes = span.attributes
    kind: Any = attributes.get(names.EXCEPTION_TYPE) or attributes.get(names.ERROR_TYPE)
    if kind is None and span.status_code != "ERROR":
        return None
    message = span.status_message or attributes.get(names.EXCEPTION_MESSAGE)
    return str(message or kind or "error")


# -- rewards ---------------------------------------------------------------------------------------------------------

# The rewards among an attempt's spans: what each belongs to, and one number from named dimensions.


@dataclass(frozen=True, slots=True)
class RewardLinks:
    """Where the rewards of one attempt belong."""

    final: Reward | None
    """None: missing."""
    intermediate: dict[str, Reward]
    """By span_id of the call each follows."""
    unlinked: int = 0
    """Earlier rewards that came before the first call."""
    agents: dict[str, Reward] = field(default_factory=dict[str, "Reward"])
    """By name of an agent, the rewards that were emitted for it alone."""
    parts: dict[str, Reward] = field(default_factory=dict[str, "Reward"])
    """By span_id of the last call of each part, the sum of what the attempt emitted between it and the next call, the
    final reward included. Empty where this is one place, and where `agl rescore` gave the final reward."""


def link_rewards(spans: Iterable[Span]) -> RewardLinks:
    """Find what each reward belongs to.

    A reward that names an agent belongs to that agent; several for one agent add up. Of the others, the last reward
    span of an attempt, by sequence number, is the final reward of the rollout. Each earlier one is the intermediate
    reward of the last model call before it; where several follow the same call they add up, named
    dimensions name by name. A reward of `agl rescore` is the final one in place of the attempt's own; one of an AIR
    rule belongs to the call that it names. An earlier reward before the first call belongs to nothing and is counted.
    Superseded spans, those that came after the end of their attempt, and evaluations without a score (a label alone,
    say) do not count. Without a reward span, the final reward is missing (None), which is never 0.0.

    Raises RewardError for a reward that is not a usable number, and where a plain reward and named dimensions follow
    the same call.
    """
    valid = sorted((span for span in spans if counts(span)), key=lambda span: span.sequence_id)
    agents = _agent_rewards(valid)
    valid = [span for span in valid if not (is_reward(span) and names.REWARD_AGENT in span.attributes)]
    rewards = [span for span in valid if is_reward(span)]
    links: dict[str, Reward] = {}
    rescored = list(filter(_is_rescored, rewards))
    last = next((span for span in reversed(rewards) if _is_own(span)), None)
    call, unlinked = None, 0
    parts: dict[str, Reward] = {}
    counted = {span.span_id for span in calls(valid)}
    for span in valid:
        if span.span_id in counted:
            call = span.span_id
        elif is_reward(span) and span is last:
            value = read_reward(span)
            if call is not None and isinstance(links.get(call, value), dict) == isinstance(value, dict):
                parts = {**links, call: add_rewards(links.get(call), value, call)}
        elif is_reward(span) and _is_own(span):
            if call is None:
                unlinked += 1
            else:
                _add(links, call, span, "call")
    for span in automatic_rewards(rewards):
        call = str(span.attributes.get(names.AIR_CALL))
        if call in counted:
            _add(links, call, span, "call")
    final = rescored[-1] if rescored else last
    parts = {} if rescored or len(parts) < 2 else parts
    return RewardLinks(None if final is None else read_reward(final), links, unlinked, agents, parts)


def automatic_rewards(spans: Iterable[Span]) -> list[Span]:
    """The rewards that AIR rules added, by sequence number; of several that one rule gave to one span, the last."""
    newest: dict[tuple[str, str], Span] = {}
    for span in sorted(filter(_is_automatic, spans), key=lambda span: span.sequence_id):
        newest[str(span.attributes[names.AIR_RULE]), str(span.attributes.get(names.AIR_SOURCE))] = span
    return list(newest.values())


def _is_automatic(span: Span) -> bool:
    return names.AIR_RULE in span.attributes


def _is_rescored(span: Span) -> bool:
    return names.RESCORED in span.attributes


def _is_own(span: Span) -> bool:
    """Whether the attempt itself, or its reward function, recorded a reward."""
    return not _is_automatic(span) and not _is_rescored(span)


def _agent_rewards(spans: Iterable[Span]) -> dict[str, Reward]:
    found: dict[str, Reward] = {}
    for span in spans:
        agent = span.attributes.get(names.REWARD_AGENT)
        if is_reward(span) and agent is not None:
            _add(found, str(agent), span, "agent")
    return found


def is_reward(span: Span) -> bool:
    """Whether a span is an evaluation with a score; OpenTelemetry also has evaluations with a label alone."""
    scored = names.SCORE_VALUE in span.attributes or names.REWARD_VALUES in span.attributes
    return span.name == names.REWARD and scored


def read_reward(span: Span) -> Reward:
    """The value of a reward span. Raises RewardError unless it is a usable number or usable named numbers."""
    values = span.attributes.get(names.REWARD_VALUES)
    if values is None:
        return _finite(span.attributes.get(names.SCORE_VALUE), span)
    if not isinstance(values, Mapping) or not values:
        raise RewardError(
            f"reward span {span.span_id} of rollout {span.rollout_id} names no dimension; give one number"
        )
    named = cast("Mapping[Any, Any]", values)
    return {str(name): _finite(value, span) for name, value in named.items()}


def _finite(value: Any, span: Span) -> float:
    number = usable_reward(value)
    if number is None:
        raise RewardError(
            f"reward {value!r:.80} of rollout {span.rollout_id} (span {span.span_id}) is not a finite number up to "
            f"{MAX_REWARD:g}; emit a number, or emit none to mark it missing"
        )
    return number


def _add(sums: dict[str, Reward], key: str, span: Span, kind: str) -> None:
    sums[key] = add_rewards(sums.get(key), read_reward(span), f"{kind} {key}")


UNTRAINABLE_CALLS = "untrainable_calls"
"""Key of `Trajectory.metadata`: how many calls were left out because their tokens or log-probabilities are unknown."""
OTHER_MODELS = "other_models"
"""Key of `Trajectory.metadata`: how many calls were left out because the model that learns did not answer them."""
OVERRIDDEN_CALLS = "overridden_calls"
"""Key of `Trajectory.metadata`: number of calls whose requested sampling parameters were overridden."""
SEEDED_CALLS = "seeded_calls"
"""Key of `Trajectory.metadata`: number of calls that were sampled with a seed."""
UNLINKED_REWARDS = "unlinked_rewards"
"""Key of `Trajectory.metadata`: how many rewards came before the first call and were not the last one."""
AUTOMATIC_REWARDS = "automatic_rewards"
"""Key of `Trajectory.metadata`: by name of the AIR rule, the sum of the rewards it gave in the attempt."""
TURN_LIMIT = "turn_limit"
"""Key of `Trajectory.metadata`: the number of answers that the rollout might be given, where it was limited."""
TURN_LIMIT_REACHED = names.TURN_LIMIT_REACHED
"""Key of `Trajectory.metadata`: number of calls that were refused because of this limit."""
REPLAYED_CALLS = "replayed_calls"
"""Key of `Trajectory.metadata`: number of calls that were given the recorded answers of another rollout."""
REPLAY_MISMATCHES = "replay_mismatches"
"""Key of `Trajectory.metadata`: 1 if a request differed from the recorded ones before all were given."""
VOID_CALLS = "void_calls"
"""Key of `Trajectory.metadata`: how many calls were left out because their record cannot be true."""
VOID_REASON = "void_reason"
"""Key of `Trajectory.metadata`: what is wrong with the first of them."""


def trajectory(
    rollout_id: str,
    attempt_id: str,
    spans: Iterable[Span],
    group: str = "",
    model: str | None = None,
    limits: TokenLimits = NO_LIMITS,
) -> Trajectory:
    """The trajectory of one attempt, without the spans of other attempts. With a `model`,
    calls that another model answered are left out, too: a frozen reference or a provider teaches the policy nothing.
    Adapters of the model (`MODEL:ADAPTER`) count as it.

    A call whose record cannot be true (tokens beyond the `limits`, say) is left out. `metadata` has the counts
    `untrainable_calls`, `other_models`, `overridden_calls`, `seeded_calls`, `turn_limit_reached`, `replayed_calls`,
    `replay_mismatches`, `void_calls` and `unlinked_rewards` where they are not zero, the `turn_limit`, the defect of
    the first void call, and the sums of `automatic_rewards`. Whatever an agent has written, only two errors are raised:
    RewardError as `link_rewards` does, and RolloutRejectedError if every call with tokens is void or a span is damaged.
    """
    own = [span for span in spans if span.rollout_id == rollout_id and span.attempt_id == attempt_id]
    for span in own:
        if span.name == names.DAMAGED:
            raise RolloutRejectedError("damaged_spans", str(span.status_message))
    counted = calls(own)
    others = {span.span_id for span in counted if model is not None and not _answers(model_of(span), model)}
    own = [span for span in own if span.span_id not in others] if others else own
    answered = [span for span in counted if span.span_id not in others]
    known = [span for span in answered if has_tokens(span.attributes)]
    void = {span.span_id: why for span in known if (why := find_defect(span.attributes, limits))}
    learned = [transition(span) for span in known if span.span_id not in void]
    if void and not learned:
        span_id, why = next(iter(void.items()))
        message = f"none of the {len(void)} model calls of rollout {rollout_id} can be true; of span {span_id}: {why}"
        raise RolloutRejectedError("void_calls", message)
    links = link_rewards(own)
    found = {
        UNTRAINABLE_CALLS: len(answered) - len(known),
        OTHER_MODELS: len(others),
        OVERRIDDEN_CALLS: sum(names.OVERRIDDEN in span.attributes for span in answered),
        SEEDED_CALLS: sum(span.attributes.get(names.REQUEST_SEED) is not None for span in answered),
        TURN_LIMIT: max((n for span in own if isinstance(n := span.attributes.get(names.TURN_LIMIT), int)), default=0),
        TURN_LIMIT_REACHED: sum(span.attributes.get(names.ERROR_TYPE) == names.TURN_LIMIT_REACHED for span in own),
        REPLAYED_CALLS: sum(call.replays is not None for call in learned),
        REPLAY_MISMATCHES: sum(names.REPLAY_MISMATCH in span.attributes for span in own),
        VOID_CALLS: len(void),
        VOID_REASON: next(iter(void.values()), ""),
        UNLINKED_REWARDS: links.unlinked,
        AUTOMATIC_REWARDS: _automatic(own),
    }
    return Trajectory(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        transitions=tuple(replace(t, reward=links.intermediate.get(t.span_id)) for t in learned),
        reward=links.final,
        group=group,
        steps=steps(own),
        agent_rewards=links.agents,
        metadata={name: value for name, value in found.items() if value},
    )


def _automatic(spans: Iterable[Span]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for span in automatic_rewards(span for span in spans if counts(span)):
        value = read_reward(span)
        rule = str(span.attributes[names.AIR_RULE])
        sums[rule] = sums.get(rule, 0.0) + (sum(value.values()) if isinstance(value, dict) else value)
    return sums


def _answers(found: str | None, model: str) -> bool:
    """Whether the model that answered a call is `model`, one of its adapters, or not known."""
    return found is None or found == model or found.startswith(f"{model}:")


# -- transcripts -------------------------------------------------------------------------------------------------------

# What a rollout said, as text: the messages of its last model call, and its output.

MOST_TEXT = 2000
"""Characters of a task, a conversation or an output."""


def transcript_of(spans: Sequence[Span]) -> tuple[Mapping[str, Any], ...]:
    """The messages of the last model call and its answer; empty where there is none."""
    made = calls(spans)
    recorded = [made[-1].attributes.get(name) for name in (names.INPUT_MESSAGES, names.OUTPUT_MESSAGES)] if made else []
    return tuple(message for each in recorded for message in recorded_objects(each))


def text_of(value: Any, most: int | None = MOST_TEXT) -> str:
    """A task or an output as text."""
    return (value if isinstance(value, str) else _json(value))[:most]


def _json(value: Any) -> str:
    return dumps(value, default=repr).decode()


def said(message: Mapping[str, Any], between: str = " ", most: int | None = MOST_TEXT) -> str:
    """What a message says: its texts, tool calls as `name(argument=value)` and their results, other parts as JSON; of
    arguments, results and JSON at most so many characters."""
    return between.join(_said(part, most) for part in message.get("parts") or () if isinstance(part, Mapping))


def _said(part: Mapping[str, Any], most: int | None) -> str:
    if part.get("type") == "tool_call":
        given = part.get("arguments")
        if isinstance(given, Mapping):
            given = ", ".join(f"{name}={_json(value)}" for name, value in cast("Mapping[str, Any]", given).items())
        return f"{part.get('name')}({'' if given is None else text_of(given, most)})"
    if part.get("type") == "tool_call_response":
        return text_of(part.get("response"), most)
    if "content" in part:
        return str(part["content"])
    return text_of({name: value for name, value in part.items() if name != "type"}, most)


# -- token trees -------------------------------------------------------------------------------------------------------


def shared_calls(trajectories: Iterable[Trajectory]) -> dict[CallId, CallId]:
    """For each call that was given the recorded answer of another, the call that stands for both in the tree: the
    recorded one, or the first that repeats it where that is missing."""
    calls = [call for each in trajectories for call in each.transitions]
    standing: dict[CallId, CallId] = {}
    shared: dict[CallId, CallId] = {}
    for call in sorted(calls, key=lambda call: call.replays is not None):
        own = call.call_id
        first = standing.setdefault(call.replays or own, own)
        if first != own:
            shared[own] = first
    return shared


def token_tree(trajectories: Iterable[Trajectory]) -> TokenTree:
    """Every token of the trajectories, each stored once; see `agentlightning.trajectory` for a worked example.

    Calls are inserted in order of prompt length (ties: by sequence number), each below the longest prefix of its prompt
    that is already there. A prompt may follow prompt nodes of any rollout and sampled nodes of its own; where it
    diverges inside a node, the node is split, a sampled one with its log-probabilities. Sampled tokens always make a
    new node: two equal responses stay two samples. So do tokens sampled after an update of the weights. A call that
    repeats a recorded answer has no node: its rollout goes on below those of the recorded call.
    """
    trajectories = list(trajectories)
    shared = shared_calls(trajectories)
    calls = [call for each in trajectories for call in each.transitions if call.call_id not in shared]
    calls.sort(key=lambda call: (len(call.prompt_token_ids), call.sequence_id))
    held: dict[str, set[CallId]] = {}
    for (rollout_id, _), call_id in shared.items():
        held.setdefault(rollout_id, set()).add(call_id)
    root = _NodeBuilder(Node(parent=-1, token_ids=()))
    for call in calls:
        _insert(root, call, held.get(call.rollout_id, frozenset()))
    return TokenTree(_flatten(root))


class _NodeBuilder:
    """A node of a tree under construction; `children` by their first token."""

    __slots__ = ("children", "node")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.children: dict[int, list[_NodeBuilder]] = {}

    def add(self, child: _NodeBuilder) -> _NodeBuilder:
        self.children.setdefault(child.node.token_ids[0], []).append(child)
        return child

    def split(self, at: int) -> None:
        """Keep the first `at` tokens; the rest, and the children, move to a new child."""
        node = self.node
        lower = _NodeBuilder(_part(node, at, len(node.token_ids)))
        lower.children = self.children
        self.node = _part(node, 0, at)
        self.children = {}
        self.add(lower)


def _part(node: Node, start: int, stop: int) -> Node:
    """The node with only some of its tokens."""
    return replace(
        node,
        token_ids=node.token_ids[start:stop],
        logprobs=node.logprobs[start:stop],
        kept_sets=None if node.kept_sets is None else node.kept_sets.part(start, stop),
    )


def _insert(root: _NodeBuilder, call: Transition, held: AbstractSet[CallId]) -> None:
    place, inside, matched = _longest_match(root, call, held)
    if inside < len(place.node.token_ids):
        place.split(inside)
    rest = call.prompt_token_ids[matched:]
    if rest:
        place = place.add(_NodeBuilder(Node(parent=-1, token_ids=rest)))
    for node in _sampled_nodes(call):
        place = place.add(_NodeBuilder(node))


def _sampled_nodes(call: Transition) -> Iterator[Node]:
    """The sampled tokens of a call, a node for each version of the weights."""
    start = 0
    whole = ((call.policy_version, len(call.response_token_ids)),) if call.response_token_ids else ()
    for version, count in call.versions or whole:
        yield Node(
            parent=-1,
            token_ids=call.response_token_ids[start : start + count],
            sampled=True,
            logprobs=call.logprobs[start : start + count],
            rollout_id=call.rollout_id,
            call=call.span_id,
            agent=call.agent,
            policy_version=version,
            temperature=call.temperature,
            kept_sets=None if call.kept_sets is None else call.kept_sets.part(start, start + count),
        )
        start += count


def _longest_match(root: _NodeBuilder, call: Transition, held: AbstractSet[CallId]) -> tuple[_NodeBuilder, int, int]:
    """The node in which the longest known prefix of the prompt ends, the offset in that node, and the prefix's length.
    Its rollout also holds the sampled nodes of the calls in `held`.

    All matching branches are searched: two responses of one rollout may begin with the same tokens.
    """
    prompt = call.prompt_token_ids
    best = (root, 0, 0)
    frontier = [(root, 0)]
    while frontier and best[2] < len(prompt):
        parent, start = frontier.pop()
        for child in parent.children.get(prompt[start], ()):
            node = child.node
            own = node.rollout_id == call.rollout_id or node.call_id in held
            if node.sampled and not own:
                continue
            length = common_prefix_length(child.node.token_ids, prompt, start)
            if start + length > best[2]:
                best = (child, length, start + length)
            if length == len(child.node.token_ids) and start + length < len(prompt):
                frontier.append((child, start + length))
    return best


def _flatten(root: _NodeBuilder) -> tuple[Node, ...]:
    nodes: list[Node] = []
    waiting = [(child, -1) for children in root.children.values() for child in children][::-1]
    while waiting:
        builder, parent = waiting.pop()
        index = len(nodes)
        nodes.append(replace(builder.node, parent=parent))
        below = [child for children in builder.children.values() for child in children]
        waiting.extend((child, index) for child in reversed(below))
    return tuple(nodes)
