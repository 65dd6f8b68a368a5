"""LightningRL computes the columns that its losses need, shapes rewards, and resamples groups that teach nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from agentlightning.algorithms.lightning_rl import (
    PRESETS,
    LightningRL,
    LightningRLConfig,
    OverlongPenalty,
    with_columns,
)
from agentlightning.algorithms.training import Collected
from agentlightning.assemble import TURN_LIMIT_REACHED, token_tree
from agentlightning.credit.base import credit_rule
from agentlightning.errors import ConfigError, PolicyError
from agentlightning.policy.base import UpdateOptions
from agentlightning.policy.learner import Learner
from agentlightning.policy.losses import TEACHER_LOGPROBS, LossValue, TokenBatch, TokenLoss
from agentlightning.policy.mismatch import GeometricMask, Truncation
from agentlightning.trajectory import TrainingSample, Trajectory, Transition
from agentlightning.util.settings import dump_toml, load_settings

NAMES = sorted(PRESETS)


def rollout(name: str, reward: float | None, group: str = "g", tokens: int = 2, finish: str = "stop") -> Trajectory:
    sampled, logprobs = tuple(range(3, 3 + tokens)), (-0.1,) * tokens
    call = Transition(name, "a", name, 1, (1, 2), sampled, logprobs, finish_reason=finish)
    return Trajectory(name, "a", (call,), reward=reward, group=group)


class FakeLearner:
    """Scores every token by -0.1 under the policy and by -0.4 under a reference."""

    def __init__(self) -> None:
        self.calls: list[tuple[set[str], Path | None]] = []
        self.adapters: list[str | None] = []
        self.policy_version = 5
        self.updates_of = int

    async def score(
        self, trees: Sequence[Any], what: set[str], *, reference: Path | None = None, adapter: str | None = None
    ) -> Any:
        self.calls.append((set(what), reference))
        self.adapters.append(adapter)
        value = {"logprobs": -0.1 - len(adapter or ""), "ref_logprobs": -0.4}
        return {
            name: [
                tuple(np.full(len(n.token_ids) if n.sampled else 0, value[name], np.float32) for n in tree.nodes)
                for tree in trees
            ]
            for name in what
        }


class FakeTraining:
    """Gives the batches it was made with, one for each request."""

    step = 0
    target_agent = None

    def __init__(self, *batches: Sequence[Trajectory]) -> None:
        self.batches = list(batches)
        self.learner = FakeLearner()
        self.requested: list[int] = []
        self.updates: list[tuple[list[Any], dict[str, Any]]] = []
        self.metrics: dict[str, float] = {}
        self.collected: Collected | None = None

    async def starting_weights(self) -> Path:
        return Path("start")

    async def collect(self, *, tasks: int, **request: Any) -> Collected:
        self.requested.append(tasks)
        return Collected(tuple(self.batches.pop(0)), seconds=1.0)

    async def update(self, samples: list[Any], options: UpdateOptions) -> dict[str, float]:
        self.updates.append((list(samples), options))
        return {"loss": 0.5}

    async def finish_step(self, collected: Collected, metrics: dict[str, float]) -> None:
        self.step += 1
        self.collected, self.metrics = collected, metrics


async def trained(*batches: Sequence[Trajectory], **settings: Any) -> FakeTraining:
    training = FakeTraining(*batches)
    await LightningRL(steps=1, tasks_per_step=1, group_size=2, **settings).run(training)  # type: ignore[arg-type]
    return training


GOOD_AND_BAD = (rollout("r1", 1.0), rollout("r2", 0.0))


async def test_a_column_is_computed_only_if_a_loss_needs_it() -> None:
    training = await trained(GOOD_AND_BAD)
    assert training.learner.calls == []
    assert training.updates[0][1].mismatch is None


@pytest.mark.parametrize(("setting", "expected"), [(None, Path("start")), ("models/base", Path("models/base"))])
async def test_the_reference_is_the_starting_weights_or_the_one_that_is_set(setting: Any, expected: Path) -> None:
    training = await trained(GOOD_AND_BAD, loss=["ppo", "kl"], reference=setting)
    assert training.learner.calls == [({"ref_logprobs"}, expected)]
    ((sample,), _), = training.updates  # fmt: skip
    assert {float(v) for column in sample.columns["ref_logprobs"] for v in column} == {float(np.float32(-0.4))}


def two_agents() -> list[Trajectory]:
    """Rollouts in which an agent with an adapter of its own speaks first, and a shared one after it."""

    def both(name: str, reward: float) -> Trajectory:
        first = Transition(
            name, "a", f"{name}-1", 1, (1, 2), (3, 4), (-0.1,) * 2, agent="writer", model="policy:writer"
        )
        second = Transition(name, "a", f"{name}-2", 2, (1, 2, 5), (6,), (-0.1,), agent="planner", model="policy")
        return Trajectory(name, "a", (first, second), reward=reward, group="g")

    return [both("r1", 1.0), both("r2", 0.0)]


AGENTS: dict[str, Any] = {"writer": {"type": "lora", "r": 2}, "planner": "shared"}


async def test_adapters_of_several_agents_are_compared_with_the_weights_that_the_run_started_from() -> None:
    training = await trained(two_agents(), loss=["ppo", "kl"], agents=AGENTS)
    assert training.learner.calls == [({"ref_logprobs"}, Path("start"))], "None where the run says so"
    assert training.learner.adapters == [None], "the weights below are the same for all of them"


async def test_the_proximal_policy_of_a_sample_is_its_own_adapter() -> None:
    training = await trained(two_agents(), mismatch="icepop", agents=AGENTS)
    assert sorted(map(str, training.learner.adapters)) == ["None", "writer"]
    (samples, _), = training.updates  # fmt: skip
    found = {
        sample.adapter: {float(v) for column in sample.columns["proximal_logprobs"] for v in column}
        for sample in samples
    }
    assert found == {"writer": {float(np.float32(-6.1))}, None: {float(np.float32(-0.1))}}


async def test_a_teacher_scores_the_tokens_of_the_policy() -> None:
    training = await trained(GOOD_AND_BAD, loss="distill", teacher="models/large")
    assert training.learner.calls == [({"ref_logprobs"}, Path("models/large"))]
    ((sample,), _), = training.updates  # fmt: skip
    assert "teacher_logprobs" in sample.columns
    with pytest.raises(ConfigError, match='"distill" learns from a teacher; set teacher=DIRECTORY'):
        LightningRL(loss="distill")
    with pytest.raises(ConfigError, match="teacher='big' is used by no loss"):
        LightningRL(teacher="big")


async def test_a_loss_of_ones_own_may_learn_from_a_teacher() -> None:
    class Imitation(TokenLoss):
        needs: ClassVar[frozenset[str]] = frozenset({TEACHER_LOGPROBS})

        def __call__(self, tokens: TokenBatch) -> LossValue:
            raise NotImplementedError

    training = await trained(GOOD_AND_BAD, loss=Imitation(), teacher="models/large")
    assert training.learner.calls == [({"ref_logprobs"}, Path("models/large"))]
    with pytest.raises(ConfigError, match='Imitation" learns from a teacher; set teacher=DIRECTORY'):
        LightningRL(loss=Imitation())


async def test_a_correction_of_mismatch_computes_the_proximal_policy_and_reaches_the_update() -> None:
    training = await trained(GOOD_AND_BAD, mismatch=["truncate", {"type": "geometric_mask", "low": 0.9}])
    assert training.learner.calls == [({"logprobs"}, None)]
    ((sample,), options), = training.updates  # fmt: skip
    assert "proximal_logprobs" in sample.columns
    assert options.mismatch == (Truncation(), GeometricMask(low=0.9))
    assert (await trained(GOOD_AND_BAD, mismatch="off")).learner.calls == []
    with pytest.raises(ConfigError, match="mismatch corrects the ratios of other losses"):
        LightningRL(loss="dppo", mismatch="icepop")


async def test_the_proximal_policy_is_computed_by_a_pass_or_interpolated_by_age() -> None:
    by_pass = await trained(GOOD_AND_BAD, proximal="pass")
    assert by_pass.learner.calls == [({"logprobs"}, None)]
    assert "proximal_logprobs" in by_pass.updates[0][0][0].columns
    older = [replace_version(each, version) for each, version in zip(GOOD_AND_BAD, (5, 2), strict=True)]
    between = await trained(older, proximal="interpolate")
    assert between.learner.calls == [], "no forward pass"
    samples = between.updates[0][0]
    found = {
        node.rollout_id: column.tolist()
        for sample in samples
        for node, column in zip(sample.tree.nodes, sample.columns["interpolation"], strict=True)
        if node.sampled
    }
    assert found == {"r1": [0, 0], "r2": [0.75, 0.75]}
    assert (await trained(GOOD_AND_BAD, proximal="behavior")).learner.calls == []


@pytest.mark.parametrize(
    ("resumes", "now", "ages"),
    [
        ((), 5, {3: 2, 5: 0}),
        (((5, 9),), 10, {4: 2, 5: 1, 9: 1, 10: 0}),
        (((5, 9),), 10, {6: 0}),  # of a step that the killed process did and this one repeats
        (((2, 4), (6, 20)), 21, {1: 4, 4: 3, 6: 1, 20: 1, 21: 0}),
    ],
)
async def test_the_age_of_a_token_is_counted_in_updates_across_resumes(
    resumes: Any, now: int, ages: dict[int, int]
) -> None:
    trained_with = FakeTraining([])
    learner = Learner(SimpleNamespace(policy_version=now), nullcontext, 100, resumes=resumes)  # type: ignore[arg-type]
    trained_with.learner = learner  # type: ignore[assignment]
    group = [replace_version(rollout(f"r{version}", 0.0), version) for version in ages]
    samples = [TrainingSample(token_tree(group))]
    [sample] = await with_columns(trained_with, samples, {"interpolation"}, {}, bool)  # type: ignore[arg-type]
    found = [float(column[0]) for column in sample.columns["interpolation"] if len(column)]
    assert found == pytest.approx([age / (age + 1) for age in ages.values()])


async def test_a_token_without_a_version_cannot_be_interpolated() -> None:
    with pytest.raises(PolicyError, match=r'has no policy_version .* use proximal="pass"'):
        await trained(GOOD_AND_BAD, proximal="interpolate")


def replace_version(trajectory: Trajectory, version: int) -> Trajectory:
    calls = tuple(dataclasses.replace(call, policy_version=version) for call in trajectory.transitions)
    return dataclasses.replace(trajectory, transitions=calls)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"proximal": "pass", "loss": "dppo"}, 'proximal="pass" is used by none of the losses "dppo"'),
        ({"proximal": "interpolate", "loss": "nll"}, "is used by none of the losses"),
        ({"proximal": "interpolate", "mismatch": "geometric_mask"}, 'use proximal="pass", or truncate'),
        ({"proximal": "interpolate", "mismatch": {"type": "truncate", "level": "sequence"}}, 'use proximal="pass"'),
        ({"proximal": "behavior", "mismatch": "truncate"}, "leave mismatch out"),
        ({"proximal": "interpolate", "agents": {"a": {"type": "lora"}}}, "counts versions of one policy"),
        ({"proximal": "best"}, "proximal"),
        ({"replay": {}, "loss": "nll"}, "leave replay out, or use ppo"),
        ({"replay": {}, "loss": ["ppo", "nll"]}, "imitates replayed tokens without a ratio"),
        ({"replay": {}, "loss": ["entropy", "kl"]}, "none has a ratio"),
    ],
)
def test_a_proximal_policy_or_a_replay_that_cannot_work_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LightningRL(**settings)


def test_interpolation_is_refused_where_no_token_is_of_older_weights() -> None:
    with pytest.raises(ConfigError, match=r"does nothing with run\.max_staleness=0"):
        LightningRL(proximal="interpolate").check_staleness(0)
    LightningRL(proximal="interpolate").check_staleness(1)
    LightningRL(proximal="interpolate", replay={}).check_staleness(0)


async def test_the_divergence_from_the_reference_is_taken_from_the_reward() -> None:
    """R' = R - beta sum_t (logprob - ref_logprob): two tokens of 0.3 against four, otherwise equal rewards."""
    batch = (rollout("short", 1.0, tokens=2), rollout("long", 1.0, tokens=4))
    training = await trained(batch, kl_in_reward=0.5)
    assert training.metrics["reward_kl"] == pytest.approx((0.6 + 1.2) / 2, rel=1e-5)
    assert training.metrics["reward"] == 1.0, "the reward that was given is reported"
    ((sample,), _), = training.updates  # fmt: skip
    gains = {n.rollout_id: float(a[0]) for n, a in zip(sample.tree.nodes, sample.advantages, strict=True) if len(a)}
    assert gains["short"] == pytest.approx(1.0) == -gains["long"]


