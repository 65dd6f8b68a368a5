"""A template ends after some seconds of its own work, however long the machine lets it wait."""

from __future__ import annotations

import time

import pytest

from agentlightning.util import templates
from agentlightning.util.templates import TemplateLimitError

LOOPS = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"


def test_a_template_that_is_held_up_is_not_taken_for_one_that_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.2)

    def held_up() -> str:
        time.sleep(0.4)
        return "said"

    with templates.bounded():
        text = templates.sandbox().from_string("{{ held_up() }}\n{{ 1 + 1 }}").render(held_up=held_up)
    assert text == "said\n2"


def test_a_template_that_loops_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.2)
    with pytest.raises(TemplateLimitError, match=r"more than 0\.2 s"), templates.bounded():
        templates.sandbox().from_string(LOOPS).render()
