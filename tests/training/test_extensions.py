"""Trackers, hooks, kinds of datasets, engines, backends and rewards of one's own are named in settings, and a run knows
whether they have changed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithms.base import make_algorithm
from agentlightning.compat.runner import HookedAgent, with_hooks
from agentlightning.config import TrainConfig
from agentlightning.engine.servers.config import ENGINES
from agentlightning.errors import AgentError, ConfigError, ExtensionError, ResumeError
from agentlightning.policy.config import BACKENDS
from agentlightning.runner.agents.agent import function_spec
from agentlightning.task import load_dataset
from agentlightning.training.persistence.run_dir import RunState, check_extensions, extensions_of
from agentlightning.training.tracking import check_installed, load_tracker
from agentlightning.util.settings import dump_toml, load_settings

CODE = """
import agentlightning as agl
from agentlightning.engine.servers.clients.vllm import VllmServer
from agentlightning.task import DatasetKind
from agentlightning.training.tracking import Tracker

class Lines(Tracker):
    def start(self, run):
        return "lines"
    def log(self, step, metrics):
        pass

class NoLog(Tracker):
    def start(self, run):
        return "lines"

class Before(agl.Hook):
    async def on_rollout_start(self, *, agent, runner, rollout):
        print("before")

class Sums(DatasetKind):
    agent, reward = "own_parts:solve", "own_parts:score"
    def load(self, address):
        return [{"n": n, "level": address.name, **address.options} for n in range(address.size)]

class Fails(DatasetKind):
    def load(self, address):
        raise KeyError("no such level")

class Near(VllmServer):
    pass

class Logged:
    @classmethod
    async def open(cls, config, settings):
        return config, settings

class MeasureConfig(agl.config.AlgorithmConfig):
    steps: int = 2

class Measure(agl.Algorithm[MeasureConfig]):
    config_class = MeasureConfig
    @property
    def total_steps(self):
        return self.config.steps
    async def run(self, training):
        pass

