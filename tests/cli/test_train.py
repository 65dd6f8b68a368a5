"""`agl train --dry-run` resolves and checks all settings, and imports nothing that a run needs."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from agentlightning.cli.main import build

PROGRAM = """
import sys
from agentlightning.cli.main import build
try:
    build()(["train", "--dry-run", "--agent", "agent.py:solve", "algorithm.steps=7", *sys.argv[1:]])
except SystemExit as exit:
    heavy = ("torch", "transformers", "numpy", "uvicorn", "sqlalchemy", "agentlightning.trainer")
    print([name for name in heavy if name in sys.modules], exit.code)
"""


def test_a_dry_run_imports_no_torch_and_no_part_of_a_run():
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
        (["algorithm.credit=best"], "unknown credit rule 'best'"),
        (["algorithm.loss.type=best"], "algorithm.loss"),
        (["algorithm.credit=value", 'algorithm.loss=["ppo", "value"]'], 'set policy.value_head="linear"'),
        (["algorithm.optimizer.warmup_steps=500"], "warmup_steps=500 must be below"),
        (["algorithm.target_agent=("], "is no regular expression"),
        (["policy.engine=mine"], "policy.engine"),
        (["--config", "missing.toml"], "no settings file 'missing.toml'"),
        (["--resume", "missing"], "missing holds no run"),
        (["--resume", "missing", "--run-dir", "other"], "leave out --run-dir other"),
        (["--server", "not-a-url"], "not-a-url"),
    ],
)
def test_a_dry_run_refuses_settings_that_cannot_work(arguments, complaint):
    done = CliRunner().invoke(build(), ["train", "--dry-run", *arguments])
    assert done.exit_code == 2, done.output
    assert complaint in done.stderr
