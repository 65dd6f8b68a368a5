"""Spans become transitions, rewards and trajectories."""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import Any

import pytest

from agentlightning import span as names
from agentlightning.assemble import (
    LEAST_LOGPROB,
    NO_LIMITS,
    VOID_CALLS,
    VOID_REASON,
    TokenLimits,
    calls,
    link_rewards,
    trajectory,
)
from agentlightning.errors import RewardError, RolloutRejectedError
from agentlightning.span import Span
from agentlightning.trajectory import Transition, scalar_reward
from agentlightning.util.kept_sets import KeptSets


def kept(*sets: list[int]) -> str:
    return KeptSets.of(sets).to_text()


def span(sequence: int, name: str = "chat", /, status: str = "UNSET", attempt: str = "at-1", **attributes: Any) -> Span:
    return Span(
        rollout_id="ro-1",
        attempt_id=attempt,
        name=name,
        start_time=float(-sequence),
        sequence_id=sequence,
        span_id=f"s{sequence}",
        status_code=status,
        attributes=attributes,
    )


def chat(sequence: int, prompt: list[int], sampled: list[int], **more: Any) -> Span:
    attributes = {
        names.OPERATION_NAME: "chat",
        names.PROMPT_TOKEN_IDS: prompt,
        names.RESPONSE_TOKEN_IDS: sampled,
        names.LOGPROBS: [-0.5] * len(sampled),
    }
    status, attempt = more.pop("status", "UNSET"), more.pop("attempt", "at-1")
    return span(sequence, "chat", status=status, attempt=attempt, **{**attributes, **more})


def reward(sequence: int, value: Any, **more: Any) -> Span:
    key = names.REWARD_VALUES if isinstance(value, dict) else names.SCORE_VALUE
    return span(sequence, names.REWARD, **{key: value, **more})


def transitions(spans: list[Span], limits: TokenLimits = NO_LIMITS) -> tuple[Transition, ...]:
    return trajectory("ro-1", "at-1", spans, limits=limits).transitions


# -- calls and transitions -------------------------------------------------------------------------------------------


def test_transitions_follow_the_sequence_number_and_not_the_clock() -> None:
    found = transitions([chat(3, [1, 2, 3], [4]), chat(1, [1], [2])])
    assert [t.span_id for t in found] == ["s1", "s3"]


def test_a_transition_says_how_its_tokens_were_sampled() -> None:
    attributes = {
        names.REQUEST_TEMPERATURE: 0.7,
        names.REQUEST_TOP_P: 0.9,
        names.REQUEST_TOP_K: 5,
        names.POLICY_VERSION: 3,
        names.AGENT_NAME: "writer",
        names.FINISH_REASONS: ["length"],
        names.RESHAPED: ["logit_bias", "presence_penalty"],
    }
    (found,) = transitions([chat(1, [1], [2, 3], **attributes)])
    assert (found.rollout_id, found.attempt_id, found.span_id, found.sequence_id) == ("ro-1", "at-1", "s1", 1)
    assert found.reshaped == ("logit_bias", "presence_penalty")
    assert (found.temperature, found.top_p, found.top_k) == (0.7, 0.9, 5)
    assert (found.policy_version, found.agent, found.finish_reason) == (3, "writer", "length")
    assert (found.prompt_token_ids, found.response_token_ids, found.logprobs) == ((1,), (2, 3), (-0.5, -0.5))


def test_a_call_without_sampling_parameters_was_sampled_plainly() -> None:
    (found,) = transitions([chat(1, [1], [2])])
    assert (found.temperature, found.top_p, found.top_k, found.finish_reason) == (1.0, 1.0, 0, "stop")
    assert (found.reshaped, found.policy_version, found.agent, found.model) == ((), None, None, None)


