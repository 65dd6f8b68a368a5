"""Supervised learning: only the assistant's tokens are learned, in the requested order; the checkpoint loads."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentlightning.algorithms.recorded.sessions import Tokenizer, load_demonstrations
from agentlightning.algorithms.sft import SFTAlgorithm, SFTConfig, batches, to_sample
from agentlightning.chat.hf import HFChatFormat
from agentlightning.demo.problems import TOOLS, demonstrations
from agentlightning.errors import ConfigError, DatasetError
from agentlightning.models.tiny import make_tiny
from agentlightning.policy.config import LocalPolicyConfig, OptimizerConfig
from agentlightning.policy.local import LocalPolicy
from agentlightning.trajectory import TrainingSample, Trajectory, Transition

FAST = OptimizerConfig(type="muon", lr=6e-3)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), demonstrations(200), hidden_size=64)


@pytest.fixture(scope="module")
def chat(directory: Path) -> HFChatFormat:
    return HFChatFormat(AutoTokenizer.from_pretrained(directory))


class RecordingPolicy:
    """A policy that keeps what it is trained on."""

    context_length = 512

    def __init__(self, chat: HFChatFormat) -> None:
        self.chat = chat
        self.samples: list[TrainingSample] = []

    async def train(self, samples: Sequence[TrainingSample], options: Any) -> Mapping[str, float]:
        self.samples.extend(samples)
        return {"loss": 1.0 / len(self.samples)}


def trained_texts(sample: TrainingSample, chat: HFChatFormat) -> list[str]:
    nodes = zip(sample.tree.nodes, sample.weights, strict=True)
    return [chat.decode(node.token_ids) for node, weights in nodes if any(weights)]


def question(text: str, answer: str = "yes") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]}


@pytest.mark.parametrize("long", [[0], [1, 2], [0, 1, 3], []])
def test_a_conversation_that_the_model_cannot_hold_is_dropped_and_counted(chat: HFChatFormat, long: list[int]) -> None:
    data = [question("Is it? " * (600 if number in long else 1)) for number in range(4)]
    result = SFTAlgorithm(RecordingPolicy(chat), data, steps=1).train()
    assert (result.conversations, result.left_out) == (4 - len(long), {"too_long": len(long)} if long else {})


def test_nothing_that_the_model_can_hold_is_an_error_that_names_the_first(chat: HFChatFormat) -> None:
    with pytest.raises(DatasetError, match=r"none of 2 .* conversation 1 has \d+ tokens, the model holds 512"):
        SFTAlgorithm(RecordingPolicy(chat), [question("Is it? " * 600)] * 2, steps=1).train()


def test_only_what_the_assistant_wrote_is_trained_with_its_end_of_turn(chat: HFChatFormat) -> None:
    demonstration = demonstrations(1)[0]
    sample = to_sample(Tokenizer(chat, 512).trajectories([demonstration]))
    call, answer = trained_texts(sample, chat)
    assert call.startswith("<tool_call>")
    assert call.endswith("</tool_call><|im_end|>")
    assert answer == demonstration["messages"][-1]["content"] + "<|im_end|>"


def test_the_tokens_are_those_of_the_rendered_conversation(chat: HFChatFormat) -> None:
    messages = demonstrations(1)[0]["messages"]
    tree = to_sample(Tokenizer(chat, 512).trajectories([{"messages": messages, "tools": TOOLS}])).tree
    (leaf,) = tree.leaves()
    tokens = [token for index in tree.path(leaf) for token in tree.nodes[index].token_ids]
    rendered = chat.render(messages, TOOLS, add_generation_prompt=False)
    assert chat.decode(tokens) == rendered.removesuffix("\n")
    prompt = chat.encode(chat.render(messages[:2], TOOLS))
    assert tokens[: len(prompt)] == prompt


def test_a_batch_weighs_every_trained_token_the_same_and_stores_a_common_prompt_once(chat: HFChatFormat) -> None:
    course = demonstrations(6)
    alone = [to_sample(Tokenizer(chat, 512).trajectories([each])).tree for each in course]
    batch = to_sample(Tokenizer(chat, 512).trajectories(course))
    weights = [weight for row in batch.weights for weight in row]
    assert sum(weights) == pytest.approx(1.0)
    assert set(weights) == {weights[0]}
    assert batch.tree.num_sampled == sum(tree.num_sampled for tree in alone)
    assert batch.tree.num_tokens < sum(tree.num_tokens for tree in alone)


def test_a_conversation_that_stands_twice_in_a_batch_is_trained_twice(chat: HFChatFormat) -> None:
    sample = to_sample(Tokenizer(chat, 512).trajectories([question("Is it?")] * 2))
    assert trained_texts(sample, chat) == ["yes<|im_end|>"] * 2


def test_a_template_that_rewrites_earlier_answers_trains_each_answer_after_its_own_prompt(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ 'old' if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = HFChatFormat(tokenizer)
    messages = question("first", "one")["messages"] + question("second", "two")["messages"]
    (example,) = Tokenizer(chat, 512).trajectories([messages])
    prompts = [chat.decode(call.prompt_token_ids) for call in example.transitions]
    assert [chat.decode(call.response_token_ids) for call in example.transitions] == ["one<|im_end|>", "two<|im_end|>"]
    assert "old" in prompts[1]
    assert "one" not in prompts[1]


class Turn(BaseModel):
    role: str
    content: str


class Conversation(BaseModel):
    messages: list[Turn]


@dataclass
class Plain:
    messages: tuple[dict[str, str], ...]


@pytest.mark.parametrize("kind", [Conversation.model_validate, lambda record: Plain(tuple(record["messages"])), iter])
async def test_records_are_taken_in_whatever_form_tasks_are(kind: Any) -> None:
    """Lists of pydantic models and of dataclasses; `iter`: not a list at all."""
    records = [question("a"), question("b", "no")]
    given: Any = iter(records) if kind is iter else [kind(record) for record in records]
    found = await load_demonstrations(given, None, share=0.0, seed=0)
    assert [record["messages"] for record in found.training] == [record["messages"] for record in records]


def test_trajectories_are_imitated_as_they_were_sampled(chat: HFChatFormat) -> None:
    call = Transition("r", "a", "s", 1, (5, 6, 7), (8, 9), (-1.0, -2.0))
    sample = to_sample(Tokenizer(chat, 512).trajectories([Trajectory("r", "a", (call,), reward=1.0)] * 2))
    trained = [n for n, w in zip(sample.tree.nodes, sample.weights, strict=True) if any(w)]
    assert [node.token_ids for node in trained] == [(8, 9), (8, 9)]
    assert "advantages" not in sample.columns  # a log-likelihood has none


def test_a_single_token_has_the_whole_weight(chat: HFChatFormat) -> None:
    call = Transition("r", "a", "s", 1, (5, 6, 7), (8,), (-1.0,))
    sample = to_sample(Tokenizer(chat, 512).trajectories([Trajectory("r", "a", (call,))]))
    assert sample.weights[-1].tolist() == [1.0]


def test_what_is_no_dataset_is_refused() -> None:
    with pytest.raises(DatasetError, match="int is not a dataset"):
        _ = SFTAlgorithm(dataset=3).total_steps


async def test_without_shuffling_the_dataset_keeps_its_order(chat: HFChatFormat) -> None:
    policy = RecordingPolicy(chat)
    dataset = [question(f"number {n}", f"answer {n}") for n in range(5)]
    await SFTAlgorithm(model=policy, dataset=dataset, batch_size=2, shuffle=False, steps=4).run()
    seen = [sorted(trained_texts(sample, chat)) for sample in policy.samples]
    assert seen == [[f"answer {n}<|im_end|>" for n in batch] for batch in ([0, 1], [2, 3], [4], [0, 1])]


class RecordingTraining:
    """A run that was resumed at a step, and keeps what is trained, finished and saved."""

    context_length = 512

    def __init__(self, chat: HFChatFormat, step: int) -> None:
        self.chat, self.step = chat, step
        self.samples: list[TrainingSample] = []
        self.saved: list[Path] = []

    @property
    def learner(self) -> Any:
        return self

    async def update(self, samples: Sequence[TrainingSample], options: Any) -> Mapping[str, float]:
        self.samples.extend(samples)
        return {"loss": 1.0}

    async def finish_step(self, collected: Any, metrics: Mapping[str, float]) -> None:
        self.step += 1

    async def save(self, directory: Path) -> None:
        self.saved.append(directory)


async def test_a_resumed_run_trains_on_what_is_left(chat: HFChatFormat, tmp_path: Path) -> None:
    training: Any = RecordingTraining(chat, step=2)
    dataset = [question(f"number {n}", f"answer {n}") for n in range(4)]
    result = await SFTAlgorithm(dataset=dataset, batch_size=1, shuffle=False, output=tmp_path).run(training)
    assert [trained_texts(sample, chat) for sample in training.samples] == [
        ["answer 2<|im_end|>"],
        ["answer 3<|im_end|>"],
    ]
    assert (training.step, training.saved) == (4, [tmp_path])
    assert (result.steps, len(result.losses), result.checkpoint) == (4, 2, tmp_path)


async def test_a_model_that_is_opened_has_the_seed_and_the_optimizer_of_the_settings(
    chat: HFChatFormat, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[LocalPolicyConfig] = []

    class Opened(RecordingPolicy):
        saved: Path

        async def save(self, directory: Path) -> None:
            self.saved = directory

        async def close(self) -> None:
            pass

    def open_policy(config: LocalPolicyConfig) -> Opened:
        configs.append(config)
        return opened

    opened = Opened(chat)
    monkeypatch.setattr(LocalPolicy, "open", open_policy)
    await SFTAlgorithm(directory, [question("a")], output=tmp_path, steps=5, seed=3, optimizer=FAST).run()
    (config,) = configs
    assert (str(config.model), config.seed, config.objective) == (str(directory), 3, "supervised")
    assert config.optimizer == FAST.model_copy(update={"total_steps": 5})
    assert opened.saved == tmp_path


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 3), st.booleans())
def test_each_epoch_sees_every_conversation_once(count: int, size: int, epochs: int, shuffle: bool) -> None:
    config = SFTConfig(batch_size=size, shuffle=shuffle, seed=1)
    per_epoch = -(-count // size)
    parts = list(batches(count, per_epoch * epochs, config))
    for epoch in range(epochs):
        part = parts[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(index for batch in part for index in batch) == list(range(count))


async def test_progress_is_reported_after_each_step(chat: HFChatFormat) -> None:
    steps: list[tuple[int, float]] = []
    result = await SFTAlgorithm(
        model=RecordingPolicy(chat),
        dataset=[question("a"), question("b"), question("c")],
        batch_size=1,
        on_step=lambda step, metrics: steps.append((step, metrics["loss"])),
    ).run()
    assert steps == [(1, 1.0), (2, 1 / 2), (3, 1 / 3)]
    assert (result.steps, result.conversations, result.losses) == (3, 3, (1.0, 1 / 2, 1 / 3))
    assert result.tokens == 3 * len(chat.encode("yes<|im_end|>"))


def test_a_model_learns_a_few_conversations_and_its_checkpoint_loads(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in demonstrations(8)))
    result = SFTAlgorithm(
        model=directory, dataset=path, steps=20, batch_size=8, optimizer=FAST, output=tmp_path / "out"
    ).train()
    assert len(result.losses) == 20
    assert result.losses[-1] < 0.5 * result.losses[0]
    assert result.checkpoint == tmp_path / "out"
    before = AutoModelForCausalLM.from_pretrained(directory).model.layers[0].mlp.up_proj.weight
    after = AutoModelForCausalLM.from_pretrained(result.checkpoint).model.layers[0].mlp.up_proj.weight
    assert not torch.equal(before, after)
    assert AutoTokenizer.from_pretrained(result.checkpoint).chat_template


async def test_an_open_policy_is_trained_in_place_and_stays_open(directory: Path) -> None:
    policy = LocalPolicy.open(LocalPolicyConfig(model=directory, optimizer=FAST))
    try:
        await SFTAlgorithm(model=policy, dataset=demonstrations(4), steps=2).run()
        assert policy.policy_version == 2
        await SFTAlgorithm(model=policy, dataset=demonstrations(4), steps=1).run()
        assert policy.policy_version == 3
    finally:
        await policy.close()


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ("hello", "conversation 2 is 'hello'"),
        ({"question": "hello"}, "conversation 2 is"),
        ({"messages": []}, "conversation 2 is"),
        ([{"content": "no role"}], "conversation 2 is"),
        ({"messages": [{"role": "user", "content": "hello"}]}, "conversation 2 has no assistant turn"),
    ],
)
def test_a_conversation_that_cannot_be_trained_on_is_named(chat: HFChatFormat, record: Any, complaint: str) -> None:
    with pytest.raises(DatasetError, match=complaint):
        Tokenizer(chat, 512).trajectories([question("fine"), record])


def test_settings_that_cannot_work_are_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match="give output=DIRECTORY"):
        SFTAlgorithm(model=directory, dataset=[question("a")]).train()
    with pytest.raises(ConfigError, match="give model=DIRECTORY"):
        SFTAlgorithm(dataset=[question("a")]).train()
    with pytest.raises(ConfigError, match="model is a Linear object"):
        SFTAlgorithm(model=torch.nn.Linear(1, 1), dataset=[question("a")])  # type: ignore[arg-type]
    assert SFTAlgorithm(dataset=[], config=SFTConfig(batch_size=3), steps=3).config == SFTConfig(batch_size=3, steps=3)
    with pytest.raises(DatasetError, match="has no tasks; at least one is needed"):
        SFTAlgorithm(model=directory, dataset=[], output="out").train()
    with pytest.raises(ValueError, match=r"batchsize.*from the arguments of SFTAlgorithm"):
        SFTAlgorithm(model=directory, dataset=[], output="out", batchsize=3)
