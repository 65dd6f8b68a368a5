"""DPO: learns from which of two sessions of a task went better, or of two branches of one (arXiv:2305.18290).

Pairs are made of rewards, or given as records. The loss of a pair is a function of its margin,

    m = sum over what is preferred of (log p - log p_ref)  -  the same sum over the other

with "dpo", "ipo", "simpo" or, for single sessions, "kto" as the function (`policy.losses.preference`); with several
calls in a session the sum is over all of them that are learned from. The reference is what the run started from. No
log-probability of the sampler is needed, so text of any origin can be learned from.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple, cast

from pydantic import FiniteFloat, field_validator

from agentlightning.algorithms.base import (
    RolloutsAlgorithm,
    RolloutsConfig,
    learner_of,
    reward_metrics,
    scores_of,
    unusable,
)
from agentlightning.algorithms.recorded.sessions import Tokenizer, renamed, without_probabilities
from agentlightning.algorithms.training import Training
from agentlightning.assemble import shared_calls, token_tree
from agentlightning.chat.base import Message
from agentlightning.chat.messages import read_message, read_tools
from agentlightning.credit import group_trajectories, is_target, of_target
from agentlightning.credit.rejection import NO_TARGET_CALLS, Rejection
from agentlightning.errors import ConfigError, DatasetError
from agentlightning.policy.base import UpdateOptions
from agentlightning.policy.losses import COUNT, FACTOR, MARGIN, WEIGHTS, DPOLoss, Loss, PreferenceLoss
from agentlightning.task import json_lines, load_dataset
from agentlightning.trajectory import CallId, TokenTree, TrainingSample, Trajectory
from agentlightning.util.settings import AtLeastOne

# -- records -----------------------------------------------------------------------------------------------------------

# Preference pairs from records: `{"prompt": ..., "chosen": ..., "rejected": ...}`, as TRL reads and `agl export --to
# dpo-jsonl` writes them.
#
# Each part is a list of messages in OpenAI's form, or a text, which is one message: the user's in the prompt, the
# assistant's in an answer. Without a prompt, what both conversations begin with is the prompt. `tools` may be there.

# -- pairs -----------------------------------------------------------------------------------------------------------

# Preference pairs from rewards: of whole sessions of one task, or of branches of one token tree. Pure.
#
# Sessions: one with a higher reward is preferred to one with a lower reward. Branches: calls of a task with the same
# prompt tokens lead on to different rewards; an answer is worth the mean reward of the sessions that it belongs to, and
# only the tokens of the two answers are compared, so that what both sessions have in common teaches nothing.

PairsOf = Literal["sessions", "branches"]


class Preference(NamedTuple):
    """What is preferred, and what it is preferred to. Their calls are those that are compared."""

    chosen: Trajectory
    rejected: Trajectory
    difference: float
    """By how much the rewards differ."""


def preference_pairs(
    group: Sequence[tuple[Trajectory, float]], *, of: PairsOf, most: int, target: str | None, rng: random.Random
) -> list[Preference]:
    """At most `most` pairs of one task's sessions, given with their rewards, the largest differences first; each
    session is used about equally often."""
    candidates = [(own, reward) for each, reward in group if (own := of_target(each, target)).transitions]
    found = [
        Preference(good, bad, high - low)
        for comparable in ([candidates] if of == "sessions" else _branches(candidates))
        for good, high in comparable
        for bad, low in comparable
        if high > low and _tokens(good) != _tokens(bad)
    ]
    rng.shuffle(found)
    found.sort(key=lambda pair: -pair.difference)
    return _balanced(found, most)


def _branches(candidates: Sequence[tuple[Trajectory, float]]) -> list[list[tuple[Trajectory, float]]]:
    """The answers to each prompt, with what they are worth."""
    worth: dict[tuple[int, ...], dict[tuple[int, ...], list[tuple[Trajectory, float]]]] = {}
    for trajectory, reward in candidates:
        for call in trajectory.transitions:
            answers = worth.setdefault(call.prompt_token_ids, {})
            alone = replace(trajectory, transitions=(call,))
            answers.setdefault(call.response_token_ids, []).append((alone, reward))
    return [[(own[0][0], fmean(reward for _, reward in own)) for own in answers.values()] for answers in worth.values()]


def _balanced(pairs: Sequence[Preference], most: int) -> list[Preference]:
    """The first pairs, those of sessions that were used least before the others."""
    used: Counter[str] = Counter()
    chosen: list[Preference] = []
    left = list(pairs)
    while left and len(chosen) < most:
        best = min(left, key=lambda pair: used[pair.chosen.rollout_id] + used[pair.rejected.rollout_id])
        left.remove(best)
        chosen.append(best)
        used.update((best.chosen.rollout_id, best.rejected.rollout_id))
    return chosen


def _tokens(trajectory: Trajectory) -> list[tuple[int, ...]]:
    return [call.response_token_ids for call in trajectory.transitions]


FORM = 'give {"prompt": [messages], "chosen": [messages], "rejected": [messages]}, or texts in their place'
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
PREFERRED = 1.0
"""The reward of what is chosen; what is rejected has 0.0."""
LINES = frozenset({".jsonl", ".ndjson"})


class PreferenceRecord(NamedTuple):
    """One pair, in messages."""

    where: str
    """`pairs.jsonl, line 3`."""
    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    """What follows the prompt; at least one message of it is the assistant's."""
    rejected: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


