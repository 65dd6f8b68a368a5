"""From spans to what an algorithm learns from: transitions, trajectories, token trees.

Pure functions over spans that were already read; they do no I/O and know no store. Algorithms call `trajectory` for
every rollout and hand groups of them to `agentlightning.credit`, which calls `token_tree`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from agentlightning import span as names
from agentlightning.call_validation import NO_LIMITS, TokenLimits, defect_of, has_tokens
from agentlightning.errors import RewardError, RolloutRejectedError
from agentlightning.span import MAX_REWARD, Span, counts, usable_reward
from agentlightning.trajectory import Node, TokenTree, Trajectory, Transition

Reward = float | dict[str, float]

CALL_OPERATIONS = frozenset({"chat", "text_completion", "generate_content"})
"""Values of `gen_ai.operation.name` that mean a model call."""

UNTRAINABLE_CALLS = "untrainable_calls"
"""Key of `Trajectory.metadata`: how many calls were left out because their tokens or log-probabilities are unknown."""
OTHER_MODELS = "other_models"
"""Key of `Trajectory.metadata`: how many calls were left out because another model answered than learns."""
OVERRIDDEN_CALLS = "overridden_calls"
"""Key of `Trajectory.metadata`: how many calls asked for sampling parameters that training did not follow."""
UNLINKED_REWARDS = "unlinked_rewards"
"""Key of `Trajectory.metadata`: how many rewards came before the first call and were not the last one."""
VOID_CALLS = "void_calls"
"""Key of `Trajectory.metadata`: how many calls were left out because their record cannot be true."""
VOID_REASON = "void_reason"
"""Key of `Trajectory.metadata`: what is wrong with the first of them."""


# -- calls -----------------------------------------------------------------------------------------------------------


def calls(spans: Iterable[Span]) -> list[Span]:
    """The model calls that count, by sequence number: superseded and failed ones are left out, and those whose answer
    nobody heard."""
    counted = sorted((span for span in spans if _is_call(span) and not _is_void(span)), key=lambda s: s.sequence_id)
    unheard = _unheard(counted)
    return [span for span in counted if span.span_id not in unheard] if unheard else counted


def transitions(spans: Iterable[Span], limits: TokenLimits = NO_LIMITS) -> tuple[Transition, ...]:
    """The model calls whose tokens are known, by sequence number.

    Calls without prompt ids, sampled ids and one log-probability for each sampled id are skipped;
    `untrainable_calls` names them. So are those whose record cannot be true, which `void_calls` names.
    """
    own = tuple(spans)
    void = void_calls(own, limits)
    return _known([span for span in own if span.span_id not in void])


def _known(spans: Iterable[Span]) -> tuple[Transition, ...]:
    return tuple(_transition(span) for span in calls(spans) if has_tokens(span.attributes))


def untrainable_calls(spans: Iterable[Span]) -> tuple[str, ...]:
    """span_ids of the calls `transitions` skips because their tokens are unknown (answers of a third party, say)."""
    return tuple(span.span_id for span in calls(spans) if not has_tokens(span.attributes))


def void_calls(spans: Iterable[Span], limits: TokenLimits = NO_LIMITS) -> dict[str, str]:
    """By span_id, what is wrong with the calls `transitions` skips because their record cannot be true."""
    found = {span.span_id: defect_of(span.attributes, limits) for span in calls(spans) if has_tokens(span.attributes)}
    return {span_id: why for span_id, why in found.items() if why}


def _is_call(span: Span) -> bool:
    operation = span.attributes.get(names.OPERATION_NAME)
    return isinstance(operation, str) and operation in CALL_OPERATIONS and names.JUDGE not in span.attributes


def _served_by(span: Span) -> str | None:
    return span.attributes.get(names.RESPONSE_MODEL)


def _is_void(span: Span) -> bool:
    return not counts(span) or span.status_code == "ERROR" or names.ERROR_TYPE in span.attributes


def _unheard(counted: Sequence[Span]) -> set[str]:
    """span_ids of the answers to a request that was sent again. Where the same request had been answered several times
    before, nobody can say which of the answers was lost, so that all of them stay."""
    answered: dict[tuple[str, str], dict[str, list[str]]] = {}
    unheard: set[str] = set()
    for span in counted:
        request = span.attributes.get(names.REQUEST)
        if not isinstance(request, str):
            continue
        replies = answered.setdefault((span.attempt_id, request), {})
        reply = str(span.attributes.get(names.RESPONSE_ID, span.span_id))
        again = request.startswith(names.SENT_ONCE) or bool(span.attributes.get(names.RETRIES))
        if again and len(replies) == 1 and reply not in replies:
            unheard.update(replies.popitem()[1])
        replies.setdefault(reply, []).append(span.span_id)
    return unheard


def _transition(span: Span) -> Transition:
    attributes = span.attributes
    reasons, agent, version = (
        attributes.get(name) for name in (names.FINISH_REASONS, names.AGENT_NAME, names.POLICY_VERSION)
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
        reshaped=tuple(map(str, _items(attributes.get(names.RESHAPED)))),
        finish_reason=str(next(iter(_items(reasons)), "stop")),
    )


def _items(value: Any) -> Sequence[Any]:
    return cast("Sequence[Any]", value) if isinstance(value, list | tuple) else () if value is None else (value,)


def _versions(attributes: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Which weights drew how many tokens; nothing where the span's numbers do not add up to its tokens."""
    numbers = _items(attributes.get(names.POLICY_VERSIONS))
    if not all(isinstance(number, int) for number in numbers) or len(numbers) % 2:
        return ()
    runs = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    counts = [count for _, count in runs]
    return runs if min(counts, default=0) > 0 and sum(counts) == len(attributes[names.RESPONSE_TOKEN_IDS]) else ()


