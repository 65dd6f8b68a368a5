"""The demo's policy trained with a real vLLM sampling: servers and trainer have the same weights, to the token.

Run with -s to see the differences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentlightning import span as names
from agentlightning.config import TrainConfig
from agentlightning.demo import job
from agentlightning.engine.base import SamplingParams
from agentlightning.engine.servers.config import ServersConfig
from agentlightning.policy.base import UpdateOptions
from agentlightning.policy.config import OptimizerConfig
from agentlightning.policy.served import ServedPolicy
from agentlightning.store import LightningStore
from agentlightning.trainer import Trainer
from agentlightning.trajectory import TrainingSample

NEAR = 1e-3
STEPS = 3
QUESTIONS = ("Tom has 3 apples and buys 4 more. How many now?", "Ana has 12 coins. She loses 5. How many are left?")


FAST = OptimizerConfig(lr=3e-3)
"""So that the weights before an update would be found out."""
REWARD = """
def letters(task, output):
    return sum(character.isalpha() for character in output) / max(1, len(output))
"""
"""Unlike the demo's own it tells answers apart that are all wrong."""


def small(tmp_path: Path, vllm: str, on_cpu: dict[str, str]) -> TrainConfig:
    """The demo's settings, with less of everything but steps."""
    shown = job.write_demonstrations(tmp_path / "demonstrations.jsonl", 0)
    settings = job.settings("calculator.toml", warm_start__dataset=shown, algorithm__steps=STEPS)
    servers = ServersConfig(command=vllm, args=("--enforce-eager",), env=on_cpu)
    sampled = settings.policy.model_copy(update={"engine": "vllm", "servers": servers})
    (tmp_path / "reward.py").write_text(REWARD)
    return settings.model_copy(
        update={
            "reward": f"{tmp_path / 'reward.py'}:letters",
            "policy": sampled,
            "warm_start": settings.warm_start.model_copy(update={"steps": 40}),
            "algorithm": settings.algorithm.model_copy(update={"tasks_per_step": 6, "optimizer": FAST}),
            "evaluation": settings.evaluation.model_copy(update={"every": 0}),
            "runner": settings.runner.model_copy(update={"timeout_seconds": 300.0}),
        }
    )


def forward(model: Any, prompt: Sequence[int], answer: Sequence[int], temperature: float) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].float()
    return (logits / (temperature or 1.0)).log_softmax(-1)


def gathered(logprobs: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    return logprobs.gather(1, torch.tensor(list(tokens))[:, None])[:, 0]


class Watch:
    """Looks at a policy around each of its updates, with a forward pass of the weights as they are on disk."""

    def __init__(self) -> None:
        self.models: dict[int, Any] = {}
        self.greedy: list[float] = []
        self.stale: list[float] = []
        """How far greedy log-probabilities are from those of the weights before: what an error would look like."""
        self.trained: list[float] = []
        self.train_apart, self.publish_update = ServedPolicy.train_apart, ServedPolicy.publish_update

    async def train(self, policy: ServedPolicy, samples: Sequence[TrainingSample], options: UpdateOptions) -> Any:
        self.keep(policy)
        self.trained.append(max(self.recorded(sample, policy.policy_version) for sample in samples))
        return await self.train_apart(policy, samples, options)

    async def publish(self, policy: ServedPolicy, **options: Any) -> Any:
        figures = await self.publish_update(policy, **options)
        self.keep(policy)
        self.greedy.append(max([await self.greedily(policy, question) for question in QUESTIONS]))
        assert figures["server_difference"] < NEAR
        return figures

    def keep(self, policy: ServedPolicy) -> None:
        if policy.policy_version not in self.models:
            directory = policy.checkpoints.directory(policy.policy_version)
            self.models[policy.policy_version] = AutoModelForCausalLM.from_pretrained(directory)

    def recorded(self, sample: TrainingSample, version: int) -> float:
        """How far what the trainer is given lies from the forward pass of the weights it trains."""
        largest = 0.0
        for index, node in enumerate(sample.tree.nodes):
            if node.sampled:
                assert node.policy_version == version
                before = [t for each in sample.tree.path(index)[:-1] for t in sample.tree.nodes[each].token_ids]
                own = gathered(forward(self.models[version], before, node.token_ids, node.temperature), node.token_ids)
                largest = max(largest, float((own - torch.tensor(node.logprobs)).abs().max()))
        return largest

    async def greedily(self, policy: ServedPolicy, question: str) -> float:
        prompt = policy.chat.encode(policy.chat.render([{"role": "user", "content": question}]))
        sample = await policy.sample(prompt, SamplingParams(temperature=0, max_tokens=32))
        own = forward(self.models[policy.policy_version], prompt, sample.token_ids, 0)
        assert sample.token_ids == tuple(own.argmax(-1).tolist())
        assert sample.policy_version == policy.policy_version
        drawn = torch.tensor(sample.logprobs)
        before = forward(self.models[policy.policy_version - 1], prompt, sample.token_ids, 0)
        self.stale.append(float((gathered(before, sample.token_ids) - drawn).abs().max()))
        return float((gathered(own, sample.token_ids) - drawn).abs().max())


async def test_three_steps_with_vllm_agree_with_our_forward_pass(
    vllm: str, on_cpu: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    watch = Watch()
    monkeypatch.setattr(
        ServedPolicy, "train_apart", lambda policy, samples, options: watch.train(policy, samples, options)
    )
    monkeypatch.setattr(ServedPolicy, "publish_update", lambda policy, **more: watch.publish(policy, **more))
    tasks = job.tasks(0)
    tasks["held_out_dataset"] = tasks["held_out_dataset"][:8]
    result = await Trainer(small(tmp_path, vllm, on_cpu), run_dir=tmp_path / "run").fit_async(**tasks)

    assert (result.steps, result.failed_rollouts) == (STEPS, 0)
    assert sorted(watch.models) == list(range(STEPS + 1))
    assert min(watch.stale) > 10 * NEAR
    assert max(watch.greedy) < NEAR
    assert max(watch.trained) < NEAR

    store = LightningStore(tmp_path / "run" / "store.db")
    spans = await recorded_spans(store)
    differences = dict.fromkeys(watch.models, 0.0)
    for span in spans:
        attributes = span.attributes
        version, answer = attributes[names.POLICY_VERSION], attributes[names.RESPONSE_TOKEN_IDS]
        temperature = float(attributes.get(names.REQUEST_TEMPERATURE, 1.0))
        own = forward(watch.models[version], attributes[names.PROMPT_TOKEN_IDS], answer, temperature)
        far = float((gathered(own, answer) - torch.tensor(list(attributes[names.LOGPROBS]))).abs().max())
        differences[version] = max(differences[version], far)
    await store.close()
    assert max(differences.values()) < NEAR
    print(f"\ngreedy log-probabilities after each step differ by {watch.greedy}")  # noqa: T201
    print(f"(from the weights before each by {watch.stale})")  # noqa: T201
    print(f"what the trainer was given differs by {watch.trained}")  # noqa: T201
    print(f"{len(spans)} spans, by version of the weights, differ by {differences}")  # noqa: T201
    assert len(list((tmp_path / "run" / "servers" / "weights").iterdir())) == 2


async def recorded_spans(store: LightningStore) -> list[Any]:
    found: list[Any] = []
    for rollout in await store.query_rollouts():
        spans = await store.query_spans(rollout.rollout_id)
        found += [span for span in spans if span.attributes.get(names.RESPONSE_TOKEN_IDS)]
    assert found
    return found
