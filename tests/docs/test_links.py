"""Every link of every page leads somewhere: to a file that exists and, after a `#`, to a heading in it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest
from tools.reference.__main__ import pages

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "examples", "plugins", "benchmarks", "src", "tests")
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(<?([^)>\s]+)>?(?: \"[^\"]*\")?\)")
HEADING = re.compile(r"^#+ +(.+?)(?: +\{#([\w-]+)\})?$", re.MULTILINE)
MENTION = re.compile(r"(?<![\w/.-])docs/[\w/-]+\.(?:md|png|toml)\b")
MOST_FILES = 15


def files(*suffixes: str) -> list[Path]:
    """Of the repository, those that tools have made left out."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    kept = [path for path in found if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)]
    return sorted([*kept, *(path for path in ROOT.iterdir() if path.suffix in suffixes)])


@cache
def generated() -> dict[Path, str]:
    """The pages of the reference that are made from the code, whether or not `make reference` has written them."""
    return pages()


def text_of(page: Path) -> str:
    return generated().get(page) or page.read_text()


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


PAGES = sorted({*files(".md"), *generated()})


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading: links and emphasis as their text, lower case, punctuation dropped."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    """Where several headings are the same, the later ones end in -1, -2 ..."""
    found: dict[str, int] = {}
    made: set[str] = set()
    for text, given in HEADING.findall(FENCE.sub("", text_of(page))):
        name = given or slug(text)
        count = found[name] = found.get(name, -1) + 1
        made.add(f"{name}-{count}" if count else name)
    return frozenset(made)


def dead_links(page: Path) -> list[str]:
    dead: list[str] = []
    for target in LINK.findall(FENCE.sub("", text_of(page))):
        if re.match(r"(https?|mailto):", target):
            continue
        file, _, anchor = unquote(target).partition("#")
        goal = (page.parent / file).resolve() if file else page
        if not (goal in generated() or goal.exists()) or (anchor and anchor not in anchors(goal)):
            dead.append(target)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert not dead_links(page)


def test_a_link_to_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A `title`, twice\n\n# A title twice\n")
    page = tmp_path / "page.md"
    good = "[a](there.md) [b](there.md#a-title-twice) [c](there.md#a-title-twice-1) [d](#here) [e](https://example.org)"
    page.write_text(f"# Here\n{good}\n[x](gone.md) [y](there.md#gone) [z](#gone)\n```text\n[w](code.md)\n```\n")
    assert dead_links(page) == ["gone.md", "there.md#gone", "#gone"]


def test_code_and_error_messages_name_pages_that_exist() -> None:
    """A path in docs/ in code, docstrings, tests and make targets starts at the root of the repository."""
    texts = {path: path.read_text() for path in [*files(".md", ".py", ".toml", ".txt", ".sh"), ROOT / "Makefile"]}
    named = {(name_of(path), page) for path, text in texts.items() for page in MENTION.findall(text)}
    assert len(named) > 10
    assert not {(where, page) for where, page in named if not (ROOT / page in generated() or (ROOT / page).is_file())}


def test_no_folder_of_the_documentation_has_more_files_than_one_can_look_through() -> None:
    folders = [ROOT / "docs", *(path for path in (ROOT / "docs").rglob("*") if path.is_dir())]
    assert not {name_of(folder): n for folder in folders if (n := len([*folder.glob("*.md")])) > MOST_FILES}


def test_every_example_is_among_the_recipes() -> None:
    index = (ROOT / "docs" / "recipes" / "index.md").read_text()
    examples = [path.parent for path in (ROOT / "examples").glob("*/README.md")]
    assert not [each.name for each in examples if f"examples/{each.name}/README.md" not in index]
