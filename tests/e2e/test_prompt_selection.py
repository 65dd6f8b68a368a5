"""An algorithm that trains no weights runs through the trainer without any package of the `train` extra."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("prompt_selection.py")


@pytest.mark.slow
def test_the_better_of_two_prompts_is_published_measured_and_kept(tmp_path):
    run_dir = tmp_path / "run"
    done = subprocess.run([sys.executable, PROGRAM, run_dir], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["seen"] == [[0.0, 0.0], [1.0, 1.0]], "each step's rollouts were given the prompt just published"
    assert report["gain"] == [0.0, 1.0]
    assert report["prompts"]["prompt"]["template"] == "Please say {word}!"
    assert report["again"] == 2
    assert not report["start"], "no policy was made"
