"""An update is the same whatever the plan, the order of calls or their division, and it learns."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentlightning.credit import training_samples
from agentlightning.errors import ConfigError, PolicyError, UnfaithfulSampleError
from agentlightning.policy.base import UpdateOptions
from agentlightning.policy.config import OptimizerConfig
from agentlightning.policy.losses import GSPOLoss, LossSetting, NLLLoss
from agentlightning.policy.update.forward import Forward
from agentlightning.policy.update.updater import Updater, means
from agentlightning.trajectory import TrainingSample, Trajectory, Transition

torch.set_num_threads(1)  # more threads cost more than they bring at this size

VOCAB = 50
SHAPE = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.15}


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **HEADS))


def qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, **HEADS, head_dim=8))


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.15)
    )


def mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SHAPE, **HEADS, sliding_window=6))


def hidden_window_in_layers() -> PreTrainedModel:
    """Its local layers cut what they are given to a window, whatever the mask."""
    config = GPTNeoConfig(
        vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        window_size=16, max_position_embeddings=10_000, initializer_range=0.15, bos_token_id=None, eos_token_id=2,
    )  # fmt: skip
    return GPTNeoForCausalLM(config)


def hidden_window_in_mask() -> PreTrainedModel:
    """Its own mask has a window, which its layers do not name."""
    model = MistralForCausalLM(MistralConfig(**SHAPE, **HEADS, sliding_window=16))
    model.config.layer_types = ["full_attention"] * 2
    return model


def made(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    torch.manual_seed(0)
    return build()


@pytest.fixture(scope="module")
def updater() -> Updater:
    return Updater(made(llama))


def call(rollout: str, sequence: int, prompt: Sequence[int], sampled: Sequence[int], **more: Any) -> Transition:
    logprobs = tuple(-2.0 - (token % 7) / 3 for token in sampled)
    name = f"{rollout}-{sequence}"
    return Transition(rollout, "at", name, sequence, tuple(prompt), tuple(sampled), logprobs, **more)


def conversation(rollout: str, seed: int, prompt: Sequence[int], turns: int = 2, **more: Any) -> Trajectory:
    """A rollout whose calls continue one another, each with a few new prompt tokens."""
    draw = random.Random(f"{rollout}{seed}")
    history, calls = list(prompt), list[Transition]()
    for turn in range(turns):
        sampled = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 6))]
        calls.append(call(rollout, turn + 1, history, sampled, **more))
        history += [*sampled, *(draw.randrange(VOCAB) for _ in range(draw.randint(1, 3)))]
    return Trajectory(rollout, "at", tuple(calls), draw.random())


def groups(seed: int = 0, count: int = 2, size: int = 3, turns: int = 2, **more: Any) -> list[list[Trajectory]]:
    draw = random.Random(seed)
    prompts = [[draw.randrange(VOCAB) for _ in range(draw.randint(2, 9))] for _ in range(count)]
    return [[conversation(f"{g}.{i}", seed, p, turns, **more) for i in range(size)] for g, p in enumerate(prompts)]


def samples(made_groups: Sequence[Sequence[Trajectory]]) -> list[TrainingSample]:
    return training_samples(made_groups)[0]


def flat(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    return torch.cat([g.flatten() for g in gradients if g is not None])


def gradient(
    updater: Updater, batch: Sequence[TrainingSample], loss: LossSetting = "ppo", budget: int = 64, **plan: Any
) -> torch.Tensor:
    updater.optimizer.zero_grad()
    updater.accumulate(updater.forward.plan(batch, token_budget=budget, **plan), loss)
    return flat([p.grad for p in updater.optimizer.parameters])


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-6)).item()  # all clipped: no gradient at all


def weights(model: torch.nn.Module) -> torch.Tensor:
    return flat([p.detach() for p in model.parameters()])


# -- the gradient depends on tokens, not on how they are computed ----------------------------------------------------


@pytest.mark.parametrize("build", [llama, qwen3, gpt2, mistral])
@pytest.mark.parametrize("budget", [20, 100, 10_000])
def test_sharing_gives_the_gradient_of_one_row_per_call(build: Any, budget: int) -> None:
    updater = Updater(made(build))
    batch = samples(groups(turns=3))
    expected = gradient(updater, batch, budget=10_000, sharing="rows")
    modes = ("merged", "auto") if build is mistral else ("merged", "auto", "shared")
    for mode in modes:
        assert apart(gradient(updater, batch, budget=budget, sharing=mode), expected) < 1e-5, mode


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("build", [llama, qwen3, gpt2])
def test_joined_rows_are_blind_to_one_another(build: Any, attention: str) -> None:
    updater = Updater(made(build))
    updater.model.set_attn_implementation(attention)
    batch = samples(groups(turns=2))
    batches = updater.forward.plan(batch, sharing="shared", token_budget=10_000)
    assert any(each.joined for each in batches)
    assert apart(gradient(updater, batch, sharing="shared"), gradient(updater, batch, sharing="rows")) < 1e-5


def test_rows_are_joined_only_for_attention_that_takes_a_mask(updater: Updater, monkeypatch: Any) -> None:
    monkeypatch.setattr(updater.model.config, "_attn_implementation", "flash_attention_2")
    assert not any(each.joined for each in updater.forward.plan(samples(groups()), sharing="shared"))


@pytest.mark.parametrize("part", ["model", "decoder"])
def test_a_forward_pass_of_unsloth_is_given_plain_rows_alone(part: str, monkeypatch: Any) -> None:
    updater = Updater(made(llama))
    batch = samples(groups(turns=2))
    expected = gradient(updater, batch, sharing="rows")
    patched = type(updater.model if part == "model" else updater.model.get_decoder())
    theirs = patched.forward

    def forward(self: Any, *args: Any, **inputs: Any) -> Any:
        if part == "model":
            assert inputs.get("attention_mask") is inputs.get(updater.forward.cache_argument) is None, (
                "rows share a pass"
            )
        return theirs(self, *args, **inputs)

    forward.__module__ = "unsloth.models.llama"
    monkeypatch.setattr(patched, "forward", forward)
    batches = updater.forward.plan(batch, token_budget=10_000)
    assert not any(each.joined or each.shared_length for each in batches)
    assert apart(gradient(updater, batch, sharing="auto"), expected) < 1e-5
    with pytest.raises(ConfigError, match="shared"):
        updater.forward.plan(batch, sharing="shared")


def test_a_prefix_that_holds_samples_is_shared_with_its_gradient(updater: Updater, monkeypatch: Any) -> None:
    forked = [
        Trajectory(
            name,
            "at",
            (
                call(name, 1, [1, 2, 3], [10 + i, 11, 12]),
                call(name, 2, [1, 2, 3, 10 + i, 11, 12, 4], [13, 14]),
                call(name, 3, [1, 2, 3, 10 + i, 11, 12, 5], [15, 16]),
                call(name, 4, [1, 2, 3, 10 + i, 11, 12, 6], [15]),
            ),
            float(i),
        )
        for i, name in enumerate("ab")
    ]
    alone = training_samples([[name] for name in forked], "reinforce")[0]
    for batch in (samples([forked]), alone):
        expected = gradient(updater, batch, sharing="rows")
        for lines in (True, False):
            monkeypatch.setattr(updater.forward, "traits", replace(updater.forward.traits, joins=lines))
            (shared,) = updater.forward.plan(batch, sharing="shared")
            assert shared.joined == lines == (not shared.shared_length)
            assert apart(gradient(updater, batch, sharing="shared"), expected) < 1e-5


def _divide(trajectory: Trajectory, draw: random.Random) -> Trajectory:
    """The same tokens by more calls: an answer is asked for in two parts."""
    calls: list[Transition] = []
    for each in trajectory.transitions:
        at = draw.randint(0, len(each.response_token_ids) - 1)
        if at:
            longer = each.prompt_token_ids + each.response_token_ids[:at]
            calls.append(replace(each, response_token_ids=each.response_token_ids[:at], logprobs=each.logprobs[:at]))
            each = replace(each, prompt_token_ids=longer, response_token_ids=each.response_token_ids[at:])
            each = replace(each, span_id=f"{each.span_id}+", logprobs=each.logprobs[at:])
        calls.append(each)
    return replace(trajectory, transitions=tuple(calls))


def _reorder(trajectory: Trajectory, draw: random.Random) -> Trajectory:
    order = draw.sample(range(100), len(trajectory.transitions))
    calls = [replace(c, sequence_id=n) for c, n in zip(trajectory.transitions, order, strict=True)]
    return replace(trajectory, transitions=tuple(sorted(calls, key=lambda c: c.sequence_id)))


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.sampled_from([_divide, _reorder]), st.sampled_from(["rows", "merged", "shared"]))
def test_dividing_merging_or_reordering_calls_leaves_the_gradient_unchanged(
    updater: Updater, seed: int, change: Any, mode: Any
) -> None:
    draw = random.Random(seed)
    plain = groups(seed, count=draw.randint(1, 3), size=draw.randint(2, 4), turns=draw.randint(1, 3))
    changed = [draw.sample([change(t, draw) for t in group], len(group)) for group in plain]
    expected = gradient(updater, samples(plain), sharing="merged")
    assert apart(gradient(updater, samples(changed), sharing=mode), expected) < 1e-5


@settings(max_examples=10)
@given(st.integers(0, 10_000), st.integers(1, 80))
def test_micro_batches_of_any_size_add_up(updater: Updater, seed: int, budget: int) -> None:
    batch = samples(groups(seed))
    assert apart(gradient(updater, batch, budget=budget), gradient(updater, batch, budget=10_000)) < 1e-5


# -- the gradient is the right one -----------------------------------------------------------------------------------


def _score(model: PreTrainedModel, each: Transition) -> torch.Tensor:
    """log p of an answer, written down plainly."""
    ids = torch.tensor([[*each.prompt_token_ids, *each.response_token_ids]])
    logits = model(ids).logits[0, len(each.prompt_token_ids) - 1 : -1] / each.temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(each.response_token_ids)[:, None])[:, 0]


def test_on_policy_the_gradient_is_that_of_reinforce(updater: Updater) -> None:
    model = updater.model
    with torch.no_grad():
        batch = [
            [
                replace(
                    t, transitions=tuple(replace(c, logprobs=tuple(_score(model, c).tolist())) for c in t.transitions)
                )
                for t in group
            ]
            for group in groups(temperature=0.7)
        ]
    metrics = means(updater.accumulate(updater.forward.plan(samples(batch))))
    found = gradient(updater, samples(batch))

    updater.optimizer.zero_grad()
    for group in batch:
        rewards = torch.tensor([t.reward for t in group])
        advantages = (rewards - rewards.mean()) / rewards.std(correction=0)
        for trajectory, advantage in zip(group, advantages, strict=True):
            count = sum(len(c.response_token_ids) for c in trajectory.transitions)
            for each in trajectory.transitions:
                (-advantage * _score(model, each).sum() / count / 6).backward()
    assert apart(found, flat([p.grad for p in model.parameters()])) < 1e-5
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-4)


def test_supervised_learning_maximises_the_answers_whatever_they_were_sampled_with(updater: Updater) -> None:
    batch = samples(groups(temperature=0.5))
    greedy = [
        replace(s, tree=replace(s.tree, nodes=tuple(replace(n, temperature=0.0) for n in s.tree.nodes))) for s in batch
    ]
    expected = gradient(updater, samples(groups()), NLLLoss())
    assert torch.equal(gradient(updater, greedy, NLLLoss()), expected)
    copied = Updater(copy.deepcopy(updater.model), OptimizerConfig(lr=1e-2))
    surprise = [copied.step(greedy, UpdateOptions(loss="nll"))["nll"] for _ in range(10)]
    assert surprise[-1] < surprise[0] / 2


def test_the_factor_of_an_update_multiplies_the_learning_rate_of_that_update_alone(updater: Updater) -> None:
    batch, config = samples(groups()), OptimizerConfig(lr=1e-3)
    slowed = Updater(copy.deepcopy(updater.model), config)
    slow = Updater(copy.deepcopy(updater.model), config.model_copy(update={"lr": 1e-4}))
    rates = [slowed.step(batch, UpdateOptions(lr_factor=0.1))["lr"], slow.step(batch)["lr"]]
    assert rates == pytest.approx([1e-4, 1e-4])
    for ours, theirs in zip(slowed.model.parameters(), slow.model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-7)
    assert slowed.step(batch)["lr"] == pytest.approx(1e-3)


def test_rewarded_answers_become_likelier() -> None:
    model = made(llama)
    updater = Updater(model, OptimizerConfig(lr=1e-3))
    good, bad = call("a", 1, [1, 2, 3], [7]), call("b", 1, [1, 2, 3], [8])
    for _ in range(20):
        with torch.no_grad():
            calls = [replace(c, logprobs=tuple(_score(model, c).tolist())) for c in (good, bad)]
        pair = [Trajectory(c.rollout_id, "at", (c,), reward) for c, reward in zip(calls, (1.0, 0.0), strict=True)]
        updater.step(samples([pair]))
    probability = _score(model, good).exp() / (_score(model, good).exp() + _score(model, bad).exp())
    assert probability.item() > 0.9


# -- steps -----------------------------------------------------------------------------------------------------------


def test_a_step_reports_what_it_did() -> None:
    batch = samples(groups())
    metrics = Updater(made(llama), OptimizerConfig(lr=1e-3)).step(batch)
    sampled = sum(s.tree.num_sampled for s in batch)
    assert (metrics["tokens_trained"], metrics["optimizer_steps"], metrics["skipped_steps"]) == (sampled, 1.0, 0.0)
    assert 0 < metrics["entropy"] < torch.tensor(VOCAB).log().item()
    assert (metrics["lr"], metrics["micro_batches"] > 0, metrics["grad_norm"] > 0) == (1e-3, True, True)
    assert sum(s.tree.num_tokens for s in batch) <= metrics["tokens_computed"] <= 10_000


def test_minibatches_are_optimiser_steps_of_their_own_scaled_to_a_whole_batch() -> None:
    batch = samples(groups(count=2))
    whole, parts = Updater(made(llama), OptimizerConfig(lr=1e-3)), Updater(made(llama), OptimizerConfig(lr=1e-3))
    metrics = whole.step(batch, UpdateOptions(minibatches=2))
    for each in batch:
        total = sum(float(w.sum()) for w in each.weights)
        parts.step([replace(each, weights=[w / total for w in each.weights])])
    assert metrics["optimizer_steps"] == 2.0
    assert torch.allclose(weights(whole.model), weights(parts.model), atol=1e-7)


def test_what_sampler_and_trainer_disagree_about_is_measured_before_the_first_step() -> None:
    made_samples = samples(groups(3, 4))

    def metrics(lr: float, minibatches: int) -> dict[str, float]:
        return Updater(made(llama), OptimizerConfig(lr=lr)).step(made_samples, UpdateOptions(minibatches=minibatches))

    one = metrics(1e-3, 1)
    assert one["mismatch_kl"] == pytest.approx(one["approx_kl"])
    slow, fast = metrics(1e-6, 2), metrics(1e-1, 2)
    assert fast["approx_kl"] != pytest.approx(slow["approx_kl"], rel=1e-3), "the second step sees other weights"
    assert fast["mismatch_kl"] == slow["mismatch_kl"]
    assert slow["mismatch_kl"] > 0


def test_several_losses_add_up_each_by_its_coefficient(updater: Updater) -> None:
    batch = samples(groups())
    several = gradient(updater, batch, ["ppo", {"type": "nll", "coefficient": 0.1}])
    ppo, nll = (gradient(updater, batch, name) for name in ("ppo", "nll"))
    assert apart(several, ppo + 0.1 * nll) < 1e-5
    metrics = Updater(made(llama)).step(batch, UpdateOptions(loss=["ppo", "cispo", "nll"]))
    assert {"ratio", "cispo_ratio", "nll"} <= set(metrics)


@pytest.mark.parametrize("mode", ["rows", "merged", "shared"])
@pytest.mark.parametrize("budget", [20, 10_000])
def test_a_loss_over_whole_calls_has_one_gradient_however_they_are_computed(
    updater: Updater, mode: Any, budget: int
) -> None:
    wide = GSPOLoss(clip_low=0.9, clip_high=9.0)
    forked = Trajectory("a", "at", (call("a", 1, [1, 2], [5, 6, 7]), call("a", 2, [1, 2, 5, 8], [9, 10])), 1.0)
    batch = samples([*groups(turns=3), [forked, Trajectory("b", "at", (call("b", 1, [1, 2], [5, 6]),), 0.0)]])
    expected = gradient(updater, batch, wide, budget=10_000, sharing="rows")
    assert apart(gradient(updater, batch, wide, budget=budget, sharing=mode), expected) < 1e-5


def test_a_column_that_a_loss_needs_is_asked_for_by_name() -> None:
    bare = [TrainingSample(each.tree, weights=each.weights) for each in samples(groups())]
    with pytest.raises(PolicyError, match=r'loss "ppo" needs the columns \[\'advantages\'\]'):
        Updater(made(llama)).step(bare)
    assert Updater(made(llama)).step(bare, UpdateOptions(loss="nll"))["optimizer_steps"] == 1.0


def test_tokens_without_advantage_cost_nothing() -> None:
    (batch,) = samples(groups(count=1, size=3))
    mute = {batch.tree.nodes[i].rollout_id for i in batch.tree.leaves()[:2]}
    quiet = tuple(
        tuple(0.0 if n.rollout_id in mute else a for a in advantages)
        for n, advantages in zip(batch.tree.nodes, batch.advantages, strict=True)
    )
    updater = Updater(made(llama))
    some = updater.step([replace(batch, advantages=quiet)])
    assert some["tokens_computed"] < updater.step([batch])["tokens_computed"]
    none = tuple((0.0,) * len(a) for a in batch.advantages)
    before = weights(updater.model)
    nothing = updater.step([replace(batch, advantages=none)])
    assert (nothing["tokens_computed"], nothing["optimizer_steps"]) == (0.0, 0.0)
    assert torch.equal(before, weights(updater.model))


@pytest.mark.parametrize("flat", [0, 1, 3])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_gradient_is_that_of_grpo_also_where_groups_have_equal_rewards(
    flat: int, beta: float, minibatches: int
) -> None:
    """arXiv:2402.03300, equation 3, literally: the mean over all rollouts of the mean over their tokens."""
    rollouts = [
        [
            Trajectory(f"{g}.{i}", "at", (call(f"{g}.{i}", 1, (g, 2, 3), (g + i, 7, 9 + i)[: 1 + i]),), reward)
            for i, reward in enumerate((0.5, 0.5, 0.5) if g < flat else (0.0, 1.0, 1.0))
        ]
        for g in range(4)
    ]
    updater = Updater(made(llama), OptimizerConfig(lr=1e-12, clip_norm=None))
    batch = [
        replace(s, columns={**s.columns, "ref_logprobs": [np.full(len(a), -3.0, np.float32) for a in s.advantages]})
        for s in samples(rollouts)
    ]
    loss: list[Any] = [{"type": "ppo", "clip_low": 0.2, "clip_high": 0.2}]
    losses = loss + [{"type": "kl", "coefficient": beta, "estimator": "k3"}] * bool(beta)
    seen: list[torch.Tensor] = []
    step = updater.optimizer.step
    updater.optimizer.step = lambda *given: (  # type: ignore[method-assign]
        seen.append(flat_gradient(updater)),
        step(*given),
    )[1]
    metrics = updater.step(batch, UpdateOptions(loss=losses, minibatches=minibatches))

    def literal(part: Sequence[Sequence[Trajectory]]) -> torch.Tensor:
        updater.optimizer.zero_grad()
        total = torch.zeros(())
        for group in part:
            rewards = torch.tensor([each.reward for each in group])
            spread = rewards.std(unbiased=False)
            advantages = (rewards - rewards.mean()) / (spread if spread else 1.0)
            for each, advantage in zip(group, advantages, strict=True):
                (made_call,) = each.transitions
                prompt, answer = made_call.prompt_token_ids, made_call.response_token_ids
                logits = updater.model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
                now = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
                ratio = (now - torch.tensor(made_call.logprobs)).exp()
                objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                k3 = (-3.0 - now).exp() - 1 - (-3.0 - now)
                total = total - (objective - beta * k3).mean()
        (total / sum(map(len, part))).backward()
        return flat_gradient(updater)

    expected = [literal(rollouts[i::minibatches]) for i in range(minibatches)]
    expected = [each for each in expected if each.any()]
    assert len(seen) == len(expected)
    assert max(map(apart, seen, expected)) < 1e-5
    if not beta:
        learned = [group for group in rollouts if len({each.reward for each in group}) > 1]
        most = sum(
            len(t.prompt_token_ids) + len(t.response_token_ids) for g in learned for r in g for t in r.transitions
        )
        assert metrics["tokens_computed"] <= most, "nothing is computed for the others"


def flat_gradient(updater: Updater) -> torch.Tensor:
    return flat([p.grad.clone() for p in updater.optimizer.parameters if p.grad is not None])


@pytest.mark.parametrize("loss", ["gspo", {"type": "importance", "level": "rollout"}])
def test_of_a_ratio_over_the_rollout_only_rollouts_with_an_advantage_are_computed(loss: Any) -> None:
    def batch(reward: float) -> list[TrainingSample]:
        return samples([[conversation("a", 1, (1, 2)), conversation("b", 2, (1, 2))],
                        [replace(conversation(name, 3, (4, 5)), reward=reward) for name in "cd"]])  # fmt: skip

    both = made_batch = batch(1.0)
    computed = Updater(made(llama)).step(made_batch, UpdateOptions(loss=loss))["tokens_computed"]
    assert computed == Updater(made(llama)).step(both[:1], UpdateOptions(loss=loss))["tokens_computed"]
    (first, _) = both
    quiet = tuple(a * (n.call != "a-1") for n, a in zip(first.tree.nodes, first.advantages, strict=True))
    partly = replace(first, advantages=quiet)
    assert Updater(made(llama)).step([partly], UpdateOptions(loss=loss))["tokens_trained"] == computed_tokens(first)


def computed_tokens(sample: TrainingSample) -> int:
    return sum(len(node.token_ids) for node in sample.tree.nodes if node.sampled)


def not_finite(batch: TrainingSample, *rollouts: str) -> TrainingSample:
    """The sample with recorded log-probabilities of some rollouts that are no numbers."""
    nodes = tuple(
        replace(n, logprobs=(float("nan"),) * len(n.logprobs)) if n.rollout_id in rollouts else n
        for n in batch.tree.nodes
    )
    return replace(batch, tree=replace(batch.tree, nodes=nodes))


def test_an_update_of_which_nothing_is_finite_is_skipped() -> None:
    (batch,) = samples(groups(count=1))
    updater = Updater(made(llama), OptimizerConfig(lr=1e-2))
    before = weights(updater.model)
    metrics = updater.step([not_finite(batch, "0.0", "0.1", "0.2")])
    assert (metrics["skipped_steps"], metrics["optimizer_steps"], metrics["rollouts_not_finite"]) == (1.0, 0.0, 3.0)
    assert torch.equal(before, weights(updater.model))


@pytest.mark.parametrize("broken", ["logprobs", "advantages", "gradient"])
def test_a_rollout_that_is_not_finite_is_named_and_the_others_are_learned_from(
    broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    batch = samples(groups(count=2))
    zero = [
        tuple(a * 0 if n.rollout_id == "0.1" else a for n, a in zip(s.tree.nodes, s.weights, strict=True))
        for s in batch
    ]
    expected = Updater(made(llama), OptimizerConfig(lr=1e-2))
    expected.step([replace(s, weights=w, share=s.share) for s, w in zip(batch, zero, strict=True)])

    updater = Updater(made(llama), OptimizerConfig(lr=1e-2))
    spoiled = batch
    if broken == "logprobs":
        spoiled = [not_finite(batch[0], "0.1"), batch[1]]
    elif broken == "advantages":
        wrong = [
            a * float("inf") if n.rollout_id == "0.1" else a
            for n, a in zip(batch[0].tree.nodes, batch[0].advantages, strict=True)
        ]
        spoiled = [replace(batch[0], advantages=wrong), batch[1]]
    else:
        tree = batch[0].tree
        node = next(i for i, n in enumerate(tree.nodes) if n.rollout_id == "0.1")
        path = sum((tree.nodes[i].token_ids for i in tree.path(node)), ())
        original = updater.forward.logprobs

        def overflowing(micro: Any, *arguments: Any) -> Any:
            logprobs, entropy = original(micro, *arguments)
            factors = [float("inf") if r.token_ids[: len(path)] == path else 1.0 for r in micro.rows for _ in r.targets]
            return logprobs * torch.tensor(factors), entropy

        updater.forward.logprobs = overflowing  # type: ignore[method-assign]
    metrics = updater.step(spoiled)
    assert (metrics["optimizer_steps"], metrics["rollouts_not_finite"]) == (1.0, 1.0)
    assert "1 rollouts are left out of this update" in caplog.text
    assert caplog.text.rstrip().endswith("not finite: 0.1")
    assert torch.allclose(weights(updater.model), weights(expected.model), atol=1e-6)


def test_greedy_samples_are_refused_by_name() -> None:
    (batch,) = samples(groups(count=1))
    cold = tuple(replace(n, temperature=0.0) for n in batch.tree.nodes)
    with pytest.raises(UnfaithfulSampleError, match=r"call 0\.\d-1 of rollout 0\.\d was sampled with temperature=0"):
        Updater(made(llama)).step([replace(batch, tree=replace(batch.tree, nodes=cold))])


def test_a_resumed_updater_makes_the_very_same_steps() -> None:
    config = OptimizerConfig(type="muon", lr=1e-3, schedule="linear", total_steps=10, warmup_steps=1)
    one = Updater(made(llama), config)
    one.step(samples(groups(1)))
    other = Updater(copy.deepcopy(one.model), config)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert one.step(samples(groups(2))) == other.step(samples(groups(2)))
    assert torch.equal(weights(one.model), weights(other.model))


@pytest.mark.parametrize(("part", "shared"), [("lm_head", 0), ("model.layers.1.mlp.up_proj", 5)])
def test_what_follows_the_last_attention_is_computed_at_trained_positions_only(
    updater: Updater, part: str, shared: int
) -> None:
    """Five answers begin after the same token as another answer, and share its hidden state."""
    seen: list[int] = []
    module = updater.model.get_submodule(part)
    handle = module.register_forward_hook(lambda module, args, output: seen.append(output.shape[:-1].numel()))
    metrics = means(updater.accumulate(updater.forward.plan(samples(groups()), sharing="shared")))
    handle.remove()
    assert sum(seen) + shared == metrics["tokens_trained"] < metrics["tokens_computed"]


class Mixing(torch.nn.Module):
    """A block in which tokens see one another."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.cumsum(1)


