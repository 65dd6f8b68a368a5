"""Corrections of the difference between sampler and trainer: their formulas, and where they apply."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.errors import ConfigError
from agentlightning.policy.mismatch import CORRECTIONS, Correction, corrections, factors

tokens = st.lists(st.tuples(st.floats(-1.5, 1.5), st.integers(0, 3)), min_size=1, max_size=20)


def literal(found: list[tuple[float, int]], setting: dict[str, Any]) -> list[float]:
    """Each correction token by token, as its definition reads."""
    result: list[float] = []
    for difference, rollout in found:
        own = [d for d, r in found if r == rollout]
        rho, product = math.exp(difference), math.prod(math.exp(d) for d in own)
        match setting["type"], setting.get("level"):
            case "truncate", "sequence":
                result.append(min(product, 5.0))
            case "truncate", _:
                result.append(min(rho, 2.0))
            case "icepop", _:
                result.append(rho if 0.5 <= rho <= 2.0 else 0.0)
            case "geometric_mask", _:
                result.append(float(0.99 <= product ** (1 / len(own)) <= 1.01))
            case "sequence_mask", _:
                result.append(float(product <= 3.0))
            case _:
                result.append(1.0)
    return result


SETTINGS = [{"type": name} for name in CORRECTIONS] + [{"type": "truncate", "level": "sequence"}]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: "-".join(setting.values()))
@given(found=tokens)
def test_a_correction_is_its_formula_with_the_defaults_of_the_field(setting: dict[str, Any], found: Any) -> None:
    log_ratio, rollout = (np.array(column) for column in zip(*found, strict=True))
    (correction,) = corrections(setting)
    expected = literal(found, setting)
    assert correction.factors(log_ratio, rollout.astype(np.int64)).tolist() == pytest.approx(expected, abs=1e-9)


def test_several_corrections_multiply() -> None:
    log_ratio, rollout = np.log([3.0, 1.0, 1.0, 1.0]), np.array([0, 0, 1, 1])
    several = corrections(["truncate", "geometric_mask"])
    assert factors(log_ratio, rollout, several).tolist() == pytest.approx([0, 0, 1, 1])


def test_a_setting_is_a_name_a_table_or_a_list() -> None:
    assert corrections("icepop") == corrections({"type": "icepop"}) == corrections(["icepop"])
    assert all(isinstance(each, Correction) for each in corrections(["truncate", {"type": "sequence_mask", "high": 9}]))
    with pytest.raises(ConfigError, match=r"there is no correction|cannot be used"):
        corrections("trunc")
    with pytest.raises(ConfigError, match='"truncate" and "icepop" count the same ratio twice'):
        corrections(["truncate", "icepop"])
