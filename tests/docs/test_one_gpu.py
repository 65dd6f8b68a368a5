"""The page on one GPU: its commands and settings work, and its gigabytes are those of its formula."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tests.docs.test_docs import blocks

from agentlightning.config import TrainConfig
from agentlightning.models.resolve import SHORT_NAMES
from agentlightning.util.settings import load_settings

PAGE = Path(__file__).parents[2] / "docs" / "get-started" / "one-gpu.md"
TEXT = PAGE.read_text()
[COMMAND] = [block.body for block in blocks(PAGE) if block.body.startswith("agl train")]
OTHERS = re.findall(r"^\| \d+ GB, [^|]*\| `([^`]*)`", TEXT, re.MULTILINE)
COMMANDS = [COMMAND, *(f"{COMMAND.partition('--model')[0]}--model {other}" for other in OTHERS)]


def formula() -> dict:
    namespace: dict = {}
    exec(next(block.body for block in blocks(PAGE) if block.file == "memory.py"), namespace)
    return namespace


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_settings_that_there_are(command):
    words = shlex.split(command)
    config = load_settings(TrainConfig, overrides=[word for word in words if re.match(r"\w+\.[\w.]+=", word)])
    assert config.policy.token_budget in (2048, 8192)
    model = words[words.index("--model") + 1]
    assert model in SHORT_NAMES or model.startswith("Qwen/")


def test_the_settings_of_vllm_are_settings(tmp_path):
    [settings] = [block.body for block in blocks(PAGE) if block.language == "toml"]
    (tmp_path / "train.toml").write_text(settings)
    policy = load_settings(TrainConfig, toml=tmp_path / "train.toml").policy
    assert (policy.engine, policy.lora and policy.lora.r, policy.servers.devices) == ("vllm", 16, ("0",))


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b"])
def test_the_gigabytes_are_those_of_the_formula(name):
    training_gb, sampling_gb = formula()["training_gb"], formula()["sampling_gb"]
    [row] = re.findall(rf"^\| {name} \| (.*) \|$", TEXT, re.MULTILINE | re.IGNORECASE)
    cases = [
        (2048, 0, False),
        (8192, 0, False),
        (8192, 0, True),
        (2048, 16, False),
        (8192, 16, False),
        (8192, 16, True),
    ]
    assert row.split(" | ") == [
        f"{gb:.1f}" for gb in (*(training_gb(name, *case) for case in cases), sampling_gb(name))
    ]


def test_what_it_says_of_the_engines_memory_is_its_default():
    from agentlightning.policy.config import LocalPolicyConfig

    fields = LocalPolicyConfig.model_fields
    for name in ("kv_cache_bytes", "prefix_cache_bytes"):
        assert f"{fields[name].default / 1e9:.1f} GB" in TEXT