def test_attributes_of_another_type_are_ignored_and_one_finish_reason_needs_no_list() -> None:
    odd = {names.AGENT_NAME: 7, names.RESPONSE_MODEL: ["m"], names.INPUT_MESSAGES: [{"role": "user"}]}
    (found,) = transitions([chat(1, [1], [2], **odd, **{names.FINISH_REASONS: "length"})])
    assert (found.agent, found.model, found.input_messages, found.finish_reason) == (None, None, None, "length")


def test_a_call_has_the_versions_of_the_weights_that_sampled_its_tokens() -> None:
    (found,) = transitions([chat(1, [1], [2, 3, 4], **{names.POLICY_VERSION: 8, names.POLICY_VERSIONS: [7, 2, 8, 1]})])
    assert (found.policy_version, found.versions) == (8, ((7, 2), (8, 1)))


@pytest.mark.parametrize("numbers", [[], [7], [7, 2], [7, 3, 8, 0], [7, 4, 8, -1], ["7", 2, 8, 1]])
def test_versions_that_do_not_add_up_to_the_tokens_are_ignored(numbers: list[Any]) -> None:
    (found,) = transitions([chat(1, [1], [2, 3, 4], **{names.POLICY_VERSION: 8, names.POLICY_VERSIONS: numbers})])
    assert (found.policy_version, found.versions) == (8, ())


def test_superseded_and_failed_calls_are_left_out() -> None:
    spans = [
        chat(1, [1], [2]),
        chat(2, [1], [2], **{names.SUPERSEDED: True}),
        chat(3, [1], [2], status="ERROR"),
        chat(4, [1], [2], **{names.ERROR_TYPE: "timeout"}),
        span(5, "execute_tool", **{names.OPERATION_NAME: "execute_tool"}),
    ]
    assert [s.span_id for s in calls(spans)] == ["s1"]
    assert [t.span_id for t in transitions(spans)] == ["s1"]


@pytest.mark.parametrize("lost", [names.PROMPT_TOKEN_IDS, names.RESPONSE_TOKEN_IDS, names.LOGPROBS])
def test_a_call_whose_tokens_are_unknown_is_skipped_and_counted(lost: str) -> None:
    blind = chat(1, [1], [2])
    del blind.attributes[lost]
    spans = [blind, chat(2, [1], [3])]
    assert [t.span_id for t in transitions(spans)] == ["s2"]
    for each in (spans, [chat(1, [1], []), chat(2, [1], [3])]):
        assert trajectory("ro-1", "at-1", each).metadata["untrainable_calls"] == 1


# -- rewards ---------------------------------------------------------------------------------------------------------


def test_the_last_reward_is_final_and_earlier_ones_belong_to_the_call_before_them() -> None:
    spans = [chat(1, [1], [2]), reward(2, 0.25), chat(3, [1, 2, 5], [6]), reward(4, 0.5), reward(5, 1.0)]
    found = trajectory("ro-1", "at-1", reversed(spans), group="g")
    assert found.reward == 1.0
    assert [t.reward for t in found.transitions] == [0.25, 0.5]
    assert (found.group, found.metadata) == ("g", {})


def test_a_rollout_without_a_reward_has_a_missing_one() -> None:
    found = trajectory("ro-1", "at-1", [chat(1, [1], [2])])
    assert found.reward is None
    assert (found.rollout_id, found.attempt_id, found.group, found.status) == ("ro-1", "at-1", "", "succeeded")


def test_rewards_that_follow_the_same_call_add_up() -> None:
    spans = [chat(1, [1], [2]), reward(2, {"a": 1.0}), reward(3, {"a": 0.5, "b": 2.0}), reward(4, 0.0)]
    assert link_rewards(spans).intermediate == {"s1": {"a": 1.5, "b": 2.0}}
    assert link_rewards([*spans[:2], reward(3, {"b": 2.0}), spans[3]]).intermediate == {"s1": {"a": 1.0, "b": 2.0}}
    assert link_rewards([spans[0], reward(2, 0.25), reward(3, 0.5), spans[3]]).intermediate == {"s1": 0.75}
    with pytest.raises(RewardError, match="s1 has a plain reward and one of named dimensions"):
        link_rewards([*spans[:2], reward(3, 0.5), reward(4, 0.0)])