def test_the_overlong_penalty_is_equation_13_of_dapo() -> None:
    setting = OverlongPenalty(max_tokens=100, buffer=20)

    def literal(length: int) -> float:
        if length <= 100 - 20:
            return 0.0
        return ((100 - 20) - length) / 20 if length <= 100 else -1.0

    lengths = range(0, 130)
    assert [setting.of_length(n) for n in lengths] == pytest.approx([literal(n) for n in lengths])
    assert OverlongPenalty(max_tokens=100, buffer=20, penalty=0.5).of_length(500) == -0.5
    with pytest.raises(ConfigError, match="buffer=200 is longer than max_tokens=100"):
        LightningRL(overlong={"max_tokens": 100, "buffer": 200})


async def test_a_rollout_that_is_too_long_is_penalised_and_counted() -> None:
    batch = (rollout("short", 1.0, tokens=2), rollout("long", 1.0, tokens=4))
    training = await trained(batch, overlong={"max_tokens": 4, "buffer": 2})
    assert (training.metrics["overlong_penalty"], training.metrics["overlong_rollouts"]) == (-0.5, 1.0)
    assert len(training.updates) == 1, "equal rewards, and yet a signal"


@pytest.mark.parametrize("coefficient", [0.1, 0.5, 2.0])
async def test_each_nat_of_divergence_costs_the_coefficient(coefficient: float) -> None:
    """R' = R - beta sum_t (logprob - ref_logprob), 0.3 for each of two and of four tokens."""
    batch = (rollout("short", 1.0, tokens=2), rollout("long", 1.0, tokens=4))
    training = await trained(batch, kl_in_reward=coefficient, credit="reinforce")
    ((sample,), _), = training.updates  # fmt: skip
    gains = {n.rollout_id: float(a[0]) for n, a in zip(sample.tree.nodes, sample.advantages, strict=True) if len(a)}
    assert gains == pytest.approx({"short": 1 - coefficient * 0.6, "long": 1 - coefficient * 1.2}, rel=1e-5)


