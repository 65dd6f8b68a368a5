"""What a run says about itself."""

import math

from agentlightning.evaluation.intervals import Gain
from agentlightning.training.health.signs import signs_of
from agentlightning.training.health.step_record import StepRecord
from agentlightning.training.report.result import closing_warnings, starting_warnings


def warnings_of(records: list[StepRecord]) -> dict[str, str]:
    return {sign.name: str(sign) for sign in signs_of(records)}


def step(reward: float, *, flat: int = 0, groups: int = 4, **more: float) -> StepRecord:
    line = {"reward": reward, "groups": groups, "groups_without_spread": flat, "groups_trained": groups - flat}
    return StepRecord.read({**line, **more})


def test_a_run_whose_groups_teach_nothing_says_so_with_the_way_out():
    healthy = [step(0.4, flat=1, entropy=1.0), step(0.5, flat=2, entropy=0.9)]
    assert warnings_of(healthy) == {}
    [text] = warnings_of([*healthy, *[step(1.0, flat=4)] * 3]).values()
    assert text.startswith("the rewards of 12 of the last 12 groups taught nothing")
    assert "mean 1" in text
    assert "harder tasks" in text
    assert warnings_of([step(0.0, flat=2, groups=2)]) == {}, "two groups are no pattern"


def test_a_policy_that_a_learning_rate_has_broken_is_told_from_noise():
    start = [step(0.5, entropy=1.0, lr=10.0), step(0.55, entropy=1.1, lr=10.0), step(0.5, entropy=1.0, lr=10.0)]
    noise = [step(0.2, entropy=0.9, lr=10.0)] * 3
    assert warnings_of([*start, *noise]) == {}
    for broken in (step(0.0, entropy=6.0, lr=10.0), step(0.0, entropy=0.01, lr=10.0), step(0.0, flat=3)):
        found = warnings_of([*start, *[broken] * 3])
        assert "reward fell from 0.517 to 0" in found["policy_broken"]
        assert "The learning rate 10 is probably too high" in found["policy_broken"]
    improving = [*start, *[step(0.9, entropy=0.05, lr=10.0)] * 3]
    assert warnings_of(improving) == {}, "a sure policy is what training is for"


def test_a_policy_may_break_late_and_the_numbers_are_those_of_its_last_steps():
    start = [step(0.5, entropy=2.0), step(0.5, entropy=1.0), *[step(0.5, entropy=1.5)] * 6]
    drift = [step(0.25, entropy=2.0), step(0.1, entropy=4.0), step(0.1, entropy=8.0)]
    text = warnings_of([*start, *drift])["policy_broken"]
    assert "its reward fell from 0.5 to 0.15, and its entropy went from 2 to 8 nats a token" in text
    assert "The learning rate nan" in text
    assert warnings_of([*start, *[step(0.3, entropy=8.0)] * 3]) == {}, "more than half of the best is not broken"
    flat = warnings_of([*start, *[step(0.0, flat=3)] * 3])["policy_broken"]
    assert "and no group has rewards that differ any more." in flat


def test_records_without_rewards_or_entropies_and_short_runs_are_no_sign():
    assert warnings_of([step(0.5), step(0.5), step(0.5), step(0.0)]) == {}
    assert warnings_of([StepRecord(entropy=entropy) for entropy in (1.0, 1.0, 1.0, 9.0)]) == {}
    assert warnings_of([step(math.nan, entropy=entropy) for entropy in (1.0, 1.0, 1.0, 9.0)]) == {}
    assert warnings_of([step(-1.0, entropy=entropy) for entropy in (1.0, 1.0, 9.0)]) == {}


def test_a_warning_begins_at_its_share():
    flat = [step(0.0, flat=9, groups=10)]
    assert list(warnings_of(flat)) == ["rewards_without_spread"]
    assert list(warnings_of([step(0.0, flat=4, groups=4)])) == ["rewards_without_spread"]
    assert warnings_of([step(0.0, flat=8, groups=10)]) == {}
    late = {"failed": 5, "timeouts": 5}
    assert list(warnings_of([step(0.5, rollouts_trained=45, **late)])) == ["timeouts_left_out"]
    assert warnings_of([step(0.5, rollouts_trained=46, **late)]) == {}


def test_updates_that_were_not_finite_are_warned_of():
    assert "1 updates were skipped" in warnings_of([step(0.5, skipped_steps=1.0)])["updates_skipped"]
    assert warnings_of([step(0.5, skipped_steps=1.0), step(0.5)]) == {}, "only the last step counts"


def test_the_end_says_where_nothing_was_won():
    flat, learned = [step(0.0, flat=4)], [step(0.5)]
    won, lost, unsure = (Gain(0.5, 0.5 + g, g, (g - 0.1, g + 0.1), 40) for g in (0.3, -0.3, 0.05))
    assert closing_warnings(learned, {"greedy": won}) == {}
    assert "nothing was learned" in closing_warnings(flat, {})["nothing_learned"]
    assert "worse than the one it started from" in closing_warnings(learned, {"greedy": lost})["worse_greedy"]
    advice = closing_warnings(learned, {"greedy": unsure})["no_gain_greedy"]
    assert "includes 0" in advice
    assert "(a file as data.held_out, or a larger data.held_out_share)" in advice
    ends_at_zero = (Gain(0.5, 0.5, 0.0, interval, 40) for interval in ((0.0, 0.2), (-0.2, 0.0)))
    assert [list(closing_warnings(learned, {"greedy": each})) for each in ends_at_zero] == [["no_gain_greedy"]] * 2
    unknown = Gain(math.nan, math.nan, math.nan, (math.nan, math.nan), 0, missing_before=1, missing_after=12)
    [warning] = closing_warnings(learned, {"sampled": unknown}).items()
    assert warning[0] == "not_compared_sampled"
    assert "sampled: 1 have none before, 12 none after" in warning[1]


def test_weights_that_hardly_moved_are_named_where_no_gain_is_shown():
    unsure = {"greedy": Gain(0.5, 0.55, 0.05, (-0.05, 0.15), 40)}

    def advice(lr: float, steps: int = 80, updates: int = 1) -> str:
        records = [step(0.5, lr=lr, optimizer_steps=updates)] * steps
        return closing_warnings(records, unsure)["no_gain_greedy"]

    assert "the weights hardly moved: 80 updates, whose learning rates add up to 8e-08" in advice(1e-9)
    assert "hardly moved: 1 updates" in advice(1e-6, steps=1)
    assert "hardly moved: 8 updates" in advice(1e-7, steps=2, updates=4)
    assert "train for more steps" not in advice(1e-9)
    for lr, steps in ((1e-6, 80), (1e-3, 1)):
        assert "train for more steps" in advice(lr, steps)
    assert "train for more steps" in closing_warnings([step(0.5)], unsure)["no_gain_greedy"], "no update is known"


def test_random_weights_are_named_before_anything_runs():
    assert starting_warnings(random_weights=False) == {}
    assert "--model" in starting_warnings(random_weights=True)["random_weights"]


def test_rollouts_that_ran_out_of_time_are_warned_of_where_they_teach_nothing():
    late = [step(0.5, rollouts_trained=28, failed=4, timeouts=4)]
    [text] = warnings_of(late).values()
    assert text.startswith("4 of the last 32 rollouts timed out")
    assert "algorithm.timeout_reward=0.0" in text
    assert warnings_of([step(0.5, rollouts_trained=32, failed=0, timeouts=4)]) == {}, "they are learned from"
