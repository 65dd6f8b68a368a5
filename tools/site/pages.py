"""The pages of the site: docs/, the reference made from the code, and what they link to elsewhere in the repository.

A README, CHANGELOG.md or CONTRIBUTING.md that a page links to becomes a page under `repository/`, and so does each file
of code, in a code block; a link to a folder leads to its README. So every link works in the site too, offline.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

LINK = re.compile(r"(\]\(<?)([^)>\s#]+)(#[^)>\s]*)?(>?(?: \"[^\"]*\")?\))")
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]+`")
FILE_OF_BLOCK = re.compile(r"^```(\w+) file=(\S+)$", re.MULTILINE)
ELSEWHERE = "repository"
READMES = {"examples": "recipes", "plugins": "guides/operations"}
"""Folders whose own folders have a page each, and where these pages stand."""
LANGUAGES = {".py": "python", ".mjs": "javascript", ".sh": "bash", ".toml": "toml", ".json": "json"}


@dataclass
class Pages:
    """The pages of one site. `generated` are those that are no files; `placed` maps a file to its path in the site."""

    root: Path
    generated: Mapping[Path, str] = field(default_factory=dict[Path, str])
    placed: dict[Path, str] = field(default_factory=dict[Path, str])
    waiting: list[Path] = field(default_factory=list[Path])

    def place(self, file: Path) -> str | None:
        """The path of a file in the site; what is new is written later. None: the file cannot be shown."""
        if file.is_dir():
            file = file / "README.md"
        if not (file in self.generated or file.is_file()) or not file.is_relative_to(self.root):
            return None
        if file not in self.placed:
            self.placed[file] = self._path_of(file)
            self.waiting.append(file)
        return self.placed[file]

    def _path_of(self, file: Path) -> str:
        inside = file.relative_to(self.root)
        if inside.parts[0] == "docs":
            return inside.relative_to("docs").as_posix()
        if inside.name == "README.md" and len(inside.parts) == 3 and inside.parts[0] in READMES:
            return f"{READMES[inside.parts[0]]}/{inside.parts[1]}.md"
        shown = inside.with_name("index.md") if inside.name == "README.md" else inside
        path = f"{ELSEWHERE}/{shown.as_posix()}"
        return path if file.suffix in {".md", ".png", ".svg"} else f"{path}.md"

    def write(self, to: Path) -> None:
        """Write docs/, the generated pages and, in turn, everything that is linked to."""
        for file in sorted({*(self.root / "docs").rglob("*"), *self.generated}):
            if file in self.generated or file.is_file():
                self.place(file)
        while self.waiting:
            file = self.waiting.pop()
            target = to / self.placed[file]
            target.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix == ".md":
                target.write_text(self._page(file))
            elif target.suffix == ".md":
                target.write_text(_listing(file, self.root))
            else:
                shutil.copy(file, target)

    def _page(self, file: Path) -> str:
        text = self.generated.get(file) or file.read_text()
        made = "".join(part if code else _bars(self._relinked(part, file)) for part, code in _parts(text))
        return FILE_OF_BLOCK.sub(r'```\1 title="\2"', made)

    def _relinked(self, text: str, file: Path) -> str:
        def link(found: re.Match[str]) -> str:
            before, target, anchor, after = found[1], found[2], found[3] or "", found[4]
            if re.match(r"(https?|mailto):", target):
                return found[0]
            place = self.place((file.parent / target).resolve())
            if place is None:
                raise FileNotFoundError(f"{file.relative_to(self.root)} links to {target}, which is not there")
            return before + os.path.relpath(place, Path(self.placed[file]).parent) + anchor + after

        return LINK.sub(link, text)


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """The text in pieces, and whether each is a block of code."""
    end = 0
    for found in FENCE.finditer(text):
        yield text[end : found.start()], False
        yield found[0], True
        end = found.end()
    yield text[end:], False


def _bars(text: str) -> str:
    """Bars of code in tables, which GitHub wants escaped and Python-Markdown shows as they are."""
    return CODE.sub(lambda found: found[0].replace("\\|", "|"), text)


def _listing(file: Path, root: Path) -> str:
    """A file of code as a page."""
    text = file.read_text()
    fence = "`" * max(4, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"# {file.relative_to(root).as_posix()}\n\n{fence}{LANGUAGES.get(file.suffix, 'text')}\n{text}{fence}\n"


def title_of(page: Path) -> str:
    """The first heading of a page."""
    found = re.search(r"^# +(.+)$", page.read_text(), re.MULTILINE)
    return found[1].replace("`", "") if found else page.stem


def first_sentence(page: Path) -> str:
    """Of the first paragraph below the heading; links as their text. Empty if the page has none."""
    text = FENCE.sub("", page.read_text())
    after = re.split(r"^# .+$", text, maxsplit=1, flags=re.MULTILINE)[-1]
    paragraphs = [each.strip() for each in after.split("\n\n") if each.strip()]
    prose = next((each for each in paragraphs if not each.startswith(("#", "|", "- ", "!", "<", "1. "))), "")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(prose.split()))
    return re.split(r"(?<=[.:!?]) (?=[A-Z`])", plain, maxsplit=1)[0]