def solve(task): return "1"
def score(task, output): return 1.0
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a module in the working directory."""
    file = tmp_path / "own_parts.py"
    file.write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield file
    sys.modules.pop("own_parts", None)


def config_of(*overrides: str) -> TrainConfig:
    return load_settings(TrainConfig, overrides=overrides)


def again(config: TrainConfig, folder: Path) -> TrainConfig:
    (folder / "config.toml").write_text(dump_toml(config))
    return load_settings(TrainConfig, toml=folder / "config.toml")


@pytest.mark.parametrize("form", ["own_parts:{}", "own_parts.py:{}"])
def test_an_algorithm_of_ones_own_has_settings_and_comes_back_from_them(
    module: Path, tmp_path: Path, form: str
) -> None:
    config = config_of(f'algorithm.type="{form.format("Measure")}"', "algorithm.steps=3")
    made = make_algorithm(again(config, tmp_path).algorithm)
    assert (type(made).__name__, made.total_steps, made.restorable) == ("Measure", 3, True)
    trainer = agl.Trainer(algorithm=type(made)(steps=4))
    assert make_algorithm(again(trainer.config, tmp_path).algorithm).total_steps == 4
    assert agl.Trainer(algorithm=type(made)).algorithm.total_steps == 2
    stages = config_of(f'algorithm={{type="sequential", stages=["lightning_rl", "{form.format("Measure")}"]}}')
    assert make_algorithm(again(stages, tmp_path).algorithm).total_steps == 102


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["algorithm=own_parts:Lines"], r"own_parts:Lines \(.*own_parts.py\) is no algorithm"),
        (['algorithm.type="own_parts:Measure"', "algorithm.stepz=3"], "algorithm.stepz .* algorithm.steps"),
        (["algorithm=lightning"], "there is no algorithm 'lightning'; did you mean 'lightning_rl'"),
        (['tracking.trackers=["lines"]'], r"no tracker 'lines'\. Known: mlflow, tensorboard, trackio, wandb"),
        (["policy.engine=vlm"], r"no engine 'vlm'; did you mean 'vllm'\? Known: local, sglang, vllm"),
        (["policy.kind=fdsp"], r"no backend 'fdsp'; did you mean 'fsdp'\? Known: fsdp, local, tinker"),
        (["policy.backend={rate=1}"], 'settings of one of your own, and kind is "local"'),
    ],
)
def test_what_cannot_be_named_says_what_there_is(module: Path, settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of(*settings)


def test_a_tracker_of_ones_own_needs_no_extra(module: Path, tmp_path: Path) -> None:
    config = again(config_of('tracking.trackers=["own_parts.py:Lines"]'), tmp_path)
    check_installed(config.tracking)
    assert load_tracker(config.tracking.trackers[0]).start(None) == "lines"  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"tracker own_parts:NoLog \(.*own_parts.py\) defines no log"):
        check_installed(config_of('tracking.trackers=["own_parts:NoLog"]').tracking)


def test_a_hook_of_ones_own_is_made_where_the_agent_runs(module: Path, tmp_path: Path) -> None:
    import cloudpickle

    config = again(config_of('runner.hooks=["own_parts.py:Before"]'), tmp_path)
    agent = with_hooks("own_parts:solve", None, config.runner.hooks)
    sys.modules.pop("own_parts")
    loaded = cloudpickle.loads(cloudpickle.dumps(agent))
    assert isinstance(loaded, HookedAgent)
    assert [type(each).__name__ for each in loaded.hooks] == ["Before"]
    with pytest.raises(ConfigError, match=r"own_parts:Lines .* is no hook; it should be a subclass of .*:Hook"):
        with_hooks("own_parts:solve", None, ["own_parts:Lines"])


def test_a_kind_of_dataset_of_ones_own_has_an_address(module: Path) -> None:
    assert load_dataset("own_parts:Sums?size=2&start=7") == [{"n": n, "level": "Sums", "start": 7} for n in range(2)]
    assert load_dataset("own_parts.py:Sums:hard?size=1") == [{"n": 0, "level": "hard"}]
    config = config_of("env=own_parts:Sums?size=2")
    assert (config.data.train, config.agent, config.reward) == (
        "own_parts:Sums?size=2",
        "own_parts:solve",
        "own_parts:score",
    )
    with pytest.raises(ExtensionError, match=r"own_parts:Fails \(.*own_parts.py\) failed with KeyError"):
        load_dataset("own_parts:Fails?size=2")
    with pytest.raises(ConfigError, match=r"own_parts:Lines \(.*\) is no kind of dataset"):
        load_dataset("own_parts:Lines?size=2")


async def test_an_engine_and_a_backend_of_ones_own_are_found(module: Path, tmp_path: Path) -> None:
    from agentlightning.policy.open import open_trained

    given = ["policy.engine=own_parts:Near", "policy.kind=own_parts:Logged", "policy.backend={rate = 2}"]
    policy = again(config_of(*given), tmp_path).policy
    assert ENGINES.find(policy.engine).__name__ == "Near"
    assert BACKENDS.find(policy.kind).__name__ == "Logged"
    opened: Any = await open_trained(policy, None)  # pyright: ignore[reportArgumentType]
    assert opened == (None, {"rate": 2})


def test_a_reward_that_nobody_announces_names_those_that_there_are(module: Path) -> None:
    assert str(function_spec("own_parts:score")) == "own_parts:score"
    assert str(function_spec("reasoning_gym")).endswith("reasoning_gym:score")
    with pytest.raises(AgentError, match=r"there is no reward function 'brevity'\. Known: reasoning_gym"):
        function_spec("brevity")


def test_a_run_knows_whether_a_part_of_others_has_changed(module: Path, tmp_path: Path) -> None:
    given = ['tracking.trackers=["own_parts:Lines"]', "algorithm=own_parts:Measure"]
    config = config_of(*given)
    state = RunState("r1", extensions=extensions_of(config))
    assert set(state.extensions) == {"algorithm.type=own_parts:Measure", "tracking.trackers=own_parts:Lines"}
    check_extensions(tmp_path, state, config, [])
    module.write_text(CODE + "\n# changed\n")
    with pytest.raises(ResumeError, match=r"own_parts:\w+ of .* has changed .*: .*own_parts.py; put back"):
        check_extensions(tmp_path, state, config, ["algorithm.type=own_parts:Measure"])
    check_extensions(tmp_path, state, config, given)
    check_extensions(tmp_path, state, config, [])
    assert extensions_of(config_of("reward=own_parts:score", "agent=own_parts:solve")) == {}, "an agent may be mended"
