"""What may change when a run is resumed, and how it is written down."""

import pytest

from agentlightning.config import TrainConfig
from agentlightning.errors import ConfigError, ResumeError
from agentlightning.trainer import Trainer
from agentlightning.training.persistence.run_dir import (
    RunDir,
    RunState,
    changed_settings,
    changes_rewards,
    check_changes,
    describe_changes,
    flat_settings,
    overrides,
    shown,
    write_atomically,
)
from agentlightning.util.settings import dump_toml, load_settings


def changed(*texts):
    return changed_settings(TrainConfig(), load_settings(TrainConfig, overrides=texts))


@pytest.mark.parametrize(
    "text",
    [
        "agent=m:f",
        "reward=m:f",
        "algorithm.steps=200",
        "algorithm.optimizer.lr=1e-4",
        'algorithm.reward_weights={"a": 1.0}',
        'algorithm.credit={"type": "uniform", "intermediate": "ignore"}',
        "runner.max_failed_share=1",
        "runner.timeout_seconds=5",
        "policy.max_context=2048",
    ],
)
def test_what_messages_advise_may_change(text):
    changes = changed(text)
    assert changes
    check_changes(changes)


def test_a_change_has_the_old_and_the_new_value():
    assert changed("algorithm.steps=200") == {"algorithm.steps": (TrainConfig().algorithm.steps, 200)}


@pytest.mark.parametrize(
    "text",
    [
        "policy.model=other",
        "run.seed=3",
        "data.train=other.jsonl",
        "warm_start.steps=3",
        "algorithm.tasks_per_step=3",
        "algorithm.optimizer.type=muon",
        "evaluation.modes=['greedy']",
    ],
)
def test_what_a_run_is_made_of_stays(text):
    with pytest.raises(ConfigError, match=f"^{text.partition('=')[0]}.*: a resumed run keeps this"):
        check_changes(changed(text))


PROVIDER = {"name": "known", "base_urls": ["http://127.0.0.1:1/v1"], "api_key": "s3cret", "headers": {"x": "s3cret"}}


def test_settings_are_shown_without_secrets_in_lists_neither():
    environment = {"HF_TOKEN": "s3cret", "OPENAI_API_KEY": "s3cret", "password": "s3cret", "CITY": "Paris"}
    settings = {"gateway": {"providers": [PROVIDER]}, "runner": {"env": environment}}
    found = flat_settings(TrainConfig.model_validate(settings))
    assert "s3cret" not in str(found)
    assert '"base_urls":["http://127.0.0.1:1/v1"]' in found["gateway.providers"]
    assert {name for name in found if name.startswith("runner.env")} == {"runner.env.CITY"}


def test_changes_of_a_list_are_named_without_its_secrets():
    changes = changed_settings(TrainConfig(), TrainConfig.model_validate({"gateway": {"providers": [PROVIDER]}}))
    text = describe_changes(shown(changes))
    assert "http://127.0.0.1:1/v1" in text
    assert "s3cret" not in text


def test_changes_are_named_without_secrets():
    changes = {"algorithm.steps": (100, 200), "gateway.upstream.headers.authorization": ("Bearer a", "Bearer b")}
    text = describe_changes(shown(changes))
    assert text == "algorithm.steps 100 -> 200, gateway.upstream.headers.authorization ... -> ..."
    assert shown(changes)["algorithm.steps"] == (100, 200)
    assert overrides({"algorithm.steps": 200, "reward": None, "agent": "m:f"}) == [
        "algorithm.steps=200", "reward=none", 'agent="m:f"',
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("agent=m:f", True),
        ("reward=m:f", True),
        ('algorithm.reward_weights={"a": 1.0}', True),
        ("algorithm.steps=200", False),
        ("algorithm.target_agent=a", False),
        ("runner.hosts=2", False),
    ],
)
def test_which_changes_make_rewards_mean_something_else(text, expected):
    assert changes_rewards(changed(text)) is expected


@pytest.fixture
def run(tmp_path):
    run_dir = RunDir.create(tmp_path / "run")
    write_atomically(run_dir.path / "config.toml", dump_toml(TrainConfig()).encode())
    run_dir.write_state(RunState(run_id="r", objects=["agent", "reward"]))
    run_dir.data("train").parent.mkdir()
    for part in ("train", "validation", "held_out"):
        run_dir.data(part).write_text('{"n": 1}\n')
    run_dir.close()
    return run_dir.path


