"""Settings of training on several processes that cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

import agentlightning as agl
from agentlightning.errors import ConfigError
from agentlightning.policy.config import LocalPolicyConfig, PolicyConfig
from agentlightning.policy.fsdp.policy import Rank
from agentlightning.policy.open import policy_config


@pytest.mark.parametrize("setting", [{"processes": 2}, {"rank_timeout_seconds": 5}])
def test_a_setting_of_several_processes_is_refused_where_one_trains(setting: Any) -> None:
    with pytest.raises(ValidationError, match=r'set policy.kind = "fsdp"'):
        agl.config.PolicyConfig(**setting)


def test_more_processes_than_the_trees_of_an_update_are_refused() -> None:
    policy: Any = {"kind": "fsdp", "processes": 4}
    with pytest.raises(ValidationError, match=r"policy.processes=4: an update has 3 trees at most"):
        agl.TrainConfig(policy=policy, algorithm=agl.config.LightningRLConfig(tasks_per_step=7, minibatches=2))
    assert agl.TrainConfig(policy=policy, algorithm=agl.config.LightningRLConfig(tasks_per_step=8, minibatches=2))


def test_more_processes_than_a_batch_of_the_warm_start_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"warm_start.batch_size=2"):
        agl.TrainConfig(
            policy=agl.config.PolicyConfig(kind="fsdp", processes=4),
            warm_start=agl.config.WarmStartConfig(dataset="a.jsonl", batch_size=2),
        )


def test_every_setting_reaches_the_ranks() -> None:
    settings = PolicyConfig(kind="fsdp", processes=3, rank_timeout_seconds=7, device="cuda", engine="vllm")
    config = policy_config(settings, "model")
    for name in ("kind", "processes", "rank_timeout_seconds", "device"):
        assert getattr(config, name) == getattr(settings, name)
    assert config.sampling_device == "cpu"  # Servers sample: the trainer's copy needs no accelerator.


def test_settings_of_an_earlier_run_are_read_though_they_name_no_address() -> None:
    assert agl.config.PolicyConfig.model_validate({"kind": "fsdp", "processes": 2, "address": "none"}).processes == 2
    with pytest.raises(ValidationError, match="address"):
        agl.config.PolicyConfig.model_validate({"address": "0.0.0.0:29400"})


def test_a_device_that_torch_does_not_know_is_refused_before_ranks_meet() -> None:
    with pytest.raises(ConfigError, match=r'device="gpu" cannot be used'):
        Rank(LocalPolicyConfig(model="none", device="gpu"), "env://", 0, 2)
