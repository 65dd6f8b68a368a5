"""What `agl train --dry-run` prints of its checks."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from agentlightning.cli.formatting.dry_run import print_dry_run
from agentlightning.training.dry_run import DryRun, DryRunCheck

OK, WARNING, FAILED = (
    DryRunCheck("model", "ok", "it answers"),
    DryRunCheck("reward", "warning", "all are 0", "use easier tasks"),
    DryRunCheck("calls", "failed", "there were none", "look for base_url="),
)


@pytest.mark.parametrize(
    ("checks", "last"),
    [
        ((OK,), "ready"),
        ((OK, WARNING), "ready, with 1 warning"),
        ((WARNING, WARNING), "ready, with 2 warnings"),
        ((OK, WARNING, FAILED), "not ready: 1 of 3 checks failed"),
    ],
)
def test_the_last_line_says_whether_training_can_begin_and_how(checks: tuple[DryRunCheck, ...], last: str) -> None:
    out = io.StringIO()
    print_dry_run(DryRun(checks), Console(file=out, width=200))
    lines = out.getvalue().splitlines()
    assert lines[-1] == last
    for check in checks:
        assert any(check.text in line for line in lines)
        assert check.advice is None or any(check.advice in line for line in lines)
