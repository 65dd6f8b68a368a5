"""The proximal policy of an asynchronous run of the tiny model reaches the update."""

from __future__ import annotations

import json

import pytest
from tests.e2e.test_replay import HELD_OUT, TASKS, lucky_once, settings

import agentlightning as agl
from agentlightning.errors import ConfigError

pytestmark = pytest.mark.integration


@pytest.mark.slow
@pytest.mark.parametrize("proximal", ["pass", "interpolate"])
def test_it_reaches_the_update_of_an_asynchronous_run(tmp_path, proximal):
    algorithm = agl.LightningRL(steps=1, tasks_per_step=1, group_size=2, proximal=proximal)
    agl.Trainer(settings(1), algorithm=algorithm, run_dir=tmp_path / "run").fit(
        lucky_once, TASKS, HELD_OUT, held_out_dataset=HELD_OUT
    )
    (line,) = [json.loads(each) for each in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert line["mismatch_weight"] == pytest.approx(1, abs=0.05), "sampled by the weights that the update starts from"
    assert 0 <= line["proximal_differs"] <= 1
    assert line["optimizer_steps"] == 1


def test_interpolation_in_a_synchronous_run_is_refused(tmp_path):
    algorithm = agl.LightningRL(steps=1, tasks_per_step=1, group_size=2, proximal="interpolate")
    with pytest.raises(ConfigError, match=r"does nothing with run\.max_staleness=0"):
        agl.Trainer(settings(0), algorithm=algorithm, run_dir=tmp_path / "run").fit(
            lucky_once, TASKS, HELD_OUT, held_out_dataset=HELD_OUT
        )
