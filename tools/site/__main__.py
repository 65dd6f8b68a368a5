"""`python -m tools.site --zensical PROGRAM`: build the site in build/site/html."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tools.reference.__main__ import pages as generated
from tools.site.check import dead_links
from tools.site.llms import write_lists, write_twins
from tools.site.navigation import as_toml, navigation
from tools.site.pages import Pages

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


def prepare(to: Path) -> None:
    """What zensical reads: `pages`, the theme's changes and the settings."""
    shutil.rmtree(to, ignore_errors=True)
    pages = to / "pages"
    pages.mkdir(parents=True)
    Pages(ROOT, generated()).write(pages)
    shutil.copy(HERE / "site.css", pages)
    shutil.copytree(HERE / "theme", to / "theme")
    settings = (HERE / "settings.toml").read_text()
    nav = f"[project]\nnav = {as_toml(navigation(pages))}"
    (to / "zensical.toml").write_text(settings.replace("[project]", nav, 1))


def build(to: Path, zensical: str) -> int:
    """Build the site in `to`/html. Returns the number of pages; exits where zensical warns or a link leads nowhere."""
    prepare(to)
    done = subprocess.run(
        [zensical, "build", "--clean"],
        cwd=to,
        env={**os.environ, "NO_COLOR": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    sys.stdout.write(done.stdout)
    write_lists(navigation(to / "pages"), to / "pages", to / "html")
    count = write_twins(to / "pages", to / "html")
    wrong = [line for line in done.stdout.splitlines() if re.search(r"warning|error", line, re.IGNORECASE)]
    wrong += dead_links(to / "html")
    if wrong or done.returncode:
        sys.exit("\n".join(["error: the site has faults:", *wrong]))
    return count


def main() -> None:
    """Read the arguments and build."""
    parser = argparse.ArgumentParser(prog="python -m tools.site")
    parser.add_argument("--zensical", default="zensical", help="the program zensical")
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "site", help="the folder to build in")
    options = parser.parse_args()
    to = options.to.resolve()
    pages = build(to, options.zensical)
    print(f"{pages} pages in {to / 'html'}: open index.html, from the disk or from any web server")  # noqa: T201


if __name__ == "__main__":
    main()
