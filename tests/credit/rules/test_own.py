"""A credit rule of one's own is a class in any module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.config import TrainConfig
from agentlightning.credit import training_samples
from agentlightning.credit.base import credit_rule
from agentlightning.errors import ConfigError, ExtensionError
from agentlightning.util.settings import dump_toml, load_settings

CODE = """
from agentlightning.credit import CreditRule

class Last(CreditRule):
    scale: float = 1.0

    def advantages(self, group):
        return [[0.0] * (len(each.transitions) - 1) + [self.scale * each.reward] for each in group]

class Raises(CreditRule):
    def advantages(self, group):
        raise KeyError("no such task")

class NotANumber(CreditRule):
    def advantages(self, group):
        return [[float("nan")] * len(each.transitions) for each in group]

class WrongShape(CreditRule):
    def advantages(self, group):
        return [[1.0] for each in group]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "own_rules.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "own_rules"
    sys.modules.pop("own_rules", None)


@pytest.mark.parametrize("form", ["own_rules:Last", "own_rules.py:Last"])
def test_a_rule_of_ones_own_is_named_in_a_file_or_on_the_command_line(module: str, tmp_path: Path, form: str) -> None:
    given = [f'algorithm.credit.type="{form}"', "algorithm.credit.scale=2.0"]
    config = load_settings(TrainConfig, overrides=given)
    path = tmp_path / "config.toml"
    path.write_text(dump_toml(config))
    again: Any = load_settings(TrainConfig, toml=path).algorithm
    assert again == config.algorithm
    assert type(credit_rule(again.credit)).__name__ == "Last"
    assert Path(again.credit["type"].rpartition(":")[0]).is_absolute() == (form == "own_rules.py:Last")


def test_a_rule_of_ones_own_is_given_as_class_or_object(module: str) -> None:
    kind: Any = type(credit_rule(f"{module}:Last"))
    assert LightningRL(credit=kind).config.credit == f"{module}:Last"
    assert LightningRL(credit=kind(scale=0.5)).config.credit == {"type": f"{module}:Last", "scale": 0.5}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["algorithm.credit=own_rules:Lost"], r"own_rules:Lost \(.*own_rules.py\) cannot be imported"),
        (["algorithm.credit=pathlib:Path"], r"pathlib.py\) is no credit rule; it should be a .*:CreditRule"),
        (['algorithm.credit.type="own_rules:Last"', "algorithm.credit.skale=1"], "skale"),
    ],
)
def test_a_rule_that_cannot_be_used_names_itself_and_its_file(module: str, settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_settings(TrainConfig, overrides=settings)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Raises", "failed with KeyError: 'no such task'"),
        ("NotANumber", r"\[nan, nan\], not finite numbers"),
        ("WrongShape", r"it credits \[1, 1\] calls of rollouts that made \[2, 2\]"),
    ],
)
def test_a_rule_that_fails_in_a_step_names_itself_and_its_file(module: str, make: Any, name: str, said: str) -> None:
    group = [make("a", 1.0, "xy"), make("b", 0.0, "xy")]
    with pytest.raises(ExtensionError, match=rf"(?s)credit rule own_rules:{name} \(.*own_rules.py\).*{said}"):
        training_samples([group], f"{module}:{name}")