class Demanding(torch.nn.Module):
    """A block that wants more than hidden states."""

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return hidden + residual


@pytest.mark.parametrize("block", [Mixing(), Demanding(), None])
def test_a_last_block_that_does_not_treat_tokens_alone_is_left_as_it_is(block: torch.nn.Module | None) -> None:
    model = made(llama)
    layer = model.model.layers[-1]
    assert Forward(model).last_mlp is layer.mlp
    layer.mlp = block
    if not isinstance(block, Mixing):
        layer.forward = lambda hidden, **_: hidden if block is None else block(hidden, hidden)
    assert Forward(model).last_mlp is None


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_adapters_train_alone() -> None:
    model = get_peft_model(made(llama), LoraConfig(target_modules=["q_proj", "v_proj"], r=2, lora_dropout=0.5))
    frozen = weights(model.base_model.model.model.embed_tokens)
    adapters = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    updater = Updater(model, OptimizerConfig(lr=1e-2))
    batch = samples(groups())
    assert torch.equal(gradient(updater, batch), gradient(updater, batch)), "dropout is off"
    updater.step(batch, UpdateOptions(sharing="shared"))
    updater.step(batch)
    assert torch.equal(frozen, weights(model.base_model.model.model.embed_tokens))
    assert not torch.equal(flat(adapters), flat([p.detach() for p in model.parameters() if p.requires_grad]))


def test_a_model_with_a_sliding_window_cannot_share_a_prefix() -> None:
    with pytest.raises(ConfigError, match='use sharing="merged" or "auto"'):
        Updater(made(mistral)).forward.plan(samples(groups()), sharing="shared")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [hidden_window_in_layers, hidden_window_in_mask])
def test_rows_are_not_joined_where_a_window_shows_in_long_rows_only(build: Any, dtype: torch.dtype) -> None:
    updater = Updater(made(build).to(dtype))
    draw = random.Random(0)
    prompt = [draw.randrange(VOCAB) for _ in range(40)]
    batch = samples([[conversation(f"0.{i}", 0, prompt) for i in range(4)]])
    for mode in ("auto", "shared"):
        assert not any(each.joined for each in updater.forward.plan(batch, sharing=mode))
        if dtype == torch.float32:
            assert apart(gradient(updater, batch, sharing=mode), gradient(updater, batch, sharing="rows")) < 1e-5


def test_impossible_settings_are_refused(updater: Updater) -> None:
    with pytest.raises(ConfigError, match="minibatches=0"):
        updater.step([], UpdateOptions(minibatches=0))
    assert updater.step([])["optimizer_steps"] == 0.0
