"""An evaluation is a number that knows its uncertainty, and never takes missing for zero."""

import itertools
import math
from pathlib import Path

import pytest

from agentlightning.errors import ConfigError, DatasetError, RewardError
from agentlightning.evaluation.evaluation import Evaluation, comparable_scores, compare, gain_of


def test_it_compares_like_its_mean():
    better, worse = Evaluation((1.0, 1.0, 0.5)), Evaluation((0.5, 0.5, 0.0))
    assert better > worse
    assert worse < 0.5
    assert better >= 0.8
    assert not worse < worse
    assert Evaluation((0.5,)) == 0.5
    assert Evaluation((0.5,)) != 0.4
    assert Evaluation((0.5,)) != "0.5"
    assert "0.833" in str(better)


def test_tasks_without_a_reward_are_counted_by_reason_and_shown():
    evaluation = Evaluation((1.0,) * 6 + (None,) * 4, reasons={"failed": 3, "missing_reward": 1})
    assert (evaluation.mean, evaluation.missing, evaluation.failed) == (1.0, 4, 3)
    assert "1.000 on 6 of 10 tasks, 3 failed, 1 missing reward; 0.600 with those at the lowest" in str(evaluation)
    low, high = evaluation.interval
    assert low < 0.6
    assert high == 1.0


def test_an_agent_that_crashes_never_beats_one_that_answers():
    crashes, answers = Evaluation((1.0,) * 6 + (None,) * 4), Evaluation((0.7,) * 10)
    assert crashes < answers
    assert not crashes > 0.9
    assert crashes == 0.6
    assert float(Evaluation((-5.0, 3.0, None))) == pytest.approx((-5.0 + 3.0 - 5.0) / 3)


def test_equal_evaluations_hash_equally():
    first, second = Evaluation((1.0, 0.0), seconds=1.0), Evaluation((0.5, 0.5), seconds=2.0)
    assert first == second
    assert len({first, second, 0.5}) == 1
    assert Evaluation((None,)) == Evaluation((None,))
    assert hash(Evaluation((None,))) == hash(Evaluation((None,)))


def test_no_reward_at_all_is_an_error():
    with pytest.raises(RewardError, match=r"none of 2 tasks has a reward \(2 failed\); return a number"):
        _ = Evaluation((None, None), reasons={"failed": 2}).mean


def test_only_tasks_with_both_rewards_are_compared_and_the_interval_covers_the_others():
    gain = compare(Evaluation((0.0, 0.0, None)), Evaluation((1.0, None, 1.0)))
    assert (gain.before, gain.after, gain.tasks) == (0.0, 1.0, 1)
    assert (gain.missing_before, gain.missing_after) == (1, 1)
    assert gain.interval[0] < 0 < gain.interval[1]
    failing = compare(Evaluation((0.5,) * 100), Evaluation((1.0,) * 60 + (None,) * 40))
    whole = compare(Evaluation((0.5,) * 60), Evaluation((1.0,) * 60))
    assert failing.gain == whole.gain == 0.5
    assert failing.interval[0] < 0.2 < whole.interval[0]
    hopeless = compare(Evaluation((0.5,) * 100), Evaluation((1.0,) * 40 + (None,) * 60))
    assert hopeless.interval[0] < 0
    with pytest.raises(RewardError, match="nothing can be compared"):
        compare(Evaluation((None,)), Evaluation((1.0,)))
    assert gain_of(Evaluation((0.0, None)), Evaluation((1.0, 1.0))) == compare(
        Evaluation((0.0, None)), Evaluation((1.0, 1.0))
    )


def test_a_gain_that_cannot_be_known_is_no_number():
    unknown = gain_of(Evaluation((None, None)), Evaluation((1.0, None)))
    assert all(map(math.isnan, (unknown.before, unknown.after, unknown.gain, *unknown.interval)))
    assert (unknown.tasks, unknown.missing_before, unknown.missing_after) == (0, 2, 1)


def test_checkpoints_are_ranked_with_the_lowest_reward_of_all_for_what_is_missing():
    def scores(*groups):
        return comparable_scores([Evaluation(group) for group in groups])

    assert scores((1.0, None), (), (None,)) == [0.5, -math.inf, 0.0]
    assert scores((3.0, None), (-1.0, 1.0)) == [1.0, 0.0]
    assert scores((None,), ()) == [-math.inf, -math.inf]


