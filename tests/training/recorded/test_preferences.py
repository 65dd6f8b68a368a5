"""Promises of DPO and supervised learning on the sessions of a store, through the trainer and the command line."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import agentlightning as agl
from agentlightning.chat.hf import HFChatFormat
from agentlightning.cli.main import build
from agentlightning.errors import ConfigError, DatasetError
from agentlightning.policy.config import OptimizerConfig

pytestmark = pytest.mark.integration

FAST = OptimizerConfig(lr=3e-3)


def preference(directory: Any, chat: HFChatFormat) -> float:
    """p(yes) over p(yes) + p(no) of the first task."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    prompt = chat.encode(chat.render([{"role": "user", "content": "question 0"}]))
    found: list[float] = []
    for answer in ("yes", "no"):
        tokens = chat.encode(answer)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        found.append(float(logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).sum().exp()))
    return found[0] / sum(found)


def learned(store: Any, algorithm: Any, tiny: Path, tmp_path: Path, steps: int | None = 8) -> agl.TrainingResult:
    run_dir = Path(mkdtemp(dir=tmp_path)) / "run"
    result = agl.Trainer(store=store, algorithm=algorithm, model=tiny, run_dir=run_dir).train(steps)
    assert isinstance(result, agl.TrainingResult)
    return result


@pytest.mark.parametrize(
    ("loss", "pairs"),
    [
        *(("dpo", "sessions"), ("kto", "branches")),
        *(pytest.param(loss, "sessions", marks=pytest.mark.slow) for loss in ("ipo", "kto", "simpo")),
        *(pytest.param(loss, "branches", marks=pytest.mark.slow) for loss in ("dpo", "ipo", "simpo")),
    ],
)
def test_every_preference_loss_prefers_what_was_rewarded(
    loss: str, pairs: Any, store: Any, fill: Any, tiny: Path, chat: HFChatFormat, tmp_path: Path
) -> None:
    fill(store)
    result = learned(store, agl.DPO(loss=loss, pairs=pairs, optimizer=FAST), tiny, tmp_path)
    assert preference(result.checkpoint, chat) > preference(tiny, chat) + 0.1
    assert result.recorded.metrics["accuracy"] == 1.0
    assert result.recorded.counts["pairs"] > 0


def test_the_margin_is_zero_where_the_policy_is_the_reference(
    store: Any, fill: Any, tiny: Path, tmp_path: Path
) -> None:
    fill(store)
    result = learned(store, agl.DPO(optimizer=FAST), tiny, tmp_path, steps=1)
    assert result.recorded.metrics["margin"] == pytest.approx(0.0, abs=1e-4)
    assert result.recorded.metrics["loss"] == pytest.approx(0.6931, abs=1e-3)


@pytest.mark.slow
def test_another_reference_moves_the_margin(
    store: Any, fill: Any, tiny: Path, tmp_path: Path, chat: HFChatFormat
) -> None:
    fill(store)
    other = learned(store, agl.DPO(optimizer=FAST), tiny, tmp_path).checkpoint.rename(tmp_path / "other")
    result = learned(store, agl.DPO(optimizer=FAST, reference=str(other)), tiny, tmp_path, steps=1)
    assert result.recorded.metrics["margin"] < -0.5


def test_only_the_target_agent_is_compared(store: Any, fill: Any, tiny: Path, tmp_path: Path) -> None:
    fill(store, agent="writer")
    assert (
        learned(store, agl.DPO(target_agent="writer", optimizer=FAST), tiny, tmp_path, 1).recorded.counts["pairs"] == 12
    )
    with pytest.raises(DatasetError, match="there are 'writer'"):
        learned(store, agl.DPO(target_agent="editor"), tiny, tmp_path, 1)


def test_data_without_preferences_is_refused_with_what_is_missing(
    store: Any, add: Any, tiny: Path, tmp_path: Path
) -> None:
    asyncio.run(add(store, "question", "yes"))
    with pytest.raises(DatasetError, match=r"none of 0 sessions has a reward|has a reward"):
        learned(store, agl.DPO(), tiny, tmp_path)
    asyncio.run(add(store, "question", "yes", 1.0))
    asyncio.run(add(store, "question", "no", 1.0))
    asyncio.run(add(store, "another", "no", 0.0))
    with pytest.raises(
        DatasetError, match=r"of 2 tasks with 3 sessions, 1 have one.*several sessions of the same task"
    ):
        learned(store, agl.DPO(), tiny, tmp_path)
    assert learned(store, agl.DPO(loss="kto"), tiny, tmp_path, 1).recorded.counts["pairs"] == 3


def test_a_loss_that_compares_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose dpo, ipo, kto or simpo"):
        agl.DPO(loss="ppo")
    with pytest.raises(ConfigError, match="no regular expression"):
        agl.DPO(target_agent="(")


# -- supervised learning -----------------------------------------------------------------------------------------------


