"""How the trainer follows its ranks, which are real processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.models import tiny_checkpoint
from tests.support.ranks import ranks_of

from agentlightning.errors import ConfigError, PolicyError, RankError
from agentlightning.policy.config import LocalPolicyConfig
from agentlightning.policy.fsdp import policy as module
from agentlightning.policy.fsdp.policy import RankGroup

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Fails:
    """In place of the samples of an update: an error where they are read, in the trainer's process or in the others."""

    def __init__(self, error: Exception, *, here: bool = True, elsewhere: bool = True) -> None:
        self.error, self.here, self.elsewhere, self.trainer = error, here, elsewhere, os.getpid()

    def __iter__(self) -> Iterator[Any]:
        if self.here if os.getpid() == self.trainer else self.elsewhere:
            raise self.error
        return iter(())


def config(model: Path, processes: int = 2, **settings: Any) -> LocalPolicyConfig:
    given = {"kind": "fsdp", "device": "cpu", "rank_timeout_seconds": 120, "processes": processes}
    return LocalPolicyConfig.model_validate({"model": str(model), **given, **settings})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("group") / "model")


@pytest.fixture
def group(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RankGroup]:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 1.0)
    opened = RankGroup.open(config(model), lambda read: read())
    yield opened
    opened.close()
    assert not ranks_of(os.getpid())


def score(group: RankGroup, trees: Any) -> Any:
    return group.call("score", trees, frozenset({"logprobs"}), None, None)


def test_what_all_ranks_refuse_alike_is_raised_and_the_group_goes_on(group: RankGroup) -> None:
    with pytest.raises(PolicyError, match=r"^no column$") as caught:
        score(group, Fails(PolicyError("no column")))
    assert not isinstance(caught.value, RankError)
    assert score(group, []) == {"logprobs": []}


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (
            Fails(MemoryError("no memory"), here=False),
            r"rank 1 of 2 .process \d+ on .* ended with status 1 .MemoryError: no memory. during 'score'",
        ),
        (Fails(PolicyError("alone"), here=False), r"rank 1 of 2 .process \d+ on .*PolicyError: alone"),
        (Fails(MemoryError("no memory"), elsewhere=False), "rank 0 .*MemoryError: no memory"),
    ],
)
def test_a_rank_that_fails_alone_is_named_with_its_error_and_the_group_is_over(
    group: RankGroup, fails: Fails, words: str
) -> None:
    for _ in range(2):
        with pytest.raises(RankError, match=words):
            score(group, fails)
    assert not ranks_of(os.getpid())


def test_one_policy_at_a_time_is_trained_by_several_processes(group: RankGroup, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"trains a policy of kind = .fsdp. already"):
        RankGroup.open(config(model), lambda read: read())
    group.close()
    RankGroup.open(config(model, 1), lambda read: read()).close()


def test_a_rank_that_ends_before_it_has_joined_is_named_and_another_group_can_be_made(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "false")
        with pytest.raises(RankError, match=r"rank 1 of 2 .process \d+ on .* ended with status 1 during 'join'"):
            RankGroup.open(config(model), lambda read: read())
    RankGroup.open(config(model), lambda read: read()).close()


def test_another_number_than_that_of_torchrun_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(
        ConfigError, match=r"policy.processes=2, and torchrun has started WORLD_SIZE=4; make them equal"
    ):
        RankGroup.open(config(model), lambda read: read())