def _number(attributes: Mapping[str, Any], name: str, default: float) -> float:
    value = attributes.get(name)
    return float(default if value is None else value)


# -- rewards ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RewardLinks:
    """Where the rewards of one attempt belong."""

    final: Reward | None
    """None: missing."""
    intermediate: dict[str, Reward]
    """By span_id of the call each follows."""
    unlinked: int = 0
    """Earlier rewards that came before the first call."""


def link_rewards(spans: Iterable[Span]) -> RewardLinks:
    """Say which reward belongs to what.

    The last reward span of an attempt, by sequence number, is the final reward of the rollout. Each earlier one is
    the intermediate reward of the last model call before it; where several follow the same call they add up, named
    dimensions name by name. An earlier reward before the first call belongs to nothing and is counted. Superseded
    spans, those that came after the end of their attempt, and evaluations without a score (a label alone, say) do not
    count. Where there is no reward span the final reward is missing (None), which is never 0.0.

    Raises RewardError for a reward that is not a usable number, and where a plain reward and named dimensions follow
    the same call.
    """
    valid = sorted((span for span in spans if counts(span)), key=lambda span: span.sequence_id)
    rewards = [span for span in valid if _is_reward(span)]
    if not rewards:
        return RewardLinks(final=None, intermediate={})
    links: dict[str, Reward] = {}
    call, unlinked = None, 0
    counted = {span.span_id for span in calls(valid)}
    for span in valid:
        if span.span_id in counted:
            call = span.span_id
        elif _is_reward(span) and span is not rewards[-1]:
            if call is None:
                unlinked += 1
            else:
                links[call] = _sum(links.get(call), read_reward(span), call)
    return RewardLinks(final=read_reward(rewards[-1]), intermediate=links, unlinked=unlinked)


def _is_reward(span: Span) -> bool:
    """An evaluation, as OpenTelemetry has it, may hold a label and no score; it is no reward then."""
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


def _sum(left: Reward | None, right: Reward, call: str) -> Reward:
    if left is None:
        return right
    if isinstance(left, dict) and isinstance(right, dict):
        return {name: left.get(name, 0.0) + right.get(name, 0.0) for name in left | right}
    if isinstance(left, dict) or isinstance(right, dict):
        raise RewardError(f"call {call} has a plain reward and one of named dimensions; give all rewards the same form")
    return left + right


def scalar_reward(reward: Reward | None, weights: Mapping[str, float] | None = None) -> float | None:
    """One number: a plain reward as it is, named dimensions as `sum(weights[name] * reward[name])`.

    None where the reward, or a dimension that has a weight, is missing. Raises RewardError for dimensions without a
    weight.
    """
    if reward is None or not isinstance(reward, dict):
        return reward
    weights = weights or {}
    unknown = sorted(set(reward) - set(weights))
    if unknown:
        example = ", ".join(f'"{name}": 1.0' for name in sorted(reward))
        raise RewardError(
            f"no weight for reward dimensions {unknown} (0.0 leaves one out). Set them in Python with"
            f" agl.LightningRL(reward_weights={{{example}}}) or agl.evaluate(..., reward_weights={{{example}}}); on the"
            f" command line with  agl train ... 'algorithm.reward_weights={{{example}}}'  or"
            f"  agl eval ... --reward-weights '{{{example}}}'"
        )
    if set(weights) - set(reward):
        return None
    return sum(weights[name] * value for name, value in reward.items())


# -- trajectories ----------------------------------------------------------------------------------------------------