def test_successful_trajectories_are_imitated_without_an_event_loop(
    store: Any, fill: Any, tiny: Path, chat: HFChatFormat, tmp_path: Path
) -> None:
    fill(store)
    dataset = store.get_successful_trajectories()
    result = agl.SFTAlgorithm(model=tiny, dataset=dataset, output=tmp_path / "out", steps=8, optimizer=FAST).train()
    assert (result.conversations, dict(result.left_out)) == (3, {"below_threshold": 6, "duplicate": 3})
    assert preference(result.checkpoint, chat) > preference(tiny, chat) + 0.1


def test_filters_arrive(store: Any, fill: Any, add: Any, tiny: Path, tmp_path: Path) -> None:
    fill(store)

    def count(**filters: Any) -> int:
        dataset = store.get_successful_trajectories(**filters)
        settings: dict[str, Any] = {"output": tmp_path / "out", "steps": 1, "optimizer": FAST}
        return agl.SFTAlgorithm(model=tiny, dataset=dataset, **settings).train().conversations

    assert count(deduplicate=False) == 6
    assert count(threshold=0.0, deduplicate=False) == 12
    assert count(best_of=1, deduplicate=False) == 3
    assert count(pass_rate=(0.4, 0.6)) == 3
    with pytest.raises(DatasetError, match=r"below threshold.*rewards are from 0 to 1: lower threshold=2"):
        count(threshold=2.0)
    with pytest.raises(DatasetError, match="none of 12 sessions is a demonstration"):
        count(pass_rate=(0.9, 1.0))
    with pytest.raises(DatasetError, match="disagrees"):
        count(self_verified=True)
    asyncio.run(add(store, "question 0", "yes"))
    assert count(self_verified=True, deduplicate=False) == 3
    for wrong in ({"best_of": 0}, {"pass_rate": (0.9, 0.1)}, {"threshold": float("nan")}):
        with pytest.raises(ConfigError):
            store.get_successful_trajectories(**wrong)


def conversations(answers: list[str]) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": "question 0"}, {"role": "assistant", "content": answer}]}
        for answer in answers
    ]


def test_a_model_object_is_trained_in_place(tiny: Path, tmp_path: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    for given in (model, (model, tokenizer)):
        result = agl.SFTAlgorithm(given, conversations(["yes"]), steps=2, optimizer=FAST, output=tmp_path / "m").train()
        assert result.steps == 2
    assert not torch.equal(before, model.model.layers[0].mlp.up_proj.weight)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "m").config.hidden_size == 32
    with pytest.raises(ConfigError, match="no pair of a model and its tokenizer"):
        agl.SFTAlgorithm((model, 3), conversations(["yes"]))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks for it
def test_a_model_with_an_adapter_trains_and_saves_the_adapter_alone(tiny: Path, tmp_path: Path) -> None:
    """What Unsloth's FastLanguageModel.get_peft_model returns."""
    peft = pytest.importorskip("peft")
    base: Any = AutoModelForCausalLM.from_pretrained(tiny)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["up_proj"], task_type="CAUSAL_LM"))
    weight = base.model.layers[0].mlp.up_proj.base_layer.weight.detach().clone()
    pair = (model, AutoTokenizer.from_pretrained(tiny))
    agl.SFTAlgorithm(pair, conversations(["yes"]), steps=3, optimizer=FAST, output=tmp_path / "adapter").train()
    assert torch.equal(weight, base.model.layers[0].mlp.up_proj.base_layer.weight)
    assert base.model.layers[0].mlp.up_proj.lora_B["default"].weight.abs().sum() > 0
    assert (tmp_path / "adapter" / "adapter_config.json").exists()


@pytest.mark.parametrize("in_place", [False, True])
def test_the_weights_with_the_lowest_validation_loss_are_the_result(
    in_place: bool, tiny: Path, chat: HFChatFormat, tmp_path: Path
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny) if in_place else tiny
    result = agl.SFTAlgorithm(
        model,
        conversations(["no"]),
        validation=conversations(["yes"]),
        steps=12,
        validate_every=1,
        optimizer=OptimizerConfig(lr=0.03),
        output=tmp_path / "out",
    ).train()
    assert list(result.validation_losses) == list(range(13))
    assert result.best_step == min(result.validation_losses, key=lambda step: result.validation_losses[step]) < 12
    again = agl.SFTAlgorithm(tmp_path / "out", conversations(["no"]), validation=conversations(["yes"]), steps=1)
    again.output = tmp_path / "again"
    assert again.train().validation_losses[0] == pytest.approx(result.validation_losses[result.best_step], abs=1e-4)


def test_a_share_of_the_data_is_held_back(tiny: Path, tmp_path: Path) -> None:
    data = conversations(["yes", "no"] * 5)
    result = agl.SFTAlgorithm(tiny, data, validation_share=0.2, steps=1, output=tmp_path / "out").train()
    assert (result.conversations, len(result.validation_losses)) == (8, 2)
    with pytest.raises(DatasetError, match="give more of them"):
        agl.SFTAlgorithm(tiny, data[:2], validation_share=0.1, steps=1, output=tmp_path / "out").train()
    with pytest.raises(ConfigError, match="without validation conversations"):
        agl.SFTAlgorithm(tiny, data, validation=data, validation_share=0.1, output=tmp_path / "out").train()