def test_a_reward_before_the_first_call_is_counted() -> None:
    spans = [reward(1, 0.5), chat(2, [1], [2]), reward(3, 1.0)]
    found = trajectory("ro-1", "at-1", spans)
    assert (found.reward, found.transitions[0].reward) == (1.0, None)
    assert found.metadata == {"unlinked_rewards": 1}
    assert trajectory("ro-1", "at-1", [reward(0, 0.5), *spans]).metadata == {"unlinked_rewards": 2}


def test_spans_of_other_attempts_and_superseded_rewards_do_not_count() -> None:
    spans = [chat(1, [1], [2]), reward(2, 0.5), reward(3, 9.0, **{names.SUPERSEDED: True})]
    assert trajectory("ro-1", "at-1", [*spans, chat(4, [1], [3], attempt="at-2")]).reward == 0.5
    assert len(trajectory("ro-1", "at-2", [*spans, chat(4, [1], [3], attempt="at-2")]).transitions) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e308, "good", None, {}, {"a": math.nan}])
def test_a_reward_that_is_no_finite_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(RewardError, match="ro-1"):
        trajectory("ro-1", "at-1", [chat(1, [1], [2]), reward(2, value)])


def test_rewards_that_are_a_label_alone_or_came_late_do_not_count() -> None:
    label = span(3, names.REWARD, **{names.EVALUATION_NAME: "tone", "gen_ai.evaluation.score.label": "kind"})
    late = reward(4, 9.0, **{names.LATE: True})
    assert trajectory("ro-1", "at-1", [chat(1, [1], [2]), reward(2, 0.5), label, late]).reward == 0.5


@pytest.mark.parametrize(
    ("attributes", "named"),
    [
        ({names.RESPONSE_TOKEN_IDS: [50]}, f"{names.RESPONSE_TOKEN_IDS} holds 50; ids are from 0 to 49"),
        ({names.PROMPT_TOKEN_IDS: [0, -1]}, f"{names.PROMPT_TOKEN_IDS} holds -1"),
        ({names.PROMPT_TOKEN_IDS: [0, "a"]}, f"{names.PROMPT_TOKEN_IDS} holds 'a', which is no token id"),
        ({names.PROMPT_TOKEN_IDS: [1] * 200}, "201 tokens"),
        ({names.LOGPROBS: [-1e30]}, "-1e+30"),
        ({names.RESPONSE_TOKEN_IDS: [3, 4], names.LOGPROBS: [-0.5, 3.5]}, "3.5"),
        ({names.LOGPROBS: [math.nan]}, "nan"),
        ({names.LOGPROBS: [10**400]}, "1000"),
        ({names.REQUEST_TEMPERATURE: "hot"}, "'hot'"),
        ({names.REQUEST_TOP_P: 7}, "7"),
        ({names.POLICY_VERSION: "new"}, "'new'"),
        ({names.KEPT_SETS: 7}, "is 7, which is no text"),
        ({names.KEPT_SETS: "no sets"}, f"{names.KEPT_SETS} cannot be read"),
        ({names.KEPT_SETS: kept([3], [4])}, "2 sets for 1 tokens"),
        ({names.KEPT_SETS: kept([3, 50])}, "holds ids from 3 to 50; ids are from 0 to 49"),
        ({names.KEPT_SETS: kept([2, 4])}, "lacks 3, the token sampled at position 0"),
    ],
)
def test_a_call_that_cannot_be_true_is_left_out_named_and_counted(attributes: dict[str, Any], named: str) -> None:
    limits = TokenLimits(vocabulary=50, context=100)
    good, bad = chat(1, [1], [2]), chat(2, [1, 2], [3], **attributes)
    found = trajectory("ro-1", "at-1", [good, bad, reward(3, 1.0)], limits=limits)
    assert [call.span_id for call in found.transitions] == ["s1"]
    assert found.metadata[VOID_CALLS] == 1
    assert named in found.metadata[VOID_REASON]
    with pytest.raises(RolloutRejectedError, match=r"ro-1.*s2") as caught:
        trajectory("ro-1", "at-1", [bad, reward(3, 1.0)], limits=limits)
    assert caught.value.reason == "void_calls"