def load_preferences(source: Any) -> list[PreferenceRecord]:
    """The pairs of what `load_dataset` reads. Raises DatasetError that names the
    line and the field of what is wrong."""
    if isinstance(source, str | Path) and Path(source).suffix.lower() in LINES and Path(source).is_file():
        rows = list(json_lines(Path(source)))
        if not rows:
            raise DatasetError(f"{source} has no preference pair; at least one line is needed: {FORM}")
    else:
        name = f"{source}, record" if isinstance(source, str | Path) else "pair"
        rows = [(f"{name} {number}", value) for number, value in enumerate(load_dataset(source), 1)]
    return [_record(each, where) for where, each in rows]


def _record(value: Any, where: str) -> PreferenceRecord:
    if not isinstance(value, dict):
        raise DatasetError(f"{where} is a {type(value).__name__}, not an object; {FORM}")
    fields = cast("dict[str, Any]", value)
    chosen, rejected = (_messages(fields, name, "assistant", where) for name in ("chosen", "rejected"))
    if fields.get("prompt") is None:
        same = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
        prompt = tuple(message for message, _ in same)
        if not prompt:
            raise _wrong(where, "prompt is missing, and chosen and rejected have no beginning in common")
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    else:
        prompt = _messages(fields, "prompt", "user", where)
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not any(message["role"] == "assistant" for message in answer):
            raise _wrong(where, f"{name} has no message of the assistant after the prompt")
    if chosen == rejected:
        raise DatasetError(f"{where}: chosen and rejected are equal, so nothing is preferred; remove the line")
    return PreferenceRecord(
        where, prompt, chosen, rejected, tuple(read_tools(f"{where}: tools", fields.get("tools")) or ())
    )


def _wrong(where: str, problem: str) -> DatasetError:
    return DatasetError(f"{where}: {problem}; {FORM}")


def _messages(fields: Mapping[str, Any], name: str, role: str, where: str) -> tuple[Message, ...]:
    value = fields.get(name)
    if value is None or value == "":
        raise _wrong(where, f"{name} is {'missing' if value is None else 'empty'}")
    if isinstance(value, str):
        value = [{"role": role, "content": value}]
    turns = cast("list[Any]", value) if isinstance(value, list) else []
    if not turns:
        raise _wrong(where, f"{name} is {value!r:.60}")
    for place, turn in enumerate(turns):
        given = cast("dict[str, Any]", turn).get("role") if isinstance(turn, dict) else None
        if given not in ROLES:
            raise _wrong(where, f"{name}[{place}] is {turn!r:.60}; a message has a role and content")
        content = turn.get("content")
        if not (isinstance(content, str | list) or (given == "assistant" and turn.get("tool_calls"))):
            raise _wrong(where, f"{name}[{place}].content is {content!r:.60}, not a text")
    return tuple(read_message(f"{where}: {name}[{place}]", turn) for place, turn in enumerate(turns))


# -- tokens ------------------------------------------------------------------------------------------------------------


def to_preferences(
    records: Sequence[PreferenceRecord], tokenizer: Tokenizer
) -> tuple[list[Trajectory], list[Rejection]]:
    """Two trajectories for each pair, a group of their own with the rewards 1 and 0, and the pairs that the model
    cannot hold or that have no answer of the agents to train."""
    found: list[Trajectory] = []
    rejected: list[Rejection] = []
    for record in records:
        pair = [_trajectory(record, name, tokenizer) for name in ("chosen", "rejected")]
        calls = [call for each in pair for call in each.transitions]
        if (too_long := tokenizer.too_long(record.where, calls)) is not None:
            rejected.append(too_long)
        elif not any(is_target(call.agent, tokenizer.target) for call in calls):
            rejected.append(Rejection(record.where, NO_TARGET_CALLS, f"no answer is of an agent {tokenizer.target!r}"))
        else:
            found += pair
    return found, rejected