async def test_truncated_rollouts_are_counted_and_treated_as_configured() -> None:
    batch = (rollout("done", 0.0), rollout("cut", 1.0, finish="length"))

    def learned(training: FakeTraining) -> dict[Any, tuple[float, bool]]:
        ((sample,), _), = training.updates  # fmt: skip
        rows = zip(sample.tree.nodes, sample.advantages, sample.weights, strict=True)
        return {n.rollout_id: (float(a[0]), bool(w.any())) for n, a, w in rows if len(a)}

    plain = await trained(batch)
    assert plain.metrics["rollouts_truncated"] == 1.0
    assert learned(plain) == {"done": (-1.0, True), "cut": (1.0, True)}
    assert learned(await trained(batch, truncated_reward=-1.0)) == {"done": (1.0, True), "cut": (-1.0, True)}
    assert learned(await trained(batch, mask_truncated=True)) == {"done": (-1.0, True), "cut": (1.0, False)}

    limited = (batch[0], dataclasses.replace(rollout("cut", 1.0), metadata={TURN_LIMIT_REACHED: 1}))
    masked = await trained(limited, mask_truncated=True)
    assert masked.metrics["rollouts_truncated"] == 1.0, "the limit on turns truncates a rollout, too"
    assert learned(masked) == {"done": (-1.0, True), "cut": (1.0, False)}


