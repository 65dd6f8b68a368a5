"""DPO: learns from which of two sessions of a task went better, or of two branches of one (arXiv:2305.18290).

Pairs are made of rewards (`algorithms.recorded.pairs`), or given. The loss of a pair is a function of its margin,

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from agentlightning.algorithms.agents import unusable
from agentlightning.algorithms.base import RolloutsAlgorithm, RolloutsConfig
from agentlightning.algorithms.columns import Models, learner_of, scores
from agentlightning.algorithms.recorded.preference_records import PairsOf, Preference, preference_pairs
from agentlightning.algorithms.recorded.sessions import without_probabilities
from agentlightning.algorithms.reward_shaping import reward_metrics
from agentlightning.algorithms.training import Training
from agentlightning.assemble import shared_calls, token_tree
from agentlightning.credit import group_trajectories, is_target
from agentlightning.credit.agent_rewards import team_score
from agentlightning.errors import ConfigError, DatasetError
from agentlightning.policy.base import UpdateOptions
from agentlightning.policy.losses import COUNT, FACTOR, MARGIN, REF_LOGPROBS, DPOLoss, Loss, PreferenceLoss
from agentlightning.trajectory import TokenTree, TrainingSample, Trajectory
from agentlightning.util.settings import SettingsSignature


class DPOConfig(RolloutsConfig):
    """The settings of preference learning.

    >>> agl.config.DPOConfig(loss="simpo").loss.gamma
    1.0
    """

    type: str = "dpo"
    """Which algorithm this is."""
    data: str | None = None
    """A JSONL, JSON, CSV or Parquet file of pairs to learn from, in place of sessions."""
    loss: Loss = Field(default_factory=DPOLoss)
    """dpo, ipo, kto or simpo, or a table with its `type` and settings."""
    pairs: PairsOf = "sessions"
    """What is compared: sessions, whole sessions of one task; branches, two answers to the same prompt tokens."""
    pairs_per_task: int = Field(default=4, ge=1)
    """Pairs of each task in a step, at most: those whose rewards differ most, each session about equally often."""
    min_difference: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Pairs whose rewards differ by less are left out; equal ones always are."""
    success_threshold: float = Field(default=0.5, allow_inf_nan=False)
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

    __signature__ = SettingsSignature(DPOConfig)

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
        config, collected = self.config, await self._rollouts(training)
        target = self._target(training)
        compared, counts = await asyncio.to_thread(self.comparisons, collected.trajectories, target, training.step)
        metrics = {**reward_metrics(collected, config.reward_weights), **counts}
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
            scored = [(each, float(team_score(each, config.reward_weights) or 0.0)) for each in group]
            if not self._loss.paired:
                found += [
                    Comparison.of_one(each, reward >= config.success_threshold, target) for each, reward in scored
                ]
                continue
            pairs = preference_pairs(
                scored,
                of=config.pairs,
                most=config.pairs_per_task,
                min_difference=config.min_difference,
                target=target,
                rng=rng,
            )
            counts["groups_without_pairs"] += not pairs
            found += [Comparison.of_pair(pair) for pair in pairs]
        found = [each for each in found if any(each.factors.values())]
        return found, {"groups_without_pairs": float(counts["groups_without_pairs"]), "pairs": float(len(found))}

    def check_data(self, trajectories: Sequence[Trajectory], target: str | None) -> None:
        """Raises DatasetError where nothing can be compared, saying what is missing."""
        refused = {each.rollout_id for each in unusable(trajectories, self.config.reward_weights, target)}
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
            f" and the others no two that differ in reward by more than {self.config.min_difference:g}.{branches}"
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
            reference = await scores(training, trees, REF_LOGPROBS, Models(self.config.reference))
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
    factors: Mapping[tuple[str, str], int]
    """By (rollout_id, span_id), 1 for calls of what is preferred, -1 for those of the other, 0 for those of both."""
    is_preferred: bool = True
    """False for one session that is bad."""

    @classmethod
    def of_pair(cls, pair: Preference) -> Comparison:
        """Calls that both went through have no part in the difference."""
        both = [pair.chosen, pair.rejected]
        factors = {(t.rollout_id, t.span_id): 1 for t in pair.chosen.transitions}
        factors |= {(t.rollout_id, t.span_id): -1 for t in pair.rejected.transitions}
        factors |= {call: 0 for shared in shared_calls(both).items() for call in shared}
        return cls(token_tree(both), factors)

    @classmethod
    def of_one(cls, trajectory: Trajectory, good: bool, target: str | None) -> Comparison:
        calls = [call for call in trajectory.transitions if is_target(call.agent, target)]
        sign = 1 if good else -1
        return cls(token_tree([trajectory]), {(t.rollout_id, t.span_id): sign for t in calls}, good)

    def node_factors(self, *, mean: bool) -> list[float]:
        """s of the tokens of each node; with `mean`, divided by the tokens of its sequence."""
        signs = [self._sign(index) for index in range(len(self.tree.nodes))]
        if not mean:
            return [float(sign) for sign in signs]
        lengths = Counter[int]()
        for sign, node in zip(signs, self.tree.nodes, strict=True):
            lengths[sign] += len(node.token_ids)
        return [sign / lengths[sign] if sign else 0.0 for sign in signs]

    def _sign(self, index: int) -> int:
        node = self.tree.nodes[index]
        return self.factors.get((node.rollout_id or "", node.call or ""), 0) if node.sampled else 0

    def sample(self, factors: Sequence[float], margin: float, share: float) -> TrainingSample:
        """The tree with the columns of preference losses."""
        import numpy as np

        nodes = self.tree.nodes
        count = sum(len(node.token_ids) for node, factor in zip(nodes, factors, strict=True) if factor)
        values: dict[str, list[Any]] = {"weights": [], MARGIN: [], FACTOR: [], COUNT: []}
        for node, factor in zip(nodes, factors, strict=True):
            length = len(node.token_ids) if node.sampled else 0
            own = {"weights": share if factor else 0.0, MARGIN: margin, FACTOR: factor, COUNT: count}
            for name, value in own.items():
                values[name].append(np.full(length, value, np.float32))
        return TrainingSample(self.tree, columns=values, share=share)