def test_recorded_sets_are_those_of_the_transition() -> None:
    (found,) = transitions([chat(1, [0], [3, 4], **{names.KEPT_SETS: kept([3, 5], []), names.REQUEST_TOP_K: 2})])
    assert found.kept_sets is not None
    assert found.kept_sets.lists() == [[3, 5], []]
    assert transitions([chat(1, [0], [3])])[0].kept_sets is None


def test_a_call_at_the_limits_is_learned_from() -> None:
    limits = TokenLimits(vocabulary=50, context=3)
    logprobs = {names.LOGPROBS: [LEAST_LOGPROB, 0]}
    greedy = {names.REQUEST_TEMPERATURE: 0.0, names.REQUEST_TOP_P: 1.0, names.REQUEST_TOP_K: -1}
    (found,) = transitions([chat(1, [0], [49, 0], **logprobs, **greedy)], limits)
    assert (found.response_token_ids, found.logprobs) == ((49, 0), (LEAST_LOGPROB, 0))
    (found,) = transitions([chat(1, [1], [2**31 - 1])])
    assert found.response_token_ids == (2**31 - 1,)
    with pytest.raises(RolloutRejectedError, match=r"ids are from 0 to 2147483647"):
        transitions([chat(1, [1], [2**31])])


def test_no_value_of_any_type_raises_an_untyped_error() -> None:
    odd: list[Any] = [None, True, -1, 1e308, "x", [], {}, [[1]], {"a": [1]}, [None]]
    keys = (names.OPERATION_NAME, names.FINISH_REASONS, names.AGENT_NAME, names.RESHAPED, names.POLICY_VERSIONS)
    keys += (
        names.REQUEST,
        names.RESPONSE_ID,
        names.RESPONSE_MODEL,
        names.RETRIES,
        names.KEPT_SETS,
        *names.TOKEN_ATTRIBUTES,
    )
    for key, value in itertools.product(keys, odd):
        with contextlib.suppress(RolloutRejectedError):
            trajectory("ro-1", "at-1", [chat(1, [1], [2]), chat(2, [1], [2], **{key: value})], model="m")


def test_named_dimensions_are_combined_by_their_weights() -> None:
    weights = {"correctness": 0.9, "format": 0.1}
    assert scalar_reward({"correctness": 1.0, "format": 0.5}, weights) == pytest.approx(0.95)
    assert scalar_reward(0.5, weights) == 0.5
    assert scalar_reward(None, weights) is None


def test_a_dimension_without_weight_names_the_setting_and_a_missing_one_leaves_the_reward_missing() -> None:
    with pytest.raises(RewardError, match=r"\['format'\].*reward_weights=\{\"correctness\": 1.0, \"format\": 1.0\}"):
        scalar_reward({"correctness": 1.0, "format": 0.5}, {"correctness": 1.0})
    assert scalar_reward({"correctness": 1.0}, {"correctness": 0.9, "format": 0.1}) is None


# -- requests that were sent again -----------------------------------------------------------------------------------


def sent(sequence: int, request: str, reply: str, retries: int = 0, **more: Any) -> Span:
    again = {names.RETRIES: retries} if retries else {}
    return chat(sequence, [1], [2], **{names.REQUEST: request, names.RESPONSE_ID: reply, **again, **more})


def test_a_lost_response_is_left_out_with_all_of_its_choices() -> None:
    spans = [sent(1, "q", "a"), sent(2, "q", "a"), sent(3, "q", "b", 1), sent(4, "q", "b", 1)]
    assert [each.span_id for each in calls(spans)] == ["s3", "s4"]
    assert [each.span_id for each in calls([*spans, sent(5, "q", "c", 2)])] == ["s5"]


