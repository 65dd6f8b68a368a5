"""`python -m tools.reference`: write the generated pages of docs/reference."""

from __future__ import annotations

from pathlib import Path

from tools.reference import command_line, python_names, settings, spans

FOLDER = Path(__file__).parents[2] / "docs" / "reference"


def pages() -> dict[Path, str]:
    """Path -> text of every generated page."""
    made = {FOLDER / "python" / name: text for name, text in python_names.pages().items()}
    whole = {"settings.md": settings.page(), "command-line.md": command_line.page(), "spans.md": spans.page()}
    return made | {FOLDER / name: text for name, text in whole.items()}


def main() -> None:
    """Write them."""
    made = pages()
    for path, text in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.rstrip() + "\n")
    print(f"{len(made)} pages in {FOLDER}")  # noqa: T201


if __name__ == "__main__":
    main()
