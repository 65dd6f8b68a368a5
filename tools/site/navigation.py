"""The order of pages: that of the links in the index of each folder, and after them the pages it does not name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tools.site.pages import FENCE, title_of

FOLDERS = ("get-started", "guides", "concepts", "reference", "recipes")
LINK = re.compile(r"\]\(([\w./-]+\.md)(?:#[\w-]*)?\)")


@dataclass(frozen=True)
class Entry:
    """A page, or a folder with its pages. Paths are relative to the folder of all pages."""

    title: str
    path: str | None = None
    children: tuple[Entry, ...] = ()

    @property
    def pages(self) -> tuple[Entry, ...]:
        """The pages in it, itself included, in order."""
        own = (self,) if self.path else ()
        return own + tuple(page for child in self.children for page in child.pages)


def navigation(pages: Path) -> tuple[Entry, ...]:
    """Of a folder of pages: the home, a tab for each folder, and the page on migrating."""
    home = Entry("Home", "index.md")
    return (home, *(_folder(pages, pages / name) for name in FOLDERS), Entry("Migrating", "migrating.md"))


def _page(pages: Path, file: Path) -> Entry:
    return Entry(title_of(file), file.relative_to(pages).as_posix())


def _folder(pages: Path, folder: Path) -> Entry:
    """An index names the pages of its folder; the index of a folder in it, that folder."""
    index = folder / "index.md"
    named = [(folder / link).resolve() for link in LINK.findall(FENCE.sub("", index.read_text()))]
    own = [*folder.glob("*.md"), *folder.glob("*/index.md")]
    order = [each for each in dict.fromkeys(named) if each in own and each != index]
    order += sorted(each for each in own if each not in order and each != index)
    children = [_folder(pages, each.parent) if each.name == "index.md" else _page(pages, each) for each in order]
    return Entry(title_of(index), None, (Entry("Overview", index.relative_to(pages).as_posix()), *children))


def as_toml(entries: tuple[Entry, ...]) -> str:
    """As the `nav` of zensical's settings."""
    return "[" + ", ".join(f"{{{_text(each.title)} = {_value(each)}}}" for each in entries) + "]"


def _value(entry: Entry) -> str:
    if entry.path is not None:
        return _text(entry.path)
    overview, *children = entry.children
    return f"[{_text(overview.path or '')}, {as_toml(tuple(children))[1:-1]}]"


def _text(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
