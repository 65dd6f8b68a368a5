"""The example of Unsloth: what it asks of the package, up to the import and, with a stand-in, through training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl

pytestmark = pytest.mark.integration

HERE = Path(__file__).parents[2] / "examples" / "unsloth"
STAND_IN = """
import json, os
from pathlib import Path

asked = {}

class FastLanguageModel:
    @staticmethod
    def from_pretrained(**options):
        from transformers import AutoModelForCausalLM, AutoTokenizer
        asked["from_pretrained"] = options
        name = options["model_name"]
        return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)

    @staticmethod
    def get_peft_model(model, **options):
        import peft
        asked["get_peft_model"] = options
        Path(os.environ["ASKED"]).write_text(json.dumps(asked))
        known = {key: value for key, value in options.items() if key != "random_state"}
        return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **known))
"""
"""The two functions of Unsloth that the example calls, without Unsloth's kernels."""


def store_with(path: Path, sessions: list[tuple[str, str, float]]) -> Path:
    """A store of sessions: (question, answer, reward)."""
    store = agl.LightningStore(path)
    for question, answer, reward in sessions:
        with agl.track_session({"question": question}, store=store):
            with agl.track_agent("writer"):
                agl.emit_prompt(question, answer)
            agl.emit_reward(reward)
    assert agl.flush_recording()
    return path


def run(*options: Any, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "train.py", *map(str, options)],
        cwd=HERE,
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})},
    )


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder with a package `unsloth`."""
    (tmp_path / "packages" / "unsloth").mkdir(parents=True)
    (tmp_path / "packages" / "unsloth" / "__init__.py").write_text(STAND_IN)
    return tmp_path / "packages"


def test_a_missing_package_says_what_to_install(tmp_path: Path) -> None:
    store = store_with(tmp_path / "store.db", [("6 x 7?", "42", 1.0)])
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "unsloth.py").write_text("raise ModuleNotFoundError(\"No module named 'unsloth'\", name='unsloth')")
    options = ["--store", store, "--model", "m", "--output", tmp_path / "out"]
    ran = run(*options, environment={"PYTHONPATH": str(blocked)})
    assert ran.returncode == 1
    assert "this example needs the module unsloth: pip install unsloth" in ran.stderr
    assert not (tmp_path / "out").exists()


def test_a_machine_without_a_gpu_is_told_so(tmp_path: Path) -> None:
    store = store_with(tmp_path / "store.db", [("6 x 7?", "42", 1.0)])
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "unsloth.py").write_text('raise NotImplementedError("You need a GPU.")')
    ran = run("--store", store, "--model", "m", "--output", "out", environment={"PYTHONPATH": str(blocked)})
    assert ran.returncode == 1
    assert "Unsloth cannot run on this machine: You need a GPU." in ran.stderr


def test_a_store_that_is_not_there_is_named() -> None:
    ran = run("--store", "nowhere.db", "--model", "m", "--output", "out")
    assert ran.returncode == 2
    assert "there is no store nowhere.db" in ran.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_adapter_learns_successful_sessions_alone(tmp_path: Path, stand_in: Path) -> None:
    pytest.importorskip("peft")
    from agentlightning.models.tiny import make_tiny

    sessions = [(f"{n} x 7?", text, reward) for n in range(6) for text, reward in ((f"{n * 7}", 1.0), ("many", 0.0))]
    store = store_with(tmp_path / "store.db", sessions)
    model = make_tiny(tmp_path / "model", [text for each in sessions for text in each[:2]], hidden_size=32)
    options = [
        "--store",
        store,
        "--model",
        model,
        "--output",
        tmp_path / "adapter",
        "--rank",
        "4",
        "--max-length",
        "256",
    ]
    environment = {"PYTHONPATH": str(stand_in), "ASKED": str(tmp_path / "asked.json")}
    ran = run(*options, "--epochs", "3", "--batch-size", "3", "--target-agent", "writer", environment=environment)
    assert ran.returncode == 0, ran.stderr[-2000:]
    result = json.loads(ran.stdout)
    assert (result["conversations"], result["steps"]) == (6, 6)
    asked = json.loads((tmp_path / "asked.json").read_text())
    assert asked["from_pretrained"] == {"model_name": str(model), "max_seq_length": 256, "load_in_4bit": True}
    assert (asked["get_peft_model"]["r"], asked["get_peft_model"]["lora_alpha"]) == (4, 8)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 4