async def test_groups_without_spread_are_replaced_up_to_a_bound_and_counted() -> None:
    def group(name: str, *rewards: float) -> list[Trajectory]:
        return [rollout(f"{name}{i}", reward, name) for i, reward in enumerate(rewards)]

    batches = [[*group("a", 1, 1), *group("b", 1, 0), *group("c", 0, 0)], [*group("d", 0, 0), *group("e", 1, 0)],
               group("f", 1, 1), group("g", 1, 0)]  # fmt: skip
    training = FakeTraining(*batches)
    await LightningRL(steps=1, tasks_per_step=3, group_size=2, dynamic_sampling=2).run(training)  # type: ignore[arg-type]
    assert training.requested == [3, 2, 1], "the bound ends it"
    assert training.metrics["groups_resampled"] == 3
    assert (training.metrics["groups_trained"], training.metrics["groups_without_spread"]) == (2, 4)
    assert training.collected is not None
    assert (training.collected.rollouts, training.collected.seconds) == (12, 3.0)

    plain = await trained([rollout("x", 1.0), rollout("y", 1.0)])
    assert plain.requested == [1]
    assert "groups_resampled" not in plain.metrics


# -- groups whose rewards are all equal ------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [0.0, 1.0])
@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "distill", "teacher": "models/large"},
        {"loss": "kl"},
        {"loss": ["ppo", "kl"]},
        {"loss": ["gspo", {"type": "distill"}], "teacher": "models/large"},
        {"loss": "nll"},
        {"loss": ["ppo", "entropy"]},
        {"loss": "awr", "equal_groups": "keep"},
        {"loss": "distill", "teacher": "models/large", "dynamic_sampling": 1},
        {"preset": "grpo"},
    ],
)
async def test_losses_in_which_rewards_play_no_part_learn_from_equal_rewards(
    settings: dict[str, Any], reward: float
) -> None:
    batch = (rollout("r1", reward), rollout("r2", reward))
    training = await trained(batch, (), **settings)
    ((sample,), _), = training.updates  # fmt: skip
    assert sum(float(weights.sum()) for weights in sample.weights) == pytest.approx(1.0)
    assert not any(advantages.any() for advantages in sample.advantages)
    counted = ("groups_without_spread", "groups_trained")
    uses_rewards = LightningRL(steps=1, **settings).config.reads_advantages
    assert [training.metrics[name] for name in counted] == ([1, 0] if uses_rewards else [0, 1])


