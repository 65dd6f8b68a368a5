"""Automatic intermediate rewards: what each rule rewards, and what rewards belong to."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning import span as names
from agentlightning.assemble import AUTOMATIC_REWARDS, calls, trajectory
from agentlightning.errors import ConfigError, RewardError
from agentlightning.span import Span
from agentlightning.tracing import air
from agentlightning.tracing.agent_spans import agent_span
from agentlightning.tracing.rewards import find_final_reward


def span(sequence: int, name: str, status: str = "UNSET", **attributes: Any) -> Span:
    dotted = {key.replace("__", "."): value for key, value in attributes.items()}
    return Span("ro-1", "at-1", name, 0.0, None, sequence, "t", f"s{sequence}", None, status, None, dotted)


def chat(sequence: int, text: str = "", **more: Any) -> Span:
    made = span(sequence, "chat", **more)
    messages = json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": text}]}])
    made.attributes.update(
        {
            names.OPERATION_NAME: "chat",
            names.PROMPT_TOKEN_IDS: [1],
            names.RESPONSE_TOKEN_IDS: [2],
            names.LOGPROBS: [-0.5],
            names.OUTPUT_MESSAGES: messages,
        }
    )
    return made


def tool(sequence: int, arguments: str = "{}", result: Any = None, failed: bool = False) -> Span:
    made = span(sequence, "search", "ERROR" if failed else "UNSET")
    made.attributes.update({names.OPERATION_NAME: "execute_tool", names.TOOL_NAME: "search"})
    made.attributes.update({names.TOOL_ARGUMENTS: arguments, names.TOOL_RESULT: result})
    return made


def final(sequence: int, value: float) -> Span:
    made = span(sequence, names.REWARD)
    made.attributes[names.SCORE_VALUE] = value
    return made


def rewards(spans: list[Span], weights: Mapping[str, float]) -> list[Span]:
    rules = air.weighted_rules(weights)
    return [] if rules is None else rules.reward_spans(spans, calls(spans))


def scores(spans: list[Span], rule: str, weight: float = 1.0) -> list[tuple[str, float]]:
    """(call, reward) of each reward of one rule."""
    found = rewards(spans, {rule: weight})
    assert all(each.attributes[names.AIR_RULE] == rule for each in found)
    return [(each.attributes[names.AIR_CALL], each.attributes[names.SCORE_VALUE]) for each in found]


def test_a_tool_that_succeeds_rewards_the_call_before_it_and_one_that_raises_does_not() -> None:
    spans = [chat(1), tool(2), chat(3), tool(4, failed=True)]
    assert scores(spans, "tool_succeeded", 0.5) == [("s1", 0.5)]
    assert scores(spans, "tool_raised", -0.5) == [("s3", -0.5)]


def test_a_step_of_agl_operation_is_a_tool() -> None:
    assert scores([chat(1), span(2, names.OPERATION)], "tool_succeeded") == [("s1", 1.0)]


def test_only_the_repetition_of_a_failing_call_is_penalised() -> None:
    spans = [chat(1), tool(2, "a", failed=True), chat(3), tool(4, "b", failed=True), chat(5), tool(6, "a", failed=True)]
    assert scores(spans, "repeated_failure", -1.0) == [("s5", -1.0)]


def test_an_answer_in_the_requested_format_is_rewarded() -> None:
    spans = [chat(1), chat(2), chat(3)]
    spans[0].attributes[names.CONSTRAINT] = "checked"
    spans[1].attributes[names.CONSTRAINT] = "violated"
    assert scores(spans, "output_parsed") == [("s1", 1.0)]


@pytest.mark.parametrize(
    ("result", "answer", "used"),
    [
        ("The capital of Peru is Lima, a city.", "It says: the capital of Peru is Lima!", True),
        ("The capital of Peru is Lima, a city.", "Peru has a capital", False),
        ("Lima", "I think it is Lima.", True),
        ("Lima", "I like limabeans", False),
        ("peru", "Peru is large", False),  # the tool was asked for this word
        (None, "anything", False),
    ],
)
def test_retrieved_text_counts_if_a_later_answer_repeats_it(result: Any, answer: str, used: bool) -> None:
    spans = [chat(1), tool(2, '{"query": "Peru"}', result), chat(3, answer)]
    assert scores(spans, "retrieved_text_used") == ([("s1", 1.0)] if used else [])


def test_text_that_an_answer_before_the_tool_contains_was_not_retrieved() -> None:
    assert scores([chat(1, "Lima"), tool(2, "", "Lima")], "retrieved_text_used") == []


def test_progress_pays_its_rise_and_a_fall_costs_it() -> None:
    told = [span(i, names.ANNOTATION, agentlightning__progress=value) for i, value in ((2, 0.5), (4, 0.2), (6, 0.5))]
    spans = [chat(1), told[0], chat(3), told[1], chat(5), told[2]]
    assert scores(spans, "progress") == [("s1", 0.5), ("s3", pytest.approx(-0.3)), ("s5", pytest.approx(0.3))]


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=12))
def test_progress_sums_to_the_last_value_whatever_the_way(values: list[float]) -> None:
    spans = [chat(1), *(span(i, names.ANNOTATION, agentlightning__progress=v) for i, v in enumerate(values, 2))]
    assert math.isclose(sum(value for _, value in scores(spans, "progress")), values[-1], abs_tol=1e-9)


def test_what_happens_before_the_first_call_earns_nothing() -> None:
    assert scores([tool(1), chat(2)], "tool_succeeded") == []


def test_late_spans_and_those_of_a_reward_function_earn_nothing() -> None:
    judged, late = tool(2), tool(3)
    judged.attributes[names.JUDGE] = True
    late.attributes[names.LATE] = True
    assert scores([chat(1), judged, late], "tool_succeeded") == []


# -- where rewards go ------------------------------------------------------------------------------------------------


def test_rewards_reach_their_transitions_and_the_final_reward_stays() -> None:
    spans = [chat(1), tool(2), tool(3), chat(4), final(5, 1.0)]
    found = trajectory("ro-1", "at-1", [*spans, *rewards(spans, {"tool_succeeded": 0.25})])
    assert (found.reward, [each.reward for each in found.transitions]) == (1.0, [0.5, None])
    assert found.metadata[AUTOMATIC_REWARDS] == {"tool_succeeded": 0.5}


def test_an_automatic_reward_is_never_the_final_one() -> None:
    spans = [chat(1), tool(2)]
    spans += rewards(spans, {"tool_succeeded": 1.0})
    assert trajectory("ro-1", "at-1", spans).reward is None
    assert find_final_reward(spans) is None


def test_rewards_of_the_same_spans_are_the_same_spans() -> None:
    spans = [chat(1), tool(2), chat(3), tool(4)]
    first = rewards(spans, {"tool_succeeded": 1.0})
    assert rewards([*reversed(spans), *first], {"tool_succeeded": 1.0}) == first
    assert len({each.span_id for each in first}) == 2


def test_a_later_weight_replaces_the_reward_of_an_earlier_one() -> None:
    spans = [chat(1), tool(2), final(3, 1.0)]
    recorded = [*rewards(spans, {"tool_succeeded": 1.0}), *rewards(spans, {"tool_succeeded": 0.5})]
    recorded = [replace(each, sequence_id=number) for number, each in enumerate(recorded, 4)]
    (call,) = trajectory("ro-1", "at-1", [*spans, *recorded]).transitions
    assert call.reward == 0.5


def test_agents_cannot_write_automatic_rewards() -> None:
    (reward,) = rewards([chat(1), tool(2)], {"tool_succeeded": 1.0})
    assert names.AIR_RULE not in agent_span(reward).attributes


# -- the user's own rules --------------------------------------------------------------------------------------------


def test_a_rule_of_the_user_is_a_function_of_a_span(tmp_path: Path) -> None:
    path = tmp_path / "an_air_rule_of_the_user.py"
    path.write_text("def long(span): return len(span.name) > 4")
    rules = air.weighted_rules({f"{path}:long": 0.1})
    assert rules is not None
    spans = [chat(1), span(2, "a long name")]
    assert [each.attributes[names.SCORE_VALUE] for each in rules.reward_spans(spans, calls(spans))] == [0.1]


@pytest.mark.parametrize("score", [math.nan, math.inf, "much", 1e300])
def test_a_score_that_is_no_usable_number_is_an_error_that_names_rule_and_rollout(score: Any) -> None:
    rules = air.AutomaticRewards({"mine.py:bad": (lambda span: score, 1.0)})
    with pytest.raises(RewardError, match=r"'mine.py:bad'.*ro-1"):
        rules.reward_spans([chat(1)], [chat(1)])


def test_a_rule_that_raises_is_an_error_that_names_rule_and_rollout() -> None:
    rules = air.AutomaticRewards({"mine.py:bad": (lambda span: span.nothing, 1.0)})
    with pytest.raises(RewardError, match=r"'mine.py:bad'.*ro-1 *,? *raised AttributeError"):
        rules.reward_spans([chat(1)], [chat(1)])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"tool_suceeded": 1.0}, "did you mean 'tool_succeeded'"),
        ({"progress": math.nan}, "nan"),
        ({"progress": 0.0}, "0.0"),
    ],
)
def test_bad_settings_are_refused(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        air.check_rules(weights)


@pytest.mark.parametrize(("source", "message"), [("long = 3", "is no AIR rule"), ("", "cannot be imported")])
def test_what_is_no_rule_is_refused_with_its_name(source: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / f"no_air_rule_{len(source)}.py"
    path.write_text(source)
    with pytest.raises(ConfigError, match=message):
        air.weighted_rules({f"{path}:long": 0.1})