def test_rollouts_of_one_task_are_averaged_and_the_task_is_the_unit():
    evaluation = Evaluation.of_rollouts([(1.0, 0.0), (1.0, 1.0)])
    assert (evaluation.rewards, evaluation.repeats, evaluation.mean) == ((0.5, 1.0), 2, 0.75)
    assert evaluation.interval == Evaluation((0.5, 1.0)).interval
    assert "2 tasks, 2 rollouts each" in str(evaluation)


@pytest.mark.parametrize(
    ("failed_as", "score"),
    [
        ("lowest", (0.5 + 0.25 + 0 + 1) / 4),
        ("exclude", (1 + 0.5 + 1) / 3),
        (1.0, (1 + 0.75 + 1 + 1) / 4),
        (-1.0, (0 - 0.25 - 1 + 1) / 4),
    ],
)
def test_rollouts_without_a_reward_count_as_chosen(failed_as, score):
    rollouts = [(1.0, None), (0.5, None), (None, None), (1.0, 1.0)]
    evaluation = Evaluation.of_rollouts(rollouts, failed_as=failed_as, reasons={"failed": 4})
    assert evaluation.score == pytest.approx(score)
    assert (evaluation.missing, evaluation.missing_rollouts, evaluation.failed) == (1, 4, 4)
    low, high = evaluation.interval
    assert low < evaluation.score < high
    assert "4 failed" in str(evaluation)
    assert str(failed_as).replace("exclude", "left out") in str(evaluation)


def test_an_unknown_way_to_count_failures_is_refused():
    for value in ("highest", math.nan, True, None):
        with pytest.raises(ConfigError, match="is not 'lowest', 'exclude' or a reward"):
            Evaluation((1.0,), failed_as=value)


def test_an_agent_beats_another_only_where_the_gain_is_shown():
    baseline = Evaluation((0.0,) * 12 + (1.0,) * 8)
    assert Evaluation((1.0,) * 20).beats(baseline)
    assert not baseline.beats(Evaluation((1.0,) * 20))
    slightly = Evaluation((1.0,) * 2 + (0.0,) * 10 + (1.0,) * 8)
    assert slightly > baseline
    assert not slightly.beats(baseline)
    assert not baseline.beats(baseline)
    five = Evaluation((1.0,) * 5)
    assert not five.beats(Evaluation((0.0,) * 5))


def test_a_crash_proves_nothing_unless_it_is_scored():
    crashed = (None,) * 10
    answers = Evaluation((0.6,) * 20)
    assert not answers.beats(Evaluation((0.6,) * 10 + crashed))
    assert Evaluation((0.6,) * 20, failed_as=0.0).beats(Evaluation((0.6,) * 10 + crashed))
    excluded = Evaluation((0.6,) * 20, failed_as="exclude").compare(Evaluation((0.6,) * 10 + crashed))
    assert (excluded.gain, excluded.tasks, excluded.missing_before) == (0.0, 10, 10)


def test_the_same_tasks_are_paired_in_any_order():
    before = Evaluation((0.0, 1.0, 0.5, 0.5), tasks=("a", "b", "c", "c"))
    after = Evaluation((1.0, 1.0, 0.25), tasks=("b", "d", "a"))
    found = after.compare(before)
    assert (found.tasks, found.unpaired, found.gain) == (2, 3, 0.125)
    assert "3 tasks were measured only once" in str(found)
    with pytest.raises(DatasetError, match="share no task"):
        after.compare(Evaluation((0.0,), tasks=("z",)))
    with pytest.raises(RewardError, match="1 tasks before and 3 after make no pairs"):
        after.compare(Evaluation((0.0,)))


def test_pass_at_k_is_the_share_of_all_choices_of_k_rollouts():
    rollouts = [(1.0, 0.0, 0.0, 1.0), (0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, None)]
    evaluation = Evaluation.of_rollouts(rollouts)
    for k in (1, 2, 3, 4):
        chosen = [[[x == 1.0 for x in part] for part in itertools.combinations(each, k)] for each in rollouts]
        assert evaluation.pass_at_k(k) == pytest.approx(sum(sum(map(any, c)) / len(c) for c in chosen) / 3)
        assert evaluation.pass_hat_k(k) == pytest.approx(sum(sum(map(all, c)) / len(c) for c in chosen) / 3)
    assert Evaluation.of_rollouts([(0.5, 0.0)]).pass_at_k(1, solved=0.5) == 0.5
    assert Evaluation.of_rollouts(rollouts, failed_as="exclude").pass_hat_k(3) == pytest.approx(1 / 3)
    with pytest.raises(ConfigError, match="k=5 needs 5 rollouts of each task, and there are 4"):
        evaluation.pass_at_k(5)