def _trajectory(record: PreferenceRecord, name: str, tokenizer: Tokenizer) -> Trajectory:
    answer = record.chosen if name == "chosen" else record.rejected
    rollout_id = f"{record.where} {name}"
    calls = tokenizer.answers([*record.prompt, *answer], list(record.tools) or None, f"{record.where}: {name}")
    own = tuple(renamed(call, rollout_id) for call in calls if call.sequence_id > len(record.prompt))
    return Trajectory(rollout_id, "", own, PREFERRED if name == "chosen" else 0.0, group=record.where)


class DPOConfig(RolloutsConfig):
    """The settings of preference learning.

    >>> agl.config.DPOConfig(loss="simpo").loss.gamma
    1.0
    """

    type: str = "dpo"
    """Which algorithm this is."""
    data: str | None = None
    """A JSONL, JSON, CSV or Parquet file of pairs to learn from, in place of sessions."""
    loss: Loss = DPOLoss()
    """dpo, ipo, kto or simpo, or a table with its `type` and settings."""
    pairs: PairsOf = "sessions"
    """What is compared: sessions, whole sessions of one task; branches, two answers to the same prompt tokens."""
    pairs_per_task: AtLeastOne = 4
    """Pairs of each task in a step, at most: those whose rewards differ most, each session about equally often."""
    success_threshold: FiniteFloat = 0.5
    """The reward from which on a session is good, for loss "kto"."""
    reference: str | None = None
    """The reference model, named as `policy.model`. None: the weights that the run started from."""
    seed: int = 0
    """The seed by which pairs are chosen."""

    @field_validator("loss")
    @classmethod
    def _check_loss(cls, loss: Any) -> Any:
        if not isinstance(loss, PreferenceLoss):
            shown = getattr(loss, "type", loss)
            raise ValueError(f"{shown!r} does not learn from preferences; choose dpo, ipo, kto or simpo")
        return loss


class DPO(RolloutsAlgorithm[DPOConfig]):
    """Learns from preferences: between sessions of one task, recorded or new, or pairs of `data`.

    data: in place of sessions: a JSONL, JSON, CSV or Parquet file, a list or a Hugging Face dataset of `{"prompt": ...,
        "chosen": ..., "rejected": ...}`, messages or texts, with `tools` where tools are used: the format of TRL, and
        of `agl export --to dpo-jsonl`.
    settings: the fields of `DPOConfig`, over those of `config`. Raises ConfigError for settings that cannot work.

        >>> agl.DPO(steps=50, loss="ipo").total_steps
        50
    """

    name = "dpo"
    config_class = DPOConfig

    def __init__(self, config: DPOConfig | None = None, *, data: Any = None, **settings: Any) -> None:
        if isinstance(data, str | Path):
            settings["data"], data = str(data), None
        super().__init__(config, **settings)
        self.data = self.config.data if data is None else data
        if self.data is not None and self.config.pairs != "sessions":
            raise ConfigError(f"pairs={self.config.pairs!r} is for recorded sessions; data has its own pairs")

    @property
    def reads_sessions(self) -> bool:
        """Whether it was given no pairs to learn from."""
        return self.data is None

    @property
    def restorable(self) -> bool:
        return super().restorable and self.data == self.config.data

    @property
    def _loss(self) -> PreferenceLoss:
        assert isinstance(self.config.loss, PreferenceLoss)
        return self.config.loss

    async def _step(self, training: Training) -> None:
        collected, target = await self._rollouts(training), self._target(training)
        compared, counts = await asyncio.to_thread(self.comparisons, collected.trajectories, target, training.step)
        metrics = {**reward_metrics(collected), **counts}
        if compared:
            samples, own = await self._samples(training, compared)
            metrics |= own
            metrics |= await training.update(samples, UpdateOptions(loss=self._loss))
        await training.finish_step(collected, metrics)

    def comparisons(
        self, trajectories: Sequence[Trajectory], target: str | None, step: int = 0
    ) -> tuple[list[Comparison], dict[str, float]]:
        """What one step compares, and what became of its tasks."""
        config, rng = self.config, random.Random(f"{self.config.seed}/{step}")
        found: list[Comparison] = []
        counts: Counter[str] = Counter()
        for group in group_trajectories(without_probabilities(each) for each in trajectories):
            scored = [(each, float(each.score or 0.0)) for each in group]
            if not self._loss.paired:
                found += [
                    Comparison.of_one(each, reward >= config.success_threshold, target) for each, reward in scored
                ]
                continue
            most = config.pairs_per_task
            pairs = preference_pairs(scored, of=config.pairs, most=most, target=target, rng=rng)
            counts["groups_without_pairs"] += not pairs
            found += [Comparison.of_pair(pair) for pair in pairs]
        found = [each for each in found if any(each.factors.values())]
        return found, {"groups_without_pairs": float(counts["groups_without_pairs"]), "pairs": float(len(found))}

    def check_data(self, trajectories: Sequence[Trajectory], target: str | None) -> None:
        """Raises DatasetError where nothing can be compared, saying what is missing."""
        refused = {each.rollout_id for each in unusable(trajectories, target)}
        usable = [each for each in trajectories if each.rollout_id not in refused]
        if not usable:
            raise DatasetError(
                f"none of {len(trajectories)} sessions has a reward, so nothing says which is preferred; emit rewards"
                " with agl.emit_reward, or score recorded sessions with `agl rescore`"
            )
        if self.comparisons(usable, target)[0]:
            return
        groups = group_trajectories(usable)
        alone = sum(len(group) == 1 for group in groups)
        branches = "" if self.config.pairs == "sessions" else " No two answers follow the same prompt tokens with"
        branches += " different rewards; pairs='sessions' compares whole sessions." if branches else ""
        raise DatasetError(
            f"there is no pair to learn from: of {len(groups)} tasks with {len(usable)} sessions, {alone} have one,"
            f" and the others no two that differ in reward.{branches}"
            ' Record several sessions of the same task, or use loss="kto", which needs no pairs'
        )

    async def _samples(
        self, training: Training, compared: Sequence[Comparison]
    ) -> tuple[list[TrainingSample], dict[str, float]]:
        """The samples with their margins under the present weights."""
        loss, trees = self._loss, [each.tree for each in compared]
        own = (await learner_of(training).score(trees, {"logprobs"}))["logprobs"]
        reference = None
        if loss.reference:
            reference = await scores_of(training, trees, self.config.reference)
        factors = [each.node_factors(mean=loss.mean) for each in compared]
        margins = [
            sum(
                factor * float(now.sum() - (before[index].sum() if before is not None else 0.0))
                for index, (factor, now) in enumerate(zip(row, logprobs, strict=True))
                if factor
            )
            for row, logprobs, before in zip(factors, own, reference or [None] * len(trees), strict=True)
        ]
        metrics = {"margin": sum(margins) / len(margins), "accuracy": sum(m > 0 for m in margins) / len(margins)}
        if not loss.paired:
            signs = [1.0 if each.is_preferred else -1.0 for each in compared]
            ratios = [sign * margin for sign, margin in zip(signs, margins, strict=True)]
            baseline = max(0.0, sum(ratios) / len(ratios))
            margins = [sign * (ratio - baseline) for sign, ratio in zip(signs, ratios, strict=True)]
        share = 1.0 / len(compared)
        rows = zip(compared, factors, margins, strict=True)
        return [each.sample(row, margin, share) for each, row, margin in rows], metrics