def trajectory(
    rollout_id: str,
    attempt_id: str,
    spans: Iterable[Span],
    group: str = "",
    metadata: Mapping[str, Any] | None = None,
    model: str | None = None,
    limits: TokenLimits = NO_LIMITS,
) -> Trajectory:
    """The trajectory of one attempt; spans of other attempts are left out, and with a `model` the calls that another
    one answered: what a frozen reference or a provider says is not the policy's to learn from.

    A call whose record cannot be true (tokens beyond the `limits`, say) is left out. `metadata` gains the counts
    `untrainable_calls`, `other_models`, `overridden_calls`, `void_calls` and `unlinked_rewards` where they are not
    zero, and what is wrong with the first void call. Whatever an agent has written, only two things are raised:
    RewardError as `link_rewards` does, and RolloutRejectedError where every call with tokens is void.
    """
    own = [span for span in spans if span.rollout_id == rollout_id and span.attempt_id == attempt_id]
    others = {span.span_id for span in calls(own) if model is not None and _served_by(span) not in (model, None)}
    own = [span for span in own if span.span_id not in others] if others else own
    void = void_calls(own, limits)
    learned = _known([span for span in own if span.span_id not in void] if void else own)
    if void and not learned:
        raise _all_void(rollout_id, void)
    links = link_rewards(own)
    found = {
        UNTRAINABLE_CALLS: len(untrainable_calls(own)),
        OTHER_MODELS: len(others),
        OVERRIDDEN_CALLS: sum(names.OVERRIDDEN in span.attributes for span in calls(own)),
        VOID_CALLS: len(void),
        VOID_REASON: next(iter(void.values()), ""),
        UNLINKED_REWARDS: links.unlinked,
    }
    return Trajectory(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        transitions=tuple(replace(t, reward=links.intermediate.get(t.span_id)) for t in learned),
        reward=links.final,
        group=group,
        metadata={**(metadata or {}), **{name: value for name, value in found.items() if value}},
    )


def _all_void(rollout_id: str, void: Mapping[str, str]) -> RolloutRejectedError:
    span_id, why = next(iter(void.items()))
    message = f"none of the {len(void)} model calls of rollout {rollout_id} can be true; of span {span_id}: {why}"
    return RolloutRejectedError("void_calls", message)


# -- token trees -----------------------------------------------------------------------------------------------------


def token_tree(trajectories: Iterable[Trajectory]) -> TokenTree:
    """Every token of the trajectories, each stored once; see `agentlightning.trajectory` for a worked example.

    Calls are inserted in order of prompt length (ties: by sequence number), each below the longest prefix of its prompt
    that is already there. A prompt runs through prompt nodes of anyone and sampled nodes of its own rollout; where it
    leaves a node in the middle, the node is split, a sampled one with its log-probabilities. Sampled tokens always
    make a new node: two equal answers stay two samples. So do those on the other side of an update of the weights.
    """
    everything = [call for each in trajectories for call in each.transitions]
    everything.sort(key=lambda call: (len(call.prompt_token_ids), call.sequence_id))
    root = _Draft(Node(parent=-1, token_ids=()))
    for call in everything:
        _insert(root, call)
    return TokenTree(_flatten(root))


class _Draft:
    """A node of a tree under construction; `children` by their first token."""

    __slots__ = ("children", "node")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.children: dict[int, list[_Draft]] = {}

    def add(self, child: _Draft) -> _Draft:
        self.children.setdefault(child.node.token_ids[0], []).append(child)
        return child

    def split(self, at: int) -> None:
        """Keep the first `at` tokens; the rest, and the children, move to a new child."""
        node = self.node
        lower = _Draft(replace(node, token_ids=node.token_ids[at:], logprobs=node.logprobs[at:]))
        lower.children = self.children
        self.node = replace(node, token_ids=node.token_ids[:at], logprobs=node.logprobs[:at])
        self.children = {}
        self.add(lower)


def _insert(root: _Draft, call: Transition) -> None:
    place, inside, matched = _longest_match(root, call)
    if inside < len(place.node.token_ids):
        place.split(inside)
    rest = call.prompt_token_ids[matched:]
    if rest:
        place = place.add(_Draft(Node(parent=-1, token_ids=rest)))
    for node in _sampled_nodes(call):
        place = place.add(_Draft(node))


def _sampled_nodes(call: Transition) -> Iterator[Node]:
    """What each version of the weights drew."""
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
        )
        start += count


def _longest_match(root: _Draft, call: Transition) -> tuple[_Draft, int, int]:
    """The node in which the longest known prefix of the prompt ends, how far inside it, and the prefix's length.

    All branches that match are followed: equal answers of one rollout begin with the same tokens.
    """
    prompt = call.prompt_token_ids
    best = (root, 0, 0)
    open_ends = [(root, 0)]
    while open_ends and best[2] < len(prompt):
        parent, start = open_ends.pop()
        for child in parent.children.get(prompt[start], ()):
            if child.node.sampled and child.node.rollout_id != call.rollout_id:
                continue
            length = _common(child.node.token_ids, prompt, start)
            if start + length > best[2]:
                best = (child, length, start + length)
            if length == len(child.node.token_ids) and start + length < len(prompt):
                open_ends.append((child, start + length))
    return best


def _common(run: Sequence[int], prompt: Sequence[int], start: int) -> int:
    """How many tokens of `run` equal those of `prompt` from `start` on: slices are compared, halved at a difference."""
    high = min(len(run), len(prompt) - start)
    if run[:high] == prompt[start : start + high]:
        return high
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        if run[low:middle] == prompt[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low


def _flatten(root: _Draft) -> tuple[Node, ...]:
    nodes: list[Node] = []
    waiting = [(child, -1) for children in root.children.values() for child in children][::-1]
    while waiting:
        draft, parent = waiting.pop()
        index = len(nodes)
        nodes.append(replace(draft.node, parent=parent))
        below = [child for children in draft.children.values() for child in children]
        waiting.extend((child, index) for child in reversed(below))
    return tuple(nodes)
