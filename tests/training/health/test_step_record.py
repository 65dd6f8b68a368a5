"""The numbers of a step that the run itself reads."""

from __future__ import annotations

from agentlightning.training.health.step_record import StepRecord


def test_a_line_of_metrics_is_read_with_counts_as_whole_numbers_and_without_what_is_unknown() -> None:
    line = {"step": 3.0, "reward": 0.5, "groups": 4.0, "groups_trained": 1.0, "loss": None, "anything": 1}
    record = StepRecord.read(line)
    assert record == StepRecord(step=3, reward=0.5, groups=4, groups_trained=1, not_finite=("loss",))
    assert (type(record.step), type(record.groups)) == (int, int)
    assert record.skipped_groups == 3


def test_progress_is_the_reward_or_else_the_loss() -> None:
    assert StepRecord(reward=0.5, tokens_per_second=9.0, loss=1.0).progress() == {
        "reward": 0.5, "tokens_per_second": 9.0,
    }  # fmt: skip
    assert StepRecord(loss=1.0).progress() == {"loss": 1.0}
    assert StepRecord().progress() == {}


def test_numbers_that_are_not_finite_are_unknown_and_those_of_an_update_are_named() -> None:
    line = {"step": 1, "reward": float("nan"), "entropy": float("inf"), "groups": float("nan"), "grad_norm": None}
    record = StepRecord.read(
        {**line, "lr": "fast", "rejected_stale": 3.0, "reward_of_format": 0.5, "validation_greedy": 1}
    )
    assert (record.reward, record.entropy, record.groups, record.lr) == (None, None, 0, None)
    assert record.not_finite == ("entropy", "grad_norm")
    assert (record.rejected, record.dimensions, record.validation) == ({"stale": 3}, {"format": 0.5}, {"greedy": 1})
