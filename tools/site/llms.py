"""What coding agents read: each page as Markdown, a list of them (llms.txt), and all of them as one file."""

from __future__ import annotations

import shutil
from pathlib import Path

from tools.site.navigation import Entry
from tools.site.pages import first_sentence

SUMMARY = """# Agent Lightning

> Train any AI agent, however it is built, with almost no change to its code: reinforcement learning, prompt search
> and supervised learning, from new rollouts or recorded sessions. The Python package is `agentlightning`, imported as
> `agl`; the program is `agl`.

Each page below is Markdown; the page of the site has the same path with `.html`. All in one file: llms-full.txt.

"""


def write_twins(pages: Path, site: Path) -> int:
    """The source of each page beside it, as `.md`. Returns their number."""
    files = sorted(pages.rglob("*.md"))
    for file in files:
        target = site / file.relative_to(pages)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    return len(files)


def write_lists(entries: tuple[Entry, ...], pages: Path, site: Path) -> None:
    """Write llms.txt and llms-full.txt, in the order of the navigation."""
    lines = [SUMMARY]
    for entry in entries:
        if entry.path is None:
            lines.append(f"\n## {entry.title}\n\n")
        lines += [_line(page, pages) for page in entry.pages]
    (site / "llms.txt").write_text("".join(lines))
    full = [page for entry in entries for page in entry.pages]
    texts = [f"<!-- {page.path} -->\n\n{(pages / str(page.path)).read_text().strip()}\n" for page in full]
    (site / "llms-full.txt").write_text("\n".join(texts))


def _line(page: Entry, pages: Path) -> str:
    about = "" if page.title == "Overview" else first_sentence(pages / str(page.path))
    return f"- [{page.title}]({page.path})" + (f": {about}" if about else "") + "\n"