def test_lora_trains_an_adapter(tiny: Path, tmp_path: Path) -> None:
    agl.SFTAlgorithm(tiny, conversations(["yes"]), lora={"r": 2}, steps=1, output=tmp_path / "out").train()
    assert list((tmp_path / "out").rglob("adapter_config.json"))


def test_only_answers_of_the_target_agent_are_imitated(tiny: Path, tmp_path: Path) -> None:
    data = conversations(["yes"])
    data[0]["messages"][1]["name"] = "writer"
    assert agl.SFTAlgorithm(tiny, data, target_agent="writer", output=tmp_path / "out").train().conversations == 1
    with pytest.raises(DatasetError, match="agents seen: writer"):
        agl.SFTAlgorithm(tiny, data, target_agent="editor", output=tmp_path / "out").train()


class HuggingFaceLike:
    """Length and indexed rows, as `datasets.Dataset`."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        if index >= 2:
            raise IndexError
        return conversations(["yes", "no"])[index]


def test_a_hugging_face_dataset_is_read_by_its_rows(tiny: Path, tmp_path: Path) -> None:
    assert agl.SFTAlgorithm(tiny, HuggingFaceLike(), output=tmp_path / "out").train().conversations == 2


# -- the command line --------------------------------------------------------------------------------------------------


def test_agl_dpo_learns_from_a_store(store: Any, fill: Any, tiny: Path, tmp_path: Path) -> None:
    fill(store)
    words = ["dpo", "steps=2", "loss=ipo", "--model", str(tiny), "--store", str(tmp_path / "sessions.db")]
    done = CliRunner().invoke(build(), [*words, "--run", str(tmp_path / "cli"), "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["recorded"]["algorithm"], result["steps"], result["recorded"]["sessions"]) == ("dpo", 2, 12)
    assert Path(result["checkpoint"]).is_dir()


def test_agl_sft_passes_every_option_on(
    store: Any, fill: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def train(trainer: Any, **options: Any) -> Any:
        seen.update(trainer=trainer, options=options)
        raise ConfigError("enough")

    monkeypatch.setattr(agl.Trainer, "train", train)
    fill(store, 1)
    words = [
        *("sft", "epochs=3", "lora.r=4", "--model", str(tiny), "--store", str(tmp_path / "sessions.db")),
        *("--validation", "valid.jsonl", "--threshold", "0.7", "--best-of", "2", "--pass-rate", "0.1", "0.9"),
        *("--duplicates", "--self-verified", "--out", str(tmp_path / "out"), "--target-agent", "writer"),
        *("--eval-agent", "module:agent", "--held-out", "held.jsonl", "--reward", "module:score", "--seed", "5"),
        *("--run", str(tmp_path / "cli")),
    ]
    assert "enough" in CliRunner().invoke(build(), words).output
    trainer, sft = seen["trainer"], seen["trainer"].algorithm
    query = sft.dataset
    assert seen["options"] == {"eval_agent": "module:agent", "held_out_dataset": "held.jsonl"}
    assert (trainer.reward, trainer.run_dir, trainer.config.run.seed) == ("module:score", tmp_path / "cli", 5)
    assert (sft.config.epochs, sft.config.lora.r, sft.config.target_agent, sft.config.seed) == (3, 4, "writer", 5)
    assert (sft.validation, sft.output) == ("valid.jsonl", tmp_path / "out")
    assert (query.threshold, query.best_of, query.pass_rate) == (0.7, 2, (0.1, 0.9))
    assert (query.deduplicate, query.self_verified) == (False, True)


def test_agl_sft_learns_from_a_file_into_an_adapter_and_makes_no_store(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in conversations(["yes", "no"])))
    words = ["sft", "steps=1", "--model", str(tiny), "--data", str(path), "--run", str(tmp_path / "cli")]
    done = CliRunner().invoke(build(), [*words, "lora.r=2", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["recorded"]["sessions"] == 2
    assert list((tmp_path / "cli" / "checkpoint").rglob("adapter_config.json"))
    assert not (tmp_path / ".agentlightning").exists()
    assert "give --data FILE or --store STORE" in CliRunner().invoke(build(), words[:4]).output


def test_a_tiny_model_is_made_for_the_pairs_of_a_file(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    lines = [{"prompt": f"Is {n} even?", "chosen": "yes, it is", "rejected": "no idea"} for n in range(8)]
    pairs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["dpo", "steps=1", "--data", str(pairs), "--model", "tiny", "--run", str(tmp_path / "run")]
    done = CliRunner().invoke(build(), words)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "run" / "checkpoint" / "config.json").exists()
