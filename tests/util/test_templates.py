"""A template ends after some seconds of its own work, however long the machine lets it wait."""

from __future__ import annotations

import time

import pytest
from jinja2.exceptions import SecurityError

from agentlightning.errors import ConfigError
from agentlightning.resources import PromptTemplate
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


@pytest.mark.parametrize(
    "template",
    [
        "{{ '%100000000d' % 3 }}",
        "{{ '%*d' % (10**8, 3) }}",
        "{{ '%(a)-100000000s' % {'a': 3} }}",
        "{{ '%.100000000f' % 3 }}",
        "{{ '%100000000d'|format(3) }}",
        "{{ '{:100000000d}'.format(3) }}",
        "{{ '{a:>100000000}'.format(a=3) }}",
        "{{ '{:{w}}'.format(3, w=10**8) }}",
        "{{ 'x'|center(10**8) }}",
        "{{ 'x'|indent(width=10**8, first=true) }}",
        "{{ [1]|batch(10**8, 0)|list }}",
        "{% for i in range(10**8) %}x{% endfor %}",
    ],
)
def test_an_operation_that_makes_a_large_text_of_a_small_one_is_refused_before_it_does(template: str) -> None:
    with pytest.raises(ConfigError, match="is not allowed"):
        PromptTemplate(template=template, engine="jinja").format()


def test_numbers_that_are_no_sizes_are_no_matter() -> None:
    template = "{{ 'user {} of 12345678: %d'.format('a') }} {{ '12345678: %d%%' % 5 }} {{ x|default(98765432) }}"
    template += " {{ 12345678 % 7 }} {{ 'ab'|center(4) }}"
    assert PromptTemplate(template=template, engine="jinja").format() == (
        "user a of 12345678: %d 12345678: 5% 98765432 2  ab "
    )


TEXT = '{"time": 1700000000, "a": "%20000000"}'


@pytest.mark.parametrize(
    ("template", "made"),
    [
        ("{{ text.strip() }}", TEXT),
        ("{{ text.replace('b', 'c') }}", TEXT),
        ("{{ text|indent(2) }}", TEXT),
        ("{{ text|truncate(99) }}", TEXT),
        ("{{ '%s' % text }}", TEXT),
        ("{{ '%s'|format(text) }}", TEXT),
        ("{{ '{}'.format(text) }}", TEXT),
        (
            "{{ '*%d*' % 1700000000 }} {{ '{}'.format(1700000000) }} {{ 1700000000|center(9) }}",
            "*1700000000* 1700000000 1700000000",
        ),
    ],
)
def test_large_numbers_in_what_is_written_are_no_matter(template: str, made: str) -> None:
    assert PromptTemplate(template=template, engine="jinja").format(text=TEXT).startswith(made)


def test_a_width_of_a_format_is_refused_before_it_is_a_text() -> None:
    with pytest.raises(SecurityError, match="100000000"):
        templates.sandbox().from_string("{{ '{:100000000d}'.format(3) }}").render()