@dataclass(frozen=True, slots=True)
class Comparison:
    """A pair, or one session, as a token tree."""

    tree: TokenTree
    factors: Mapping[CallId, int]
    """By (rollout_id, span_id), 1 for calls of what is preferred, -1 for those of the other, 0 for those of both."""
    is_preferred: bool = True
    """False for one session that is bad."""

    @classmethod
    def of_pair(cls, pair: Preference) -> Comparison:
        """Calls that both went through have no part in the difference."""
        both = [pair.chosen, pair.rejected]
        factors = {t.call_id: 1 for t in pair.chosen.transitions}
        factors |= {t.call_id: -1 for t in pair.rejected.transitions}
        factors |= {call: 0 for shared in shared_calls(both).items() for call in shared}
        return cls(token_tree(both), factors)

    @classmethod
    def of_one(cls, trajectory: Trajectory, good: bool, target: str | None) -> Comparison:
        calls = [call for call in trajectory.transitions if is_target(call.agent, target)]
        sign = 1 if good else -1
        return cls(token_tree([trajectory]), {t.call_id: sign for t in calls}, good)

    def node_factors(self, *, mean: bool) -> list[float]:
        """s of the tokens of each node; with `mean`, divided by the tokens of its sequence."""
        signs = [self.factors.get(node.call_id, 0) for node in self.tree.nodes]
        if not mean:
            return [float(sign) for sign in signs]
        lengths = Counter[int]()
        for sign, node in zip(signs, self.tree.nodes, strict=True):
            lengths[sign] += len(node.token_ids)
        return [sign / lengths[sign] if sign else 0.0 for sign in signs]

    def sample(self, factors: Sequence[float], margin: float, share: float) -> TrainingSample:
        """The tree with the columns of preference losses."""
        nodes = self.tree.nodes
        count = sum(len(node.token_ids) for node, factor in zip(nodes, factors, strict=True) if factor)
        columns: dict[str, Sequence[float]] = {
            WEIGHTS: [share if factor else 0.0 for factor in factors],
            MARGIN: [margin] * len(nodes),
            FACTOR: factors,
            COUNT: [count] * len(nodes),
        }
        return TrainingSample(self.tree, columns=columns, share=share)
