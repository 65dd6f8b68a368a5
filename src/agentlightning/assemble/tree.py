"""Token trees: every token of some trajectories, each stored once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace

from agentlightning.trajectory import CallId, Node, TokenTree, Trajectory, Transition
from agentlightning.util.common_prefix import common_prefix_length


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
