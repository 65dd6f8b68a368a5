"""A loss of one's own is a class in any module: named where a built-in name stands, with settings of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.models import tiny_model

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.config import TrainConfig
from agentlightning.credit import training_samples
from agentlightning.errors import ConfigError, ExtensionError
from agentlightning.policy.base import UpdateOptions
from agentlightning.policy.config import OptimizerConfig
from agentlightning.policy.losses import token_losses
from agentlightning.policy.update.updater import Updater
from agentlightning.trajectory import Trajectory, Transition
from agentlightning.util.settings import dump_toml, load_settings

CODE = """
import torch
from agentlightning.policy.losses import ADVANTAGES, LossValue, TokenLoss

class Plain(TokenLoss):
    needs = frozenset({ADVANTAGES})
    beta: float = 0.1
    least: float | None = -5.0

    def __call__(self, tokens):
        gain = self.beta * tokens.weights * tokens.columns[ADVANTAGES] * tokens.trained_logprobs
        return LossValue(-gain.sum(), {"plain": gain.detach().sum()})

class Raises(Plain):
    def __call__(self, tokens):
        raise KeyError("no such column")

class NotANumber(Plain):
    def __call__(self, tokens):
        return LossValue(super().__call__(tokens).loss * float("nan"), {})

class WrongShape(Plain):
    def __call__(self, tokens):
        return LossValue(tokens.weights * tokens.trained_logprobs, {})

class Number(Plain):
    def __call__(self, tokens):
        return 0.5

class NoFormula(TokenLoss):
    needs = frozenset()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with losses, in the working directory."""
    name = "own_losses"
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield name
    sys.modules.pop(name, None)


def loss_of(*overrides: str, toml: Path | None = None) -> Any:
    return load_settings(TrainConfig, toml=toml, overrides=overrides).algorithm.loss


@pytest.mark.parametrize("form", ["own_losses:Plain", "own_losses.py:Plain"])
def test_a_loss_of_ones_own_is_named_in_a_file_or_on_the_command_line(module: str, tmp_path: Path, form: str) -> None:
    found = loss_of(f"algorithm.loss={form}")
    assert (type(found).__name__, found.beta) == ("Plain", 0.1)
    config = load_settings(
        TrainConfig, overrides=[f'algorithm.loss.type="{form}"', "algorithm.loss.beta=0.2", "algorithm.loss.least=none"]
    )
    path = tmp_path / "config.toml"
    path.write_text(dump_toml(config))
    again = loss_of(toml=path)
    assert again == config.algorithm.loss
    assert (again.beta, again.least) == (0.2, None)
    assert Path(again.type.rpartition(":")[0]).is_absolute() == form.endswith(".py:Plain"), "found from any directory"


def test_a_loss_of_ones_own_is_one_of_several_or_given_as_class_or_object(module: str, tmp_path: Path) -> None:
    both = loss_of(f'algorithm.loss=["ppo", {{type="{module}:Plain", beta=0.3}}]')
    assert [each.type for each in both] == ["ppo", f"{module}:Plain"]
    kind = type(both[1])
    assert LightningRL(loss=kind).config.loss == kind(type=f"{module}:Plain")
    assert LightningRL(loss=kind(beta=0.4)).config.losses[0].beta == 0.4
    path = tmp_path / "config.toml"
    path.write_text(dump_toml(TrainConfig(algorithm=LightningRL(loss=[kind(beta=0.4), "nll"]).config)))
    assert loss_of(toml=path)[0] == kind(type=f"{module}:Plain", beta=0.4), "a resumed run has it again"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["algorithm.loss=own_losses:Plane"], r"own_losses:Plane \(.*own_losses.py\) cannot be .*no attribute"),
        (["algorithm.loss=no_such_module:Plain"], r"no_such_module:Plain \(not found in .*\) cannot be imported"),
        (["algorithm.loss=missing.py:Plain"], r"missing.py:Plain \(.*missing.py\) cannot be imported"),
        (["algorithm.loss=broken.py:Plain"], r"broken.py:Plain \(.*broken.py:2\) cannot be .*: ZeroDivisionError"),
        (["algorithm.loss=pathlib:Path"], r"pathlib.py\) is no loss; it should be a subclass of .*:TokenLoss"),
        (["algorithm.loss=own_losses:NoFormula"], r"own_losses:NoFormula \(.*own_losses.py\) defines no __call__"),
        (["algorithm.loss=own"], r"there is no loss 'own'\. Known: awr, .*; one of your own is module:name"),
        (['algorithm.loss.type="own_losses:Plain"', "algorithm.loss.betta=1"], "nearest .* is algorithm.loss.beta"),
        (['algorithm.loss.type="own_losses:Plain"', "algorithm.loss.beta=x"], "should be a valid number"),
    ],
)
def test_a_loss_that_cannot_be_used_names_itself_and_its_file(
    module: str, tmp_path: Path, settings: list[str], said: str
) -> None:
    (tmp_path / "broken.py").write_text("x = 1\nx / 0\n")
    with pytest.raises(ConfigError, match=said):
        loss_of(*settings)


def step(loss: Any) -> dict[str, float]:
    torch.set_num_threads(1)
    calls = {
        name: Transition(name, "at", name, 1, (1, 2, 3), answer, (-3.0,) * len(answer))
        for name, answer in (("good", (7, 8, 9)), ("bad", (10, 11)))
    }
    group = [Trajectory(n, "at", (call,), reward) for (n, call), reward in zip(calls.items(), (1.0, 0.0), strict=True)]
    return Updater(tiny_model(), OptimizerConfig(lr=1e-3)).step(training_samples([group])[0], UpdateOptions(loss=loss))


def test_a_loss_of_ones_own_trains(module: str) -> None:
    assert step(f"{module}:Plain")["plain"] != 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Raises", "failed with KeyError: 'no such column'"),
        ("NotANumber", "its loss is nan for 3 tokens whose values are finite|its loss is nan for 5 tokens"),
        ("WrongShape", r"its loss has the shape \[5\]; return a scalar"),
        ("Number", "it returned float; return a LossValue"),
    ],
)
def test_a_loss_that_fails_in_a_step_names_itself_and_its_file(module: str, name: str, said: str) -> None:
    (loss,) = token_losses(f"{module}:{name}")
    with pytest.raises(ExtensionError, match=rf"(?s)loss own_losses:{name} \(.*own_losses.py\).*({said})"):
        step(loss)
