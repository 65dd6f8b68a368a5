"""`python -m tools.reference`: write the generated pages of docs/reference, which are not in git."""

from __future__ import annotations

import os
import re
from pathlib import Path

from agentlightning.store.http import BASE_PATH
from agentlightning.store.http.operations import OPERATIONS, describe
from tools.reference import command_line, python_names, settings, signs, spans

DOCS = Path(__file__).parents[2] / "docs"
FOLDER = DOCS / "reference"
MENTION = re.compile(r"`?docs/([\w/-]+\.md(?:#[\w-]+)?)`?")
"""A page that a docstring names."""
REQUESTS = f"""# REST requests

{python_names.MADE}
Every request of [the store over HTTP](rest.md), with the method of `LightningStore` that it calls. The OpenAPI document
with every field is at `/v1/agl/openapi.json` of a server.

"""


def pages() -> dict[Path, str]:
    """Path -> text of every generated page."""
    made = {FOLDER / "python" / name: text for name, text in python_names.pages().items()}
    made |= {FOLDER / "settings" / name: text for name, text in settings.pages().items()}
    made |= {
        FOLDER / "command-line.md": command_line.page(),
        FOLDER / "signs.md": signs.page(),
        FOLDER / "spans.md": spans.page(),
        FOLDER / "requests.md": REQUESTS + requests(),
    }
    return {path: _linked(text.rstrip() + "\n", path.parent) for path, text in made.items()}


def requests() -> str:
    """The operations of the store over HTTP as a Markdown table."""
    rows = (
        f"| `{each.verb} {BASE_PATH}{each.path}` | `{each.method}` | {describe(each.method)[0]} |"
        for each in OPERATIONS
    )
    lines = ["| request | method of the contract | what it does |", "| --- | --- | --- |", *rows]
    return "\n".join(lines) + "\n"


def _linked(text: str, folder: Path) -> str:
    """With a link in place of each page that is named."""

    def link(found: re.Match[str]) -> str:
        return f"[{Path(found[1].partition('#')[0]).stem}]({os.path.relpath(DOCS / found[1], folder)})"

    return MENTION.sub(link, text)


def main() -> None:
    """Write them."""
    made = pages()
    for path, text in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    print(f"{len(made)} pages in {FOLDER}")  # noqa: T201


if __name__ == "__main__":
    main()