@pytest.mark.parametrize(
    ("settings", "has_proximal"),
    [
        ({"loss": "gspo"}, True),
        ({"preset": "gspo"}, True),
        ({"loss": "gspo", "proximal": "behavior"}, False),
        ({}, False),
    ],
)
async def test_gspo_is_clipped_around_the_trainers_own_probabilities(
    settings: dict[str, Any], has_proximal: bool
) -> None:
    training = await trained(GOOD_AND_BAD, **settings)
    ((sample, *_), _), = training.updates  # fmt: skip
    assert ("proximal_logprobs" in sample.columns) is has_proximal


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", {"type": "importance", "level": "rollout"}])
async def test_where_nothing_learns_from_equal_rewards_nothing_is_computed(loss: Any) -> None:
    equal = (rollout("r1", 1.0), rollout("r2", 1.0))
    training = await trained(equal, loss=loss, mismatch="truncate")
    assert (training.updates, training.learner.calls) == ([], [])
    both = FakeTraining([*GOOD_AND_BAD, rollout("r3", 1.0, "h"), rollout("r4", 1.0, "h")])
    await LightningRL(steps=1, tasks_per_step=2, group_size=2, loss=loss, mismatch="truncate").run(both)  # type: ignore[arg-type]
    (samples, _), = both.updates  # fmt: skip
    assert ["proximal_logprobs" in sample.columns for sample in samples] == [True, False]
    assert [sample.share for sample in samples] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, True),
        *(({"preset": name}, name != "dapo") for name in NAMES if name != "reinforce++"),
        ({"preset": "grpo", "equal_groups": "filter"}, False),
        ({"loss": "awr"}, False),
        ({"loss": ["awr", "kl"]}, False),
        ({"preset": "dapo", "equal_groups": "keep"}, True),
        ({"dynamic_sampling": 1}, False),
        ({"dynamic_sampling": 1, "equal_groups": "keep"}, True),
    ],
)
async def test_groups_with_equal_rewards_are_kept_as_in_grpo_or_filtered_as_in_dapo(
    settings: dict[str, Any], kept: bool
) -> None:
    batch = [*GOOD_AND_BAD, rollout("r3", 1.0, "h"), rollout("r4", 1.0, "h")]
    training = FakeTraining(batch)
    await LightningRL(steps=1, tasks_per_step=1, group_size=2, **settings).run(training)  # type: ignore[arg-type]
    (samples, _), = training.updates  # fmt: skip
    assert len(samples) == 1 + kept
    assert training.metrics["groups_without_spread"] == 1


def test_to_filter_groups_by_rewards_that_play_no_part_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'goes by rewards, which play no part in loss "nll"; keep them'):
        LightningRL(loss="nll", equal_groups="filter")


