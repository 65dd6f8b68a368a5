"""The numbers of a step that the run itself reads."""

from __future__ import annotations

from agentlightning.training.report.step_record import StepRecord


def test_a_line_of_metrics_is_read_with_counts_as_whole_numbers_and_without_what_is_unknown() -> None:
    line = {"step": 3.0, "reward": 0.5, "groups": 4.0, "groups_trained": 1.0, "loss": None, "anything": 1}
    record = StepRecord.read(line)
    assert record == StepRecord(step=3, reward=0.5, groups=4, groups_trained=1)
    assert (type(record.step), type(record.groups)) == (int, int)
    assert record.skipped_groups == 3


def test_progress_is_the_reward_or_else_the_loss() -> None:
    assert StepRecord(reward=0.5, tokens_per_second=9.0, loss=1.0).progress() == {
        "reward": 0.5, "tokens_per_second": 9.0,
    }  # fmt: skip
    assert StepRecord(loss=1.0).progress() == {"loss": 1.0}
    assert StepRecord().progress() == {}
