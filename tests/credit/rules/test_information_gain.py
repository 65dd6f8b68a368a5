"""Information gain: what each call adds to the probability of the known answer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentlightning.credit import rejections
from agentlightning.credit.base import CreditContext, credit_rule
from agentlightning.credit.rules import InformationGainCredit
from agentlightning.errors import ConfigError


def context(group: list[Any], chances: dict[str, list[float]]) -> CreditContext:
    """Answers of two tokens, of which each has the chance: their geometric mean is that."""
    logprobs = {
        (t.rollout_id, t.span_id): np.full(2, math.log(chances[each.rollout_id][k]))
        for each in group
        for k, t in enumerate(each.transitions)
    }
    return CreditContext(columns={"answer_logprobs": logprobs})


def test_a_call_has_the_rise_of_the_probability_and_the_last_one_the_reward(make: Any) -> None:
    group = [make("a", 1.0, "xyz"), make("b", 0.0, "xw")]
    gains = [0.4, -0.1, 1.0, 0.2, 0.0]
    mean = sum(gains) / 5
    spread = math.sqrt(sum((gain - mean) ** 2 for gain in gains) / 5)
    z = [(gain - mean) / spread for gain in gains]
    given = context(group, {"a": [0.1, 0.5, 0.4], "b": [0.1, 0.3]})
    (credit,) = InformationGainCredit(gamma=0.5).assign([group], given)
    assert credit is not None
    assert credit.advantages[0] == pytest.approx([z[0] + z[1] / 2 + z[2] / 4, z[1] + z[2] / 2, z[2]])
    assert credit.advantages[1] == pytest.approx([z[3] + z[4] / 2, z[4]])
    assert InformationGainCredit().assign(
        [[make("a", 0.0, "x"), make("b", 0.0, "x")]],
        context([make("a", 0.0, "x"), make("b", 0.0, "x")], {"a": [0.5], "b": [0.1]}),
    ) == [None], "one call each and the same reward: nothing was gained"


@pytest.mark.parametrize("silent", [{0}, {1}, {2}, {0, 1}, {0, 1, 2}])
def test_a_call_that_sampled_no_token_neither_gains_nor_loses(make: Any, silent: set[int]) -> None:
    """Without its p; where the policy scored the answer after its prompt all the same, that counts."""

    def calls(each: Any) -> tuple[Any, ...]:
        return tuple(
            replace(call, response_token_ids=(), logprobs=()) if k in silent else call
            for k, call in enumerate(each.transitions)
        )

    group = [make("a", 1.0, "xyz"), make("b", 0.0, "xw")]
    given = context(group, {"a": [0.1, 0.5, 0.4], "b": [0.1, 0.3]})
    quiet = [replace(group[0], transitions=calls(group[0])), group[1]]
    known = InformationGainCredit(normalize_std=False).assign([group], given)
    assert InformationGainCredit(normalize_std=False).assign([quiet], given) == known
    missing = {key: value for key, value in given.columns["answer_logprobs"].items() if key[0] == "b"}
    missing |= {
        (call.rollout_id, call.span_id): given.of_call("answer_logprobs", call)
        for call in quiet[0].transitions
        if call.response_token_ids
    }
    (credit,) = InformationGainCredit(gamma=0.0, normalize_std=False).assign(
        [quiet], CreditContext(columns={"answer_logprobs": missing})
    )
    assert credit is not None
    chances = [None if k in silent else chance for k, chance in enumerate([0.1, 0.5, 0.4])]
    last = next((each for each in chances if each is not None), 0.0)
    gains: list[float] = []
    for chance in chances[1:]:
        gains.append(0.0 if chance is None else chance - last)
        last = last if chance is None else chance
    mean = (sum(gains) + 1.0 + 0.2) / 5
    assert credit.advantages[0] == pytest.approx([each - mean for each in (*gains, 1.0)])


def test_a_task_without_a_known_answer_is_rejected_with_the_fields_that_it_has(make: Any) -> None:
    rollouts = [make("a", 1.0, "x", task={"question": "?", "answer": 42}), make("b", 1.0, "x", task={"question": "?"})]
    (found,) = rejections(rollouts, "igpo")
    assert (found.rollout_id, found.reason) == ("b", "bad_reward")
    assert "has no 'answer', which credit rule \"information_gain\" needs; it has ['question']" in found.message
    assert "no fields" in rejections([make("c", 1.0, "x", task="text")], "igpo")[0].message


def test_the_answer_is_said_as_the_settings_say(make: Any) -> None:
    rule = InformationGainCredit(answer="solution", answer_format="<answer>{answer}</answer>")
    assert rule.answer_text(make("a", 1.0, "x", task={"solution": 42})) == "<answer>42</answer>"
    with pytest.raises(ConfigError, match="does not contain"):
        credit_rule({"type": "igpo", "answer_format": "42"})
