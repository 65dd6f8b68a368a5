"""What an algorithm learns from: transitions, trajectories, token trees and training samples.

A worked example in tokens. One rollout makes two calls; letters are tokens, capitals were sampled by the policy:

    call 1   prompt  a b c          sampled  X Y
    call 2   prompt  a b c X Y d e  sampled  Z

Two `Transition`s, one `Trajectory`, and one `TokenTree` in which every token is stored once:

    node 0   parent -1   a b c   sampled=False
    node 1   parent  0   X Y     sampled=True    call of call 1
    node 2   parent  1   d e     sampled=False
    node 3   parent  2   Z       sampled=True    call of call 2

If the rollout had made two calls with the prompt `a b c`, node 0 would have two children. Rollouts of one group share
the nodes of their common prompt, but no sampled node: each belongs to one rollout and is trained once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import orjson

from agentlightning.errors import PolicyError, RewardError
from agentlightning.util.json_values import dumps, recorded_objects
from agentlightning.util.kept_sets import KeptSets

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray: TypeAlias = NDArray[np.float32]
else:  # A machine that only serves or runs agents need not have NumPy.
    FloatArray = Any


Reward: TypeAlias = float | dict[str, float]
"""One number, or several by the name of their dimension."""

RewardWeights: TypeAlias = Mapping[str, float] | None
"""Weights of the named dimensions of rewards; None: there are none."""

CallId: TypeAlias = tuple[str, str]
"""(rollout_id, span_id) of a model call."""

Status: TypeAlias = Literal["succeeded", "failed", "timeout"]
"""How an attempt ended."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One model call, seen as state (the prompt), action (the sampled tokens) and reward."""

    rollout_id: str
    attempt_id: str
    span_id: str
    sequence_id: int
    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """One for each response token, under the distribution it was sampled from."""
    policy_version: int | None = None
    """Of the weights that sampled the last token."""
    versions: tuple[tuple[int, int], ...] = ()
    """(policy version, tokens it sampled), in order; empty where one version sampled them all."""
    agent: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    kept_sets: KeptSets | None = None
    """The tokens that top_p and top_k kept at each response token; None where they were not recorded."""
    reshaped: tuple[str, ...] = ()
    """What else changed the sampling distribution: penalties, a bias, a grammar."""
    finish_reason: str = "stop"
    reward: Reward | None = None
    """An intermediate reward between this call and the next; None if there was none."""
    model: str | None = None
    """The model that answered, by the name it was served under."""
    replays: CallId | None = None
    """(rollout_id, span_id) of the call whose recorded answer was given again; None if it was sampled."""
    input_messages: str | None = field(default=None, repr=False, compare=False)
    """The messages of the request as recorded in the span, JSON; None if they were not."""
    _state: str | None = field(default=None, init=False, repr=False, compare=False)
    """`state`, once it was computed: a comparison of credit rules asks for it many times."""

    @property
    def call_id(self) -> CallId:
        return self.rollout_id, self.span_id

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of the request in OpenTelemetry's form (`role`, `parts`), parsed on each access; empty if they
        were not recorded or are malformed."""
        return recorded_objects(self.input_messages)

    @property
    def observation(self) -> list[dict[str, Any]]:
        """The newest observation: the messages after the last one of the assistant, without the ids of tool calls.
        Empty if no messages were recorded."""
        return _newest_observation(self.messages)

    @property
    def state(self) -> str:
        """A digest of the newest observation. Calls with the same state had the same observation, but perhaps a
        different history. Without recorded messages it is a digest of the whole prompt."""
        if self._state is None:
            messages = self.messages
            digest = _digest(_newest_observation(messages) if messages else self.prompt_token_ids)
            object.__setattr__(self, "_state", digest)
            return digest
        return self._state


@dataclass(frozen=True, slots=True)
class Step:
    """A tool call, or an error: something other than an answered model call.

    >>> from agentlightning.trajectory import Step
    >>> Step("tool", "search", span_id="s1", sequence_id=2, result="12 pages").error is None
    True
    """

    kind: Literal["tool", "error"]
    name: str
    """Of the tool, else of the span."""
    span_id: str
    sequence_id: int
    """Its place among the transitions of the attempt."""
    arguments: Any = None
    """Of a tool call, as its span has them."""
    result: Any = None
    error: str | None = None
    """What went wrong; None for a tool call that went well."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The transitions of one rollout, in the store's order, and its final reward.

    >>> agl.Trajectory("ro-1", "at-1", transitions=(), reward=1.0).reward
    1.0
    """

    rollout_id: str
    attempt_id: str
    transitions: tuple[Transition, ...]
    reward: Reward | None = None
    """The final reward. None means *missing*, never 0.0."""
    group: str = ""
    """Rollouts of the same task carry the same group."""
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    steps: tuple[Step, ...] = ()
    """What happened beside the model calls, in the store's order."""
    status: Status = "succeeded"
    task: Any = field(default=None, repr=False, compare=False)
    """The input of the rollout; None if it is not known. Rules that remember tasks find them by it, else by `group`."""
    agent_rewards: Mapping[str, Reward] = field(default_factory=dict[str, "Reward"])
    """By name of an agent, what was emitted for it alone."""
    weights: RewardWeights = field(default=None, repr=False, compare=False)
    """Of the named dimensions of its rewards, where it is learned from or measured."""

    @property
    def team_reward(self) -> Reward | None:
        """The final reward, or those of its agents added up, named dimensions by name. None where all are missing.
        Raises RewardError where plain and named rewards are mixed."""
        total = self.reward
        for reward in self.agent_rewards.values() if total is None else ():
            total = add_rewards(total, reward, f"rollout {self.rollout_id}")
        return total

    @property
    def score(self) -> float | None:
        """`team_reward` as one number, its dimensions weighed; None where it is missing. Raises RewardError as that and
        `scalar_reward` do."""
        return scalar_reward(self.team_reward, self.weights)


