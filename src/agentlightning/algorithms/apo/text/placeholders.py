"""The placeholders of a template: what an edit must neither drop nor invent."""

from __future__ import annotations

import re

from agentlightning.resources import PromptTemplate, f_string_fields


def placeholders(template: PromptTemplate) -> frozenset[str]:
    """The names that a template is filled with. Raises ValueError for a text that its engine cannot read.

    >>> sorted(placeholders(agl.PromptTemplate(template="Answer {question} in {words!r:>3} words.")))
    ['question', 'words']
    """
    if template.engine == "plain":
        return frozenset()
    if template.engine == "f-string":
        fields = [name for _, name, _, _ in f_string_fields(template.template) if name is not None]
        return frozenset(re.split(r"[.\[]", name)[0] for name in fields)
    from jinja2 import meta
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import SandboxedEnvironment

    try:
        return frozenset(meta.find_undeclared_variables(SandboxedEnvironment().parse(template.template)))
    except TemplateError as error:
        raise ValueError(str(error)) from error


def schema_violation(before: PromptTemplate, after: str) -> str | None:
    """What a new text does to the placeholders of a template, in words; None where it keeps them all.

    >>> schema_violation(agl.PromptTemplate(template="Say {word}."), "Say {sentence}.")
    'drops the placeholder word and invents sentence'
    """
    known = placeholders(before)
    try:
        found = placeholders(before.model_copy(update={"template": after}))
    except ValueError as error:
        return f"is no {before.engine} template ({error})"
    dropped, invented = sorted(known - found), sorted(found - known)
    parts = [f"drops the placeholder {', '.join(dropped)}"] if dropped else []
    parts += [f"invents {', '.join(invented)}"] if invented else []
    return " and ".join(parts) or None
