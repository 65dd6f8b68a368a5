"""The program itself: what a user sees before any verb runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPTED = """
import sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts())
sys.argv = ["agl", *{arguments!r}]
from agentlightning.cli import main
main()
"""


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("agentlightning.cli.main", ["--help"]),
        ("agentlightning.cli.train", ["train", "--help"]),
        ("rich.console", ["train", "--help"]),
        ("agentlightning.training.report.result", ["doctor", "."]),
    ],
)
def test_ctrl_c_in_the_first_seconds_leaves_no_traceback(module: str, arguments: list[str]) -> None:
    program = INTERRUPTED.format(module=module, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert "interrupted" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_moves_no_cursor(invoke) -> None:  # type: ignore[no-untyped-def]
    refused = invoke("doctor", "no\x1b[1Arun")
    assert r"no\x1b[1Arun" in refused.stderr


@pytest.mark.parametrize("address", ["http://[", "http://127.0.0.1:x"])
def test_an_address_that_is_none_is_named(invoke, address: str) -> None:  # type: ignore[no-untyped-def]
    refused = invoke("status", address)
    assert (refused.exit_code, f"the server {address} cannot be reached" in refused.stderr) == (2, True)


@pytest.mark.parametrize("words", [("init", "--kind", "function"), ("demo", "--run")])
def test_a_folder_that_cannot_be_made_is_named(invoke, tmp_path: Path, words: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "below"
    refused = invoke(*words, str(place))
    assert (refused.exit_code, f"{place} cannot be written" in refused.stderr) == (2, True), refused.output


def test_an_export_replaces_no_file_unless_it_is_told_to(invoke, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    mine = tmp_path / "mine.jsonl"
    mine.write_text("notes")
    for form in ("openai-jsonl", "trl-jsonl", "dpo-jsonl"):
        refused = invoke("export", str(tmp_path / "run"), "--to", form, "--out", str(mine))
        assert refused.exit_code == 2
        assert "--overwrite" in refused.output
    assert (
        "exists" not in invoke("export", str(tmp_path), "--to", "trl-jsonl", "--out", str(mine), "--overwrite").output
    )
    assert mine.read_text() == "notes", "there is no run to export"


PARSED = """
import sys
from agentlightning.util import settings
read, sys.argv = settings.field_texts, ["agl", *{arguments!r}]
settings.field_texts = lambda kind: print("parsed") or read(kind)
from agentlightning.cli import main
main()
"""


@pytest.mark.parametrize(("asked", "arguments"), [(True, ["run", "--help"]), (False, ["run", "--timeout", "1"])])
def test_the_help_of_options_is_read_only_where_it_is_asked_for(asked: bool, arguments: list[str]) -> None:
    program = PARSED.format(arguments=arguments)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ("parsed" in done.stdout) == asked, done.stdout + done.stderr


def test_flags_have_no_opposite_without_docstrings() -> None:
    words = [sys.executable, "-OO", "-m", "agentlightning", "store", "export", "--no-force"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "No such option" in done.stderr) == (2, True), done.stderr
