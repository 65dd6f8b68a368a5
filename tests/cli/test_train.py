"""`agl train --print-config` resolves and checks all settings, and imports nothing that a run needs."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from agentlightning.cli.main import build

pytestmark = pytest.mark.integration

PROGRAM = """
import sys
from agentlightning.cli.main import build
try:
    build()(["train", "--print-config", "--agent", "agent.py:solve", "algorithm.steps=7", *sys.argv[1:]])
except SystemExit as exit:
    heavy = ("torch", "transformers", "numpy", "uvicorn", "sqlite3", "agentlightning.trainer")
    print([name for name in heavy if name in sys.modules], exit.code)
"""


def test_printing_the_settings_imports_no_torch_and_no_part_of_a_run():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    *settings, last = done.stdout.strip().splitlines()
    assert last == "[] 0", done.stderr
    assert "steps = 7" in settings
    assert 'agent = "agent.py:solve"' in settings


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["algorithm.stepps=7"], "unknown setting algorithm.stepps"),
        (["algorithm.group_size=1"], "group_size=1 leaves no baseline"),
        (["algorithm.credit=best"], "there is no credit rule 'best'"),
        (["algorithm.credit.gamma=0.5"], "settings without a type name no credit rule. Known: discounted,"),
        (["algorithm.loss.type=best"], "algorithm.loss"),
        (["algorithm.credit=value", 'algorithm.loss=["ppo", "value"]'], 'set policy.value_head="linear"'),
        (["algorithm.optimizer.warmup_steps=500"], "warmup_steps=500 must be below"),
        (["algorithm.target_agent=("], "is no regular expression"),
        (["policy.engine=mine"], "policy.engine"),
        (
            ["data.held_out=20"],
            "should be a file of tasks; how many are used is evaluation.tasks and evaluation.held_out",
        ),
        (["data.train=5"], "should be a file of tasks"),
        (["--config", "missing.toml"], "no settings file 'missing.toml'"),
        (["--resume", "missing"], "missing holds no run"),
        (["--resume", "missing", "--run", "other"], "continues missing with its own settings"),
        (["--server", "not-a-url"], "not-a-url"),
    ],
)
@pytest.mark.parametrize("way", ["--print-config", "--dry-run"])
def test_settings_that_cannot_work_are_refused(arguments, complaint, way):
    done = CliRunner().invoke(build(), ["train", way, *arguments])
    assert done.exit_code == 2, done.output
    assert complaint in done.stderr


def test_the_settings_of_the_current_directory_are_used_and_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agl.toml").write_text('agent = "mine.py:solve"\n[algorithm]\nsteps = 7\n')
    (tmp_path / "other.toml").write_text("[algorithm]\nsteps = 9\n")
    found = CliRunner().invoke(build(), ["train", "--print-config"])
    assert "steps = 7" in found.stdout
    assert "settings: agl.toml" in found.stderr
    given = CliRunner().invoke(build(), ["train", "--print-config", "--config", "other.toml"])
    assert "steps = 9" in given.stdout
    assert "mine.py" not in given.stdout
    assert "settings:" not in given.stderr