def add_rewards(left: Reward | None, right: Reward, of: str) -> Reward:
    """The sum, of named dimensions name by name. Raises RewardError, which says `of` what, for one of each form."""
    if left is None:
        return right
    if isinstance(left, dict) and isinstance(right, dict):
        return {name: left.get(name, 0.0) + right.get(name, 0.0) for name in left | right}
    if isinstance(left, dict) or isinstance(right, dict):
        raise RewardError(f"{of} has a plain reward and one of named dimensions; give all rewards the same form")
    return left + right


def scalar_reward(reward: Reward | None, weights: RewardWeights = None) -> float | None:
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
            f"  agl eval|sft|dpo|export ... --reward-weights '{{{example}}}'"
        )
    if set(weights) - set(reward):
        return None
    return sum(weights[name] * value for name, value in reward.items())


def _newest_observation(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    answered = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    return _without_ids(messages[answered[-1] + 1 if answered else 0 :])


def _without_ids(value: Any) -> Any:
    """The same JSON value without the ids in its tables, which differ from one rollout to the next."""
    if isinstance(value, dict):
        return {key: _without_ids(inner) for key, inner in value.items() if key != "id"}
    return [_without_ids(inner) for inner in value] if isinstance(value, list) else value


def _digest(value: Any) -> str:
    try:
        text = dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # A lone surrogate, or an integer of more than 64 bits.
        text = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Node:
    """A run of tokens of one kind.

    >>> from agentlightning.trajectory import Node
    >>> Node(parent=-1, token_ids=(5, 6), sampled=True, logprobs=(-0.1, -0.2)).sampled
    True
    """

    parent: int
    """Index of the node before this one; -1 for a root. Parents come before their children."""
    token_ids: tuple[int, ...]
    sampled: bool = False
    logprobs: tuple[float, ...] = ()
    """One for each token of a sampled node, else empty."""
    rollout_id: str | None = None
    """The rollout that sampled it; None for prompts."""
    call: str | None = None
    """span_id of the call that sampled it; None for prompts. A call that several versions of the weights sampled has a
    node for each, one below the other."""
    agent: str | None = None
    policy_version: int | None = None
    """Of the weights that sampled these tokens."""
    temperature: float = 1.0
    kept_sets: KeptSets | None = None
    """The only tokens that could be sampled in the place of each; None: every token."""

    @property
    def call_id(self) -> CallId:
        """Of the call that sampled it."""
        return self.rollout_id or "", self.call or ""


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Every token of a rollout or of a group, each stored once.

    >>> from agentlightning.trajectory import Node, TokenTree
    >>> tree = TokenTree((Node(-1, (5, 6)), Node(0, (7,), sampled=True, logprobs=(-0.1,))))
    >>> [node.parent for node in tree.nodes]
    [-1, 0]
    """

    nodes: tuple[Node, ...]

    @property
    def num_tokens(self) -> int:
        """The number of unique tokens."""
        return sum(len(node.token_ids) for node in self.nodes)

    @property
    def num_sampled(self) -> int:
        return sum(len(node.token_ids) for node in self.nodes if node.sampled)

    def path(self, index: int) -> list[int]:
        """Indices of the nodes from the root to `index`, both included."""
        path: list[int] = []
        while index >= 0:
            path.append(index)
            index = self.nodes[index].parent
        return path[::-1]

    def leaves(self) -> list[int]:
        """Indices of the nodes without children."""
        parents = {node.parent for node in self.nodes}
        return [index for index in range(len(self.nodes)) if index not in parents]


@dataclass(frozen=True, slots=True, init=False, eq=False)
class TrainingSample:
    """A token tree with what a loss needs for each sampled token, as named columns of NumPy float32.

    Pass columns by name, or several in `columns`: for each node a number for each of its tokens, or one for them all.
    Values of nodes that are not sampled are ignored.

    >>> from agentlightning.trajectory import Node, TokenTree, TrainingSample
    >>> tree = TokenTree((Node(-1, (5, 6)), Node(0, (7,), sampled=True, logprobs=(-0.1,))))
    >>> sample = TrainingSample(tree, advantages=((), (0.5,)), weights=((), (1.0,)))
    >>> sample.columns["advantages"][1].tolist(), sample.share
    ([0.5], 1.0)
    """

    tree: TokenTree
    columns: Mapping[str, tuple[FloatArray, ...]]
    """By name, an array for each node, with one number for each token of a sampled node. `advantages`; `weights`, the
    factor of each token's loss; and those that some losses and rules add: `ref_logprobs`, `proximal_logprobs`,
    `values`, `returns`."""
    adapter: str | None
    """The adapter of the policy that is trained; None: the policy itself."""
    share: float
    """The sample's share of its batch; the shares of a batch sum to 1. A minibatch divides its loss by the sum of its
    shares. Default: the sum of the weights."""

    def __init__(
        self,
        tree: TokenTree,
        advantages: Sequence[Any] | None = None,
        weights: Sequence[Any] | None = None,
        *,
        columns: Mapping[str, Sequence[Any]] | None = None,
        adapter: str | None = None,
        share: float | None = None,
        **named: Sequence[Any],
    ) -> None:
        """Raises PolicyError for a column that does not have one number for each sampled token, or each node."""
        given = {"advantages": advantages, "weights": weights, **named}
        given = {**(columns or {}), **{name: values for name, values in given.items() if values is not None}}
        arrays = {name: _column(tree, name, values) for name, values in given.items()}
        if share is None:
            share = float(sum(float(each.sum(dtype="float64")) for each in arrays.get("weights", ())))
        object.__setattr__(self, "tree", tree)
        object.__setattr__(self, "columns", arrays)
        object.__setattr__(self, "adapter", adapter)
        object.__setattr__(self, "share", share)

    @property
    def advantages(self) -> tuple[FloatArray, ...]:
        return self.columns["advantages"]

    @property
    def weights(self) -> tuple[FloatArray, ...]:
        return self.columns["weights"]


def _column(tree: TokenTree, name: str, values: Sequence[Any]) -> tuple[FloatArray, ...]:
    import numpy as np

    if len(values) != len(tree.nodes):
        raise PolicyError(f"column {name!r} has {len(values)} entries; give one for each of {len(tree.nodes)} nodes")
    empty = np.zeros(0, np.float32)
    column = tuple(
        (own if (own := np.asarray(given, np.float32)).ndim else np.full(len(node.token_ids), own))
        if node.sampled
        else empty
        for node, given in zip(tree.nodes, values, strict=True)
    )
    for index, (node, array) in enumerate(zip(tree.nodes, column, strict=True)):
        if node.sampled and array.shape != (len(node.token_ids),):
            raise PolicyError(
                f"column {name!r} has shape {array.shape} at node {index}; give one number for each of its "
                f"{len(node.token_ids)} tokens"
            )
    return column
