"""What a reader of the built site would stumble over: links and anchors that lead nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.ids.add(value or "")
            elif (tag, name) in {("a", "href"), ("img", "src"), ("link", "href"), ("script", "src")} and value:
                self.links.append(value)


def dead_links(site: Path) -> Iterator[str]:
    """Each link within the site whose file or anchor is not there, with its page."""
    pages = {file.resolve(): _Page(file.read_text()) for file in site.rglob("*.html")}
    for file, page in pages.items():
        for link in dict.fromkeys(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link.startswith("/"):
                continue
            goal = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            anchor = unquote(parts.fragment)
            in_goal = pages[goal].ids if goal in pages else set[str]()
            if not goal.exists() or (anchor and goal in pages and anchor not in in_goal | {"__top", "__skip"}):
                yield f"{file.relative_to(site.resolve())}: {link}"