def test_the_slices_are_evaluations_that_compare():
    members = {"level": {"easy": (0, 1), "hard": (2,)}}
    before = Evaluation((0.0, 1.0, 0.0), tasks=("a", "b", "c"), members=members)
    after = Evaluation((1.0, 1.0, 0.5), tasks=("a", "b", "c"), members=members)
    assert {value: part.mean for value, part in before.slices["level"].items()} == {"easy": 0.5, "hard": 0.0}
    assert after.slices["level"]["easy"].compare(before.slices["level"]["easy"]).gain == 0.5


def test_an_evaluation_is_the_same_after_it_was_saved(tmp_path):
    path = tmp_path / "results" / "first.json"
    evaluation = Evaluation.of_rollouts(
        [(1.0, None), (0.1, 0.2)],
        seconds=2.5,
        reasons={"failed": 1},
        failed_as=0.25,
        tasks=("a", "b"),
        members={"level": {"1": (0, 1)}},
        cached=3,
    )
    evaluation.save(path)
    loaded = Evaluation.load(path)
    assert loaded == evaluation
    for name in ("rewards", "rollouts", "seconds", "reasons", "failed_as", "tasks", "members", "cached"):
        assert getattr(loaded, name) == getattr(evaluation, name), name


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "no evaluation can be read"),
        ("nonsense", "holds no evaluation"),
        ('{"agentlightning_evaluation": 1, "rollouts": [["x"]]}', "holds no evaluation .rollouts.0.0"),
        ('{"agentlightning_evaluation": 9, "rollouts": [[1.0]]}', "has format 9; this version reads 1"),
    ],
)
def test_what_is_no_evaluation_is_refused(tmp_path, content, complaint):
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        Evaluation.load(path)


def test_the_file_of_an_evaluation_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written to .*file"):
        Evaluation((1.0,)).save(tmp_path / "file" / "below.json")


BOUNDED = {
    "no task solved": (0.0,) * 16,
    "one task solved": (100.0, *(0.0,) * 15),
    "nearly all": (0.0, *(100.0,) * 15),
    "all": (100.0,) * 16,
}


@pytest.mark.parametrize("rewards", BOUNDED.values(), ids=BOUNDED)
def test_the_bounds_of_rewards_make_the_interval_what_it_is_between_0_and_1(rewards: tuple[float, ...]) -> None:
    scaled = Evaluation(rewards, bounds=(0, 100))
    unit = Evaluation(tuple(reward / 100 for reward in rewards))
    assert scaled.interval == pytest.approx([100 * limit for limit in unit.interval])
    assert "bounds" not in str(scaled)


def test_where_nobody_gave_the_bounds_of_rewards_it_says_which_it_took() -> None:
    assert "for rewards from 0 to 40, as seen: give bounds" in str(Evaluation((0.0, 40.0)))
    assert "bounds" not in str(Evaluation((0.0, 1.0)))


def test_a_reward_out_of_the_given_bounds_is_counted_and_named() -> None:
    result = Evaluation((0.0, 120.0), bounds=(0, 100))
    assert result.mean == 60
    assert "rewards from 0 to 120 are out of the given bounds" in str(result)


def test_bounds_survive_a_file_and_count_in_comparisons(tmp_path: Path) -> None:
    before, after = Evaluation((0.0,) * 8, bounds=(0, 100)), Evaluation((0.0,) * 8, bounds=(0, 100))
    after.save(tmp_path / "after.json")
    assert Evaluation.load(tmp_path / "after.json").bounds == (0, 100)
    assert after.compare(before).interval[1] > 1


@pytest.mark.parametrize("bounds", [(1, 0), (0, 0), (0, math.inf), (math.nan, 1)])
def test_bounds_that_are_none_are_refused(bounds: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="are not the lowest and the highest reward"):
        Evaluation((0.5,), bounds=bounds)
