"""The prompts of a run in its report, as text and as a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentlightning.evaluation.intervals import Gain
from agentlightning.resources import PromptTemplate
from agentlightning.training.report import result as report
from agentlightning.training.report.result import TrainingResult


@pytest.mark.parametrize("after", ["Say {word}.\nBe brief.", "Say {word}.", "Use ```code``` and <b>."])
def test_the_prompt_and_its_diff_stand_in_the_text_and_on_the_page(after: str) -> None:
    before = PromptTemplate(template="Say {word}.")
    made: dict[str, Gain] = {}
    result = TrainingResult(
        held_out=made,
        missing={},
        warning_counts={},
        rollbacks=0,
        gate_rejections=0,
        rollouts=1,
        failed_rollouts=0,
        rejected_rollouts={},
        skipped_groups=0,
        warnings=(),
        steps=1,
        best_step=0,
        seconds=1.0,
        checkpoint=Path("c"),
        curve=Path("c.png"),
        run_dir=Path("r"),
        start_prompts={"p": before},
        prompts={"p": PromptTemplate(template=after)},
    )
    text = report.fill_report("r", result.as_json())
    page = report.as_html(text)
    assert after in text
    assert page.count("<pre>") == (1 if after == before.template else 2)
    changed = after != before.template
    assert ("--- p before" in text, "has changed none" in text) == (changed, not changed)


def test_a_page_has_nothing_from_elsewhere() -> None:
    page = report.as_html("# Report\n\n- ![seen](http://example.com/a.png) and <http://example.com>\n")
    assert "<img" not in page
    assert "<a " not in page
