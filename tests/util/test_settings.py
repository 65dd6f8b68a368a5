"""Promises about settings: every mistake is one clear line, and what is written reads back the same."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, model_validator

import agentlightning as agl
from agentlightning.algorithms.lightning_rl import PRESETS, LightningRL
from agentlightning.config import TrainConfig
from agentlightning.errors import ConfigError
from agentlightning.util.settings import PRESET_NAMES, dump_toml, load_settings


class Section(BaseModel):
    model_config = ConfigDict(frozen=True)


class Adam(Section):
    type: Literal["adam"] = "adam"
    lr: float = Field(default=1e-5, gt=0)
    """How far each step goes."""
    decay: float = 0.0


class Muon(Section):
    type: Literal["muon"] = "muon"
    momentum: float = 0.95


class Algorithm(Section):
    steps: int = Field(default=100, ge=1)
    """Updates in all.

    Each follows one batch."""
    group_size: int = 8
    optimizer: Annotated[Adam | Muon, Field(discriminator="type")] = Field(default_factory=lambda: Adam(lr=3e-4))
    """How weights change."""
    credit: str | dict[str, Any] = "uniform"
    limit: int | None = 5

    @model_validator(mode="after")
    def _check(self) -> Algorithm:
        if self.group_size == 1:
            raise ConfigError("group_size=1 leaves no baseline; use at least 2")
        return self


class Run(Section):
    seed: int = 0
    modes: tuple[Literal["greedy", "sampled"], ...] = Field(default=("greedy",), min_length=1)
    folder: Path | None = None
    env: dict[str, str] = Field(default_factory=dict)
    shuffle: bool = True


class Config(Section):
    agent: str | None = None
    algorithm: Algorithm = Field(default_factory=Algorithm)
    """How it learns."""
    run: Run = Field(default_factory=Run)


class Strict(Section):
    name: str
    """Has no default."""


def load(*overrides: str, toml: Path | None = None) -> Config:
    return load_settings(Config, toml=toml, overrides=overrides)


def message(*overrides: str, toml: Path | None = None, model: type[BaseModel] = Config) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(model, toml=toml, overrides=overrides)
    return str(caught.value)


# -- reading ---------------------------------------------------------------------------------------------------------


def test_nothing_given_means_the_defaults() -> None:
    assert load() == Config()


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("algorithm.steps=7", lambda c: c.algorithm.steps == 7),
        ("algorithm.optimizer.lr=1e-4", lambda c: c.algorithm.optimizer.lr == 1e-4),
        ("algorithm.optimizer.lr = 1", lambda c: c.algorithm.optimizer.lr == 1.0),
        ("algorithm.optimizer={type='muon', momentum=0.5}", lambda c: c.algorithm.optimizer == Muon(momentum=0.5)),
        ("algorithm.optimizer.type=muon", lambda c: c.algorithm.optimizer == Muon()),
        ("run.shuffle=false", lambda c: c.run.shuffle is False),
        ('run.modes=["sampled", "greedy"]', lambda c: c.run.modes == ("sampled", "greedy")),
        ("run.env.MY_TASK=question", lambda c: c.run.env == {"MY_TASK": "question"}),
        ('run.env."a.b"=x', lambda c: c.run.env == {"a.b": "x"}),
        ("agent=python my_agent.py --fast=1", lambda c: c.agent == "python my_agent.py --fast=1"),
        ('agent="quoted"', lambda c: c.agent == "quoted"),
        ("agent=", lambda c: c.agent == ""),
        ("agent=2026-01-02", lambda c: c.agent == "2026-01-02"),
        ("agent=none", lambda c: c.agent is None),
        ("algorithm.limit=none", lambda c: c.algorithm.limit is None),
        ("algorithm.credit=none", lambda c: c.algorithm.credit == "none"),
        ("algorithm.credit.type=discounted", lambda c: c.algorithm.credit == {"type": "discounted"}),
    ],
)
def test_an_override_is_read_as_toml_or_else_as_text(override: str, read: Any) -> None:
    assert read(load(override))


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('\ufeff[algorithm]\nsteps = 3\ngroup_size = 4\ncredit = "x"\n', "utf-8")
    config = load("algorithm.steps=5", "algorithm.steps=6", "algorithm.credit.type=y", toml=path)
    assert (config.algorithm.steps, config.algorithm.group_size) == (6, 4)
    assert config.algorithm.credit == {"type": "y"}


def test_a_section_given_in_part_keeps_its_own_defaults() -> None:
    assert load("algorithm.optimizer.decay=0.1").algorithm.optimizer == Adam(lr=3e-4, decay=0.1)
    assert load("algorithm.optimizer.type=muon").algorithm.optimizer == Muon()
    assert "algorithm.optimizer.lr (from the override algorithm.optimizer.lr=1) belongs to another type" in message(
        "algorithm.optimizer.lr=1", "algorithm.optimizer.type=muon"
    )


def test_a_section_given_in_part_knows_what_was_set_of_it() -> None:
    config = load_settings(TrainConfig, overrides=["evaluation.tasks=8"])
    assert config.evaluation.model_fields_set == {"tasks"}
    assert agl.Trainer(config, algorithm=agl.APO(gradient_model="m")).config.evaluation.modes == ("sampled",)


def test_an_empty_section_is_not_where_a_setting_comes_from() -> None:
    assert "(from the override algorithm.steps=0)" in message("algorithm.steps=0", "algorithm={}")


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("algorithm.lr=1", "algorithm.optimizer.lr"),
        ("algoritm.steps=1", "algorithm.steps"),
        ("algorithm.group-size=4", "algorithm.group_size"),
        ("seed=1", "run.seed"),
        ("algorithm.optimizer.momentun=1", "algorithm.optimizer.momentum"),
        ("run.algorithm.steps=4", "algorithm.steps"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(override: str, nearest: str) -> None:
    name = override.partition("=")[0]
    expected = f"unknown setting {name} (from the override {override}); the nearest known one is {nearest}"
    assert message(override) == expected


def test_an_unknown_key_of_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[algoritm]\nsteps = 3\n[run]\nsead = 1\n")
    lines = message(toml=path).splitlines()
    assert lines[0] == "2 invalid settings:"
    assert sorted(line.strip() for line in lines[1:]) == [
        f"unknown setting algoritm.steps (from {path}); the nearest known one is algorithm.steps",
        f"unknown setting run.sead (from {path}); the nearest known one is run.seed",
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "algorithm.steps=abc",
            'algorithm.steps = "abc" (from the override algorithm.steps=abc) should be a valid integer',
        ),
        ("algorithm.steps=0", "algorithm.steps = 0 (from the override algorithm.steps=0) should be greater than or "),
        ("algorithm.steps=none", 'algorithm.steps = "none" (from the override algorithm.steps=none) should be a valid'),
        ("agent=3", "agent = 3 (from the override agent=3) should be a valid string"),
        (
            'run.modes=["gredy"]',
            """run.modes.0 = "gredy" (from the override run.modes=["gredy"]) should be 'greedy' or""",
        ),
        ("algorithm.optimizer.type=sgd", "has no type 'sgd'; it should be 'adam', 'muon'"),
        (
            "algorithm.optimizer.lr=-1",
            "algorithm.optimizer.lr = -1 (from the override algorithm.optimizer.lr=-1) should",
        ),
        ("algorithm.credit=[1]", "should be a valid string, or a valid dictionary"),
        ("algorithm=3", "algorithm = 3 (from the override algorithm=3) has settings of its own; set one of"),
        ("algorithm.group_size=1", "cannot work: group_size=1 leaves no baseline; use at least 2"),
    ],
)
def test_a_wrong_value_names_setting_value_source_and_what_would_work(override: str, expected: str) -> None:
    text = message(override)
    assert expected in text
    assert "\n" not in text
    assert "pydantic" not in text


def test_a_wrong_value_blames_the_last_that_set_it(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[algorithm]\nsteps = 0\ngroup_size = 4\n")
    assert f"algorithm.steps = 0 (from {path})" in message("algorithm.group_size=5", toml=path)
    assert "(from the override algorithm.steps=-1)" in message("algorithm.steps=-1", toml=path)


def test_a_setting_that_must_be_given_says_so() -> None:
    assert message(model=Strict) == "name is required; set it"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("algorithm.steps", r"'algorithm.steps' sets nothing; write section.key=value"),
        ("=3", r"'=3' sets nothing"),
        ("a b=3", r"'a b' is not the name of a setting"),
    ],
)
def test_an_override_that_is_none_is_refused(override: str, expected: str) -> None:
    assert re.match(expected, message(override))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    assert message(toml=path) == f"there is no settings file '{path}'; give the path of a TOML file"
    path.write_text("[algorithm\nsteps = 3")
    assert message(toml=path).startswith(f"{path} is not TOML: ")
    assert "line 1" in message(toml=path)


# -- writing ---------------------------------------------------------------------------------------------------------


def test_settings_are_written_with_their_meaning() -> None:
    assert dump_toml(Config()) == (
        'agent = "none"\n'
        "\n"
        "# How it learns.\n"
        "[algorithm]\n"
        "# Updates in all.\n"
        "#\n"
        "# Each follows one batch.\n"
        "steps = 100\n"
        "group_size = 8\n"
        'credit = "uniform"\n'
        "limit = 5\n"
        "\n"
        "# How weights change.\n"
        "[algorithm.optimizer]\n"
        'type = "adam"\n'
        "# How far each step goes.\n"
        "lr = 0.0003\n"
        "decay = 0.0\n"
        "\n"
        "[run]\n"
        "seed = 0\n"
        'modes = ["greedy"]\n'
        'folder = "none"\n'
        "env = {}\n"
        "shuffle = true\n"
    )


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda value: value != "none")


@given(
    agent=st.none() | text,
    limit=st.none() | st.integers(-(2**63), 2**63 - 1),
    lr=st.floats(min_value=0, exclude_min=True, allow_nan=False),
    env=st.dictionaries(text, text, max_size=3),
    credit=st.dictionaries(text, text | st.booleans() | st.floats(allow_nan=False) | st.lists(text), max_size=3),
)
def test_what_is_written_reads_back_the_same(agent: Any, limit: Any, lr: float, env: Any, credit: Any) -> None:
    import tempfile

    config = Config(
        agent=agent,
        algorithm=Algorithm(limit=limit, optimizer=Adam(lr=lr), credit=credit),
        run=Run(env=env, folder=Path("a/b"), modes=("sampled", "greedy")),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_text(dump_toml(config), "utf-8", newline="")
        assert load(toml=path) == config


def test_infinity_survives(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    config = Config(algorithm=Algorithm(optimizer=Muon(momentum=math.inf), credit={"x": -math.inf}))
    path.write_text(dump_toml(config))
    assert load(toml=path) == config


def test_a_none_deep_inside_is_refused_rather_than_read_back_as_text() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.credit holds a None inside"):
        dump_toml(Config(algorithm=Algorithm(credit={"weight": None})))


def test_what_is_set_to_none_in_a_table_of_sections_is_read_back_as_none(tmp_path: Path) -> None:
    model = {"model": "m", "max_context": None, "servers": {"urls": ["http://h:1"], "tolerance": None}}
    config = TrainConfig.model_validate({"gateway": {"models": {"reference": model}}})
    (tmp_path / "config.toml").write_text(dump_toml(config))
    assert load_settings(TrainConfig, toml=tmp_path / "config.toml") == config


class MySettings(LightningRL.config_class):
    steps: int = 17


def test_settings_of_a_class_of_ones_own_keep_its_defaults_where_others_are_given() -> None:
    config = LightningRL(config=MySettings(group_size=4), temperature=0.5).config
    assert (type(config), config.steps, config.group_size, config.temperature) == (MySettings, 17, 4, 0.5)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("learning_rate=1e-4", "algorithm.optimizer.lr"),
        ("algorithm.learning_rate=1e-4", "algorithm.optimizer.lr"),
        ("warm_start.learning_rate=1e-4", "warm_start.optimizer.lr"),
        ("epochs=3", "algorithm.steps"),
        ("batch_size=8", "algorithm.tasks_per_step"),
        ("algorithm.num_generations=8", "algorithm.group_size"),
        ("policy.model_name=x", "policy.model"),
        ("lr=1e-4", "algorithm.optimizer.lr"),
        ("policy.lora.lr=1e-4", "policy.lora.optimizer.lr"),
        ("policy.lora.rank=16", "policy.lora.r"),
        ("lora_rank=16", "policy.lora.r"),
        ("algorithm.kl=0.1", "algorithm.kl_in_reward"),
        ("grpo=1", "algorithm.preset"),
        ("algorithm.gspo=true", "algorithm.preset"),
        ("ppo=1", "algorithm.loss"),
        ("algorithm.STEPS=4", "algorithm.steps"),
        ("algorithm.optimizer.learning_rate=1e-4", "algorithm.optimizer.lr"),
        ("algorithm.loss.epsilon=0.2", "algorithm.loss.clip_low"),
        ("algorithm.lora_rank=16", "policy.lora.r"),
        ("algorithm.timeout=60", "runner.timeout_seconds"),
    ],
)
def test_the_words_of_other_trainers_lead_to_ours(typed: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"the nearest known one is {meant}$"):
        load_settings(TrainConfig, overrides=[typed])


def test_presets_are_known_by_the_names_that_other_trainers_have_for_algorithms() -> None:
    assert set(PRESET_NAMES) == set(PRESETS)
    for typed, meant in (("algorithm=grpo", "algorithm.preset=grpo"), ("algorithm.type=ppo", "algorithm.loss=ppo")):
        with pytest.raises(ConfigError, match=f"there is no algorithm .*; did you mean '{meant}'"):
            load_settings(TrainConfig, overrides=[typed])


@pytest.mark.parametrize("typed", ['algorithm=[{type="grpo"}]', 'algorithm.type=["grpo"]', "algorithm.type={a=1}"])
def test_a_list_or_a_table_in_place_of_a_name_is_refused_with_the_known_names(typed: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no algorithm .*\. Known: .*lightning_rl"):
        load_settings(TrainConfig, overrides=[typed])


@pytest.mark.parametrize(
    "typed", ["run.dir=x", "run_dir=x", "output_dir=x", "out=x", "algorithm.output_dir=x", "run=x", "run.run=x"]
)
def test_the_directory_of_a_run_is_said_to_be_an_option(typed: str) -> None:
    with pytest.raises(ConfigError, match=r"is no setting: give --run DIR, or Trainer\(run_dir=DIR\)$"):
        load_settings(TrainConfig, overrides=[typed])


@pytest.mark.parametrize("typed", ["foo=1", "fp16=true", "x=1", "policy.lora.dropout=0.1", "algorithm.gpus=2"])
def test_a_name_that_is_like_none_names_none(typed: str) -> None:
    with pytest.raises(ConfigError, match=r"; no known one is like it \(all of them: agl train --print-config\)$"):
        load_settings(TrainConfig, overrides=[typed])
    with pytest.raises(ConfigError, match=r"; no known one is like it$"):
        LightningRL(foo=1)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("temp=1", "algorithm.temperature"), ("policy.modle=x", "policy.model"), ("r=3", "policy.lora.r")],
)
def test_what_is_meant_begins_with_the_name_or_is_in_its_section(typed: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"the nearest known one is {meant}$"):
        load_settings(TrainConfig, overrides=[typed])


@pytest.mark.parametrize("typed", ["policy.lora=true", "policy.lora=16"])
def test_a_section_that_is_given_a_value_names_its_settings(typed: str) -> None:
    with pytest.raises(ConfigError, match=r"has settings of its own; set one of these, such as policy\.lora\.r$"):
        load_settings(TrainConfig, overrides=[typed])


def test_a_learning_rate_without_its_minus_is_refused() -> None:
    with pytest.raises(ConfigError, match="should be less than or equal to 1"):
        load_settings(TrainConfig, overrides=["algorithm.optimizer.lr=2e5"])


def test_the_words_of_other_trainers_are_known_to_the_algorithm_too() -> None:
    with pytest.raises(ConfigError, match=r"the nearest known one is optimizer\.lr$"):
        LightningRL(learning_rate=1e-4)


@pytest.mark.parametrize("value", ['{"a": 1.0, "b": 0.5}', "{a = 1.0, b = 0.5}"])
def test_a_table_is_taken_as_python_and_json_or_as_toml_write_it(value):
    found = load_settings(TrainConfig, overrides=[f"algorithm.reward_weights={value}"])
    assert found.algorithm.reward_weights == {"a": 1.0, "b": 0.5}


def test_text_that_only_looks_like_json_stays_text():
    assert load_settings(TrainConfig, overrides=["agent={prog} --x"]).agent == "{prog} --x"
