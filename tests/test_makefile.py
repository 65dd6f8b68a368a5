"""What the first command of the README does before it downloads anything."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def make(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "Makefile", directory)
    shutil.copy(ROOT / "pyproject.toml", directory)
    return subprocess.run(["make", "--no-print-directory", *arguments], cwd=directory, capture_output=True, text=True)


def test_an_interpreter_that_is_too_old_is_named_before_anything_is_installed(tmp_path):
    old = tmp_path / "python3.10"
    pretend = "import sys; sys.version_info = (3, 10, 4); exec(sys.argv[1])"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{pretend}" "$2"\n')
    old.chmod(0o755)
    done = make(tmp_path, "demo", f"PYTHON={old}")
    assert done.returncode == 2
    assert f"{old} is Python 3.10, and Python 3.11 or newer is needed; run: make PYTHON=python3.12 demo" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_torch_comes_from_the_index_that_was_chosen(tmp_path):
    [line] = [line for line in make(tmp_path, "-n", "demo").stdout.splitlines() if "torch==" in line]
    assert "--index-url" not in line
    chosen = make(tmp_path, "-n", "demo", "TORCH_INDEX=https://index.example/cpu").stdout
    assert "--index-url https://index.example/cpu torch==" in chosen


def test_the_demo_installs_nothing_of_development(tmp_path):
    [demo, dev] = [make(tmp_path, "-n", target).stdout for target in ("demo", "test")]
    assert "'.[demo]'" in demo
    assert "dev" not in demo.replace("/dev/", "")
    assert dev.index("torch==") < dev.index("'.[demo]'") < dev.index("'.[dev]'") < dev.index("bin/pytest")


def test_every_page_names_the_pythons_that_the_tests_run_on(tmp_path):
    versions = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    listed = f"{', '.join(versions[:-1])} and {versions[-1]}"
    assert f"(of {listed}, or newer)" in make(tmp_path, "help").stdout
    for page in ("README.md", "docs/get-started/install.md"):
        assert f"tested with Python {listed}" in " ".join((ROOT / page).read_text().split())