def test_arguments_of_a_resumed_trainer_are_changes_too(run):
    with pytest.raises(ConfigError, match=r"run\.seed"):
        Trainer.resume(run, seed=4)
    trainer = Trainer.resume(run, n_runners=2, changes={"algorithm.steps": 7})
    assert (trainer.config.runner.hosts, trainer.config.algorithm.steps) == (2, 7)


def test_how_credit_is_given_and_tasks_are_drawn_may_change(run):
    trainer = Trainer.resume(
        run,
        changes={
            "algorithm.normalization": "batch",
            "algorithm.agent_rewards": "own",
            "algorithm.keep_groups": 0.5,
            "algorithm.timeout_reward": -1.0,
            "curriculum.tasks": "learnability",
            "curriculum.turns": {"start": 3, "max": 9},
            "air": {"tool_succeeded": 0.1},
            "policy.gradient_checkpointing": True,
        },
    )
    algorithm, curriculum = trainer.config.algorithm, trainer.config.curriculum
    assert algorithm.normalization.type == "batch"
    assert (algorithm.agent_rewards, algorithm.keep_groups, algorithm.timeout_reward) == ("own", 0.5, -1.0)
    assert curriculum.tasks == "learnability"
    assert curriculum.turns is not None
    assert curriculum.turns.max == 9
    assert trainer.config.air == {"tool_succeeded": 0.1}
    assert trainer.config.policy.gradient_checkpointing


def test_the_number_of_training_processes_may_change_and_their_kind_may_not(run):
    config = TrainConfig(policy={"kind": "fsdp", "processes": 2})
    write_atomically(run / "config.toml", dump_toml(config).encode())
    trainer = Trainer.resume(run, changes={"policy.processes": 4, "policy.rank_timeout_seconds": 60})
    assert (trainer.config.policy.processes, trainer.config.policy.rank_timeout_seconds) == (4, 60)
    with pytest.raises(ConfigError, match=r"policy\.kind"):
        Trainer.resume(run, changes={"policy.kind": "local", "policy.processes": 1})


@pytest.mark.parametrize("fixed", ["algorithm.group_size=4", "algorithm.preset=dapo", "policy.value_head=linear"])
def test_what_a_checkpoint_or_an_order_of_tasks_depends_on_stays(run, fixed):
    with pytest.raises(ConfigError, match="a resumed run keeps this"):
        Trainer.resume(run, changes=dict([fixed.split("=")]))


def test_a_directory_without_a_run_is_named(tmp_path):
    with pytest.raises(ResumeError, match=r"holds no run: .*config\.toml does not exist"):
        Trainer.resume(tmp_path)


def test_a_part_that_was_a_live_object_is_asked_for_by_name(run):
    with pytest.raises(ResumeError, match=r"reward function that is an object; .*reward=\.\.\."):
        Trainer.resume(run).fit(lambda task: 1.0)
    with pytest.raises(ConfigError, match="no agent: give --agent"):
        Trainer.resume(run, reward=lambda task: 1.0).fit()
    assert (run / "state.json").exists()


def test_tasks_that_cannot_be_read_end_the_promise_to_resume(run):
    (run / "data" / "held_out.jsonl").write_text('{"n": ')
    with pytest.raises(ResumeError, match=r"the tasks of .* cannot be read"):
        Trainer.resume(run).fit(lambda task: 1.0)


def test_a_run_that_has_begun_has_no_dry_run(run):
    with pytest.raises(ConfigError, match=r"has begun.*agl train --config .*config.toml --dry-run"):
        Trainer.resume(run).dry_run()


def test_an_object_in_place_of_a_name_is_another_reward_and_in_place_of_an_object_the_same(run):
    def reward(task):
        return 1.0

    state = RunState(run_id="r", evaluations={"before-greedy": [1.0]}, best_step=3)
    assert not Trainer.resume(run, reward=reward)._run(reward)._changes_rewards()
    write_atomically(run / "config.toml", dump_toml(TrainConfig(reward="m:f")).encode())
    assert not Trainer.resume(run)._run(reward)._changes_rewards()
    assert Trainer.resume(run, reward=reward)._run(reward)._changes_rewards()
    state.forget_measurements()
    assert (state.evaluations, state.best_step, state.suffix) == ({}, None, "-changed1")