@pytest.mark.parametrize("rewards", [[[0.0], [1.0], [0.0], [1.0]], [[0.0, 0.0], [1.0, 1.0]], [[0.0, 1.0], [0.0, 0.0]]])
async def test_reinforce_pp_learns_from_rewards_of_0_and_1(rewards: list[list[float]]) -> None:
    batch = [rollout(f"{g}.{i}", r, str(g)) for g, own in enumerate(rewards) for i, r in enumerate(own)]
    training = FakeTraining(batch)
    settings = {"preset": "reinforce++", "kl_in_reward": 0.0, "group_size": len(rewards[0])}
    await LightningRL(steps=1, tasks_per_step=len(rewards), **settings).run(training)  # type: ignore[arg-type]
    (samples, _), = training.updates  # fmt: skip
    found = {
        n.rollout_id: float(a[0]) for s in samples for n, a in zip(s.tree.nodes, s.advantages, strict=True) if len(a)
    }
    given = np.array([each.reward for each in batch], float)
    expected = (given - given.mean()) / given.std()
    assert [found[each.rollout_id] for each in batch] == pytest.approx(expected.tolist(), rel=1e-5)


# -- presets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
async def test_a_preset_trains(name: str) -> None:
    training = await trained(GOOD_AND_BAD, preset=name)
    assert len(training.updates) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_fills_in_what_is_not_given_and_shows_it(name: str, tmp_path: Path) -> None:
    config = LightningRLConfig(preset=name)  # type: ignore[arg-type]
    for field, value in PRESETS[name].items():
        assert getattr(config, field) == getattr(LightningRLConfig(**{field: value}), field), field
    given = LightningRLConfig(preset=name, aggregate="rollout", loss="nll")  # type: ignore[arg-type]
    assert (given.aggregate, given.losses[0].type) == ("rollout", "nll"), "also where that is the default"

    (tmp_path / "run.toml").write_text(dump_toml(given))
    assert load_settings(LightningRLConfig, toml=tmp_path / "run.toml") == given, "a resumed run has the same settings"
    assert LightningRL(preset=name).config == config


def test_the_other_name_of_credit_wins_over_a_preset() -> None:
    assert LightningRL(preset="dapo", credit_assignment="leave_one_out").config.credit == "leave_one_out"


def test_shaping_the_one_reward_of_a_rollout_is_refused_where_several_count() -> None:
    with pytest.raises(ConfigError, match="change the one reward of a rollout"):
        LightningRL(kl_in_reward=0.1, agent_rewards="own")


def test_a_preset_works_in_a_settings_file_and_on_the_command_line(tmp_path: Path) -> None:
    from agentlightning.config import TrainConfig

    (tmp_path / "run.toml").write_text('[algorithm]\npreset = "dapo"\ngroup_size = 4\n')
    config = load_settings(TrainConfig, toml=tmp_path / "run.toml", overrides=["algorithm.aggregate=rollout"])
    assert (config.algorithm.dynamic_sampling, config.algorithm.group_size) == (3, 4)
    assert config.algorithm.aggregate == "rollout"
    assert load_settings(TrainConfig, overrides=["algorithm.preset=gspo"]).algorithm.losses[0].type == "gspo"
    assert load_settings(TrainConfig, overrides=["algorithm.preset=none"]).algorithm.preset is None
    with pytest.raises(ConfigError, match="there is no preset 'dapoo'; choose one of grpo, dr_grpo, dapo"):
        LightningRL(preset="dapoo")


def test_a_preset_that_is_given_as_a_loss_is_named() -> None:
    with pytest.raises(ConfigError, match=r'"grpo" is a preset, .* set preset="grpo"'):
        LightningRL(loss="grpo")


@pytest.mark.parametrize("loss", ["dpo", "kto", ["ppo", "simpo"]])
def test_a_loss_of_preferences_is_refused_before_anything_runs(loss: Any) -> None:
    with pytest.raises(ConfigError, match=r'learns from preferences, .*; use algorithm\.type="dpo"'):
        LightningRL(loss=loss)


def test_a_preset_names_a_credit_rule_that_exists() -> None:
    for name in NAMES:
        credit_rule(PRESETS[name]["credit"])


def test_a_preset_replaces_the_settings_of_a_configuration() -> None:
    base = LightningRLConfig(group_size=4, aggregate="token")
    found = LightningRL(base, preset="gspo").config
    assert (found.group_size, found.aggregate, found.losses[0].type) == (4, "rollout", "gspo")
