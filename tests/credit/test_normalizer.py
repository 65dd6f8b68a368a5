"""The share of the loss that each token has."""

from __future__ import annotations

import pytest

from agentlightning.credit import ConstantNormalizer, Totals, normalizer, sample_share, token_share
from agentlightning.errors import ConfigError

BATCH = Totals(rollouts=4, tokens=100)


def test_a_constant_length_makes_long_rollouts_weigh_more() -> None:
    constant = normalizer({"type": "constant", "length": 50})
    assert constant == ConstantNormalizer(length=50)
    assert [token_share(constant, BATCH, tokens) * tokens for tokens in (25, 50)] == [0.125, 0.25]
    assert [token_share("rollout", BATCH, tokens) * tokens for tokens in (25, 50)] == [0.25, 0.25]


def test_samples_are_parts_of_a_batch_by_tokens_where_tokens_weigh_and_else_by_rollouts() -> None:
    part = Totals(rollouts=1, tokens=75)
    assert sample_share("token", BATCH, part) == 0.75
    assert [sample_share(each, BATCH, part) for each in ("rollout", ConstantNormalizer(length=9))] == [0.25, 0.25]


@pytest.mark.parametrize("setting", ["sequence", {"type": "constant"}, {"type": "constant", "length": 0}])
def test_a_setting_that_cannot_be_is_refused_with_those_that_can(setting: object) -> None:
    with pytest.raises(ConfigError, match='choose "rollout", "token" or'):
        normalizer(setting)
