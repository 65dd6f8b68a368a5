"""Every causal architecture that can be made tiny is sampled, scored, trained and adapted as transformers does it, or
refused by name when it is opened (`python -m tests.models.zoo` prints the table)."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.models import zoo
from transformers.utils import logging

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("architecture", zoo.ARCHITECTURES)
def test_an_architecture_is_equal_to_transformers_or_refused_by_name(architecture: str, tmp_path: Path) -> None:
    logging.disable_progress_bar()
    row = zoo.check(architecture, tmp_path)
    if "not tiny" in row.cells["engine"]:
        pytest.skip(row.cells["engine"])
    for column, cell in row.cells.items():
        if (architecture, column) in zoo.KNOWN:
            pytest.xfail(zoo.KNOWN[architecture, column])
        assert cell == zoo.EQUAL or cell.startswith("refused: "), f"{column}: {cell}"


def test_most_architectures_are_in_the_table() -> None:
    assert len(zoo.ARCHITECTURES) > 100