def test_a_lost_response_is_found_without_its_id_and_beside_calls_whose_request_is_unknown() -> None:
    spans = [chat(1, [1], [2]), sent(2, "q", "a"), sent(3, "q", "b", 1)]
    for each in spans[1:]:
        del each.attributes[names.RESPONSE_ID]
    assert [each.span_id for each in calls(spans)] == ["s1", "s3"]


def test_all_responses_stay_if_any_may_be_the_lost_one() -> None:
    spans = [sent(1, "q", "a"), sent(2, "q", "b"), sent(3, "q", "c", 1)]
    assert len(calls(spans)) == 3


def test_another_request_or_attempt_is_no_retry() -> None:
    spans = [sent(1, "q", "a"), sent(2, "p", "b", 1), sent(3, "q", "c", 1, attempt="at-2")]
    assert len(calls(spans)) == 3


def test_the_last_response_counts_for_a_client_that_retries_lost_ones_alone() -> None:
    spans = [sent(1, names.SENT_ONCE + "q", "a"), sent(2, names.SENT_ONCE + "q", "b"), sent(3, "q", "c")]
    assert [each.span_id for each in calls(spans)] == ["s2", "s3"]


def test_a_reward_belongs_to_the_response_that_arrived() -> None:
    spans = [sent(1, "q", "a"), reward(2, 1.0), sent(3, "q", "b", 1), reward(4, 0.5), reward(5, 0.0)]
    assert link_rewards(spans).intermediate == {"s3": 0.5}


def test_what_another_model_answered_is_left_out_and_its_reward_goes_to_the_call_before():
    policy = {names.OPERATION_NAME: "chat", names.RESPONSE_MODEL: "policy", **TOKENS_OF_A_CALL}
    judge = policy | {names.RESPONSE_MODEL: "judge"}
    provider = {names.OPERATION_NAME: "chat", names.RESPONSE_MODEL: "theirs", names.TOKENS: "none"}
    reward = Span("r", "a", names.REWARD, 1.0, sequence_id=3, attributes={names.SCORE_VALUE: 0.5})
    final = Span("r", "a", names.REWARD, 1.0, sequence_id=5, attributes={names.SCORE_VALUE: 1.0})
    kept = [
        Span("r", "a", "chat", 1.0, sequence_id=number, span_id=f"s{number}", attributes=attributes)
        for number, attributes in ((1, policy), (2, judge), (4, provider))
    ]
    found = trajectory("r", "a", [*kept, reward, final], model="policy")
    assert [(call.span_id, call.reward) for call in found.transitions] == [("s1", 0.5)]
    assert found.metadata == {"other_models": 2}
    everything = trajectory("r", "a", [*kept, reward, final])
    assert [call.span_id for call in everything.transitions] == ["s1", "s2"]
    assert everything.metadata == {"untrainable_calls": 1}


TOKENS_OF_A_CALL = {names.PROMPT_TOKEN_IDS: [1, 2], names.RESPONSE_TOKEN_IDS: [3], names.LOGPROBS: [-0.5]}


def test_a_reward_for_one_agent_is_neither_final_nor_intermediate() -> None:
    spans = [
        chat(1, [1], [2]),
        reward(2, 0.5, **{names.REWARD_AGENT: "writer"}),
        reward(3, 1.0),
        reward(4, 0.25, **{names.REWARD_AGENT: "writer"}),
        reward(5, {"style": 1.0}, **{names.REWARD_AGENT: "critic"}),
    ]
    links = link_rewards(spans)
    assert (links.final, links.intermediate, links.unlinked) == (1.0, {}, 0)
    assert links.agents == {"writer": 0.75, "critic": {"style": 1.0}}
    assert trajectory("ro-1", "at-1", spans).agent_rewards == links.agents
    assert link_rewards(spans[1:2]).final is None
    with pytest.raises(RewardError, match="a plain reward and one of named dimensions"):
        link_rewards([*spans, reward(6, 1.0, **{names.REWARD_AGENT: "critic"})])
