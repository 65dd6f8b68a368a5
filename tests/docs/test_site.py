"""The site: every page is in the navigation and has a Markdown twin, every link leads somewhere, and nothing is loaded
from elsewhere."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest
from tests.docs.test_links import dead_links, generated
from tools.site import check
from tools.site.__main__ import ROOT, build, prepare
from tools.site.llms import write_lists, write_twins
from tools.site.navigation import navigation

ZENSICAL = shutil.which("zensical", path=str(ROOT / ".peers" / "site" / "bin"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    prepare(folder)
    return folder


def test_every_page_of_the_documentation_is_in_the_navigation_once(made: Path) -> None:
    entries = [page.path for entry in navigation(made / "pages") for page in entry.pages]
    pages = {*(ROOT / "docs").rglob("*.md"), *generated()}
    documentation = {path.relative_to(ROOT / "docs").as_posix() for path in pages}
    assert len(entries) == len(set(entries))
    assert documentation <= set(entries)
    assert {"recipes/rag.md", "recipes/spider.md", "reference/settings/policy.md"} <= set(entries)


def test_the_navigation_is_in_the_settings(made: Path) -> None:
    settings = tomllib.loads((made / "zensical.toml").read_text())["project"]
    assert [next(iter(entry)) for entry in settings["nav"]] == [
        "Home",
        "Get started",
        "Guides",
        "Concepts",
        "Reference",
        "Recipes",
        "Migrating",
    ]
    assert settings["theme"]["font"] is False


def test_a_page_that_no_index_names_is_last_and_not_lost(made: Path, tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    shutil.copytree(made / "pages", pages)
    (pages / "concepts" / "unlisted.md").write_text("# Quite new\n")
    [concepts] = [entry for entry in navigation(pages) if entry.title == "Concepts"]
    assert (concepts.children[-1].title, concepts.children[-1].path) == ("Quite new", "concepts/unlisted.md")


def test_every_link_within_the_site_leads_somewhere(made: Path) -> None:
    dead = {str(page): found for page in (made / "pages").rglob("*.md") if (found := dead_links(page))}
    assert not dead


def test_coding_agents_get_each_page_a_list_and_all_in_one(made: Path, tmp_path: Path) -> None:
    pages = made / "pages"
    assert write_twins(pages, tmp_path) > 60
    write_lists(navigation(pages), pages, tmp_path)
    listed = re.findall(r"^- \[.+?\]\((.+?)\)", (tmp_path / "llms.txt").read_text(), re.MULTILINE)
    assert len(listed) > 60
    assert all((tmp_path / path).is_file() for path in listed)
    full = (tmp_path / "llms-full.txt").read_text()
    assert all(f"<!-- {path} -->" in full for path in listed)


def test_a_dead_anchor_of_a_built_page_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.html").write_text('<h1 id="title">There</h1>')
    links = ["there.html#title", "there.html#gone", "gone.html", "#here", "#nowhere", "https://example.org"]
    (tmp_path / "page.html").write_text('<p id="here">' + "".join(f'<a href="{link}">x</a>' for link in links))
    dead = [line.rpartition(" ")[2] for line in check.dead_links(tmp_path)]
    assert dead == ["there.html#gone", "gone.html", "#nowhere"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(ZENSICAL is None, reason="zensical is not installed: make site")
def test_the_built_site_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    assert ZENSICAL is not None
    assert build(tmp_path, ZENSICAL) > 60
    html = tmp_path / "html"
    assert (html / "search.js").exists()
    for page in html.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|link|img)\b[^>]*?(?:src|href)=\"?(https?://[^\"\s>]+)", text)
        assert not [url for url in loaded if 'rel="canonical"' not in url], (page, loaded)
        assert page.with_suffix(".md").exists() or page.name == "404.html"
