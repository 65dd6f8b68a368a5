"""What `agl train --dry-run` prints of its checks."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from agentlightning.cli.train import print_dry_run
from agentlightning.training.dry_run import DryRun, DryRunCheck, DryRunRollout

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


def test_the_example_shows_calls_of_tools_as_calls() -> None:
    call = {"type": "tool_call", "id": "1", "name": "stock", "arguments": {"item": "drill"}}
    transcript = ({"role": "assistant", "parts": [call]}, {"role": "tool", "parts": [result_of(call)]})
    out = io.StringIO()
    rollout = DryRunRollout("r1", {}, "succeeded", 1.0, policy_calls=1, transcript=transcript)
    print_dry_run(DryRun((OK,), (rollout,)), Console(file=out, width=200))
    assert 'assistant  stock(item="drill")' in out.getvalue()
    assert "tool       7\n" in out.getvalue()


def result_of(call: dict[str, object]) -> dict[str, object]:
    return {"type": "tool_call_response", "id": call["id"], "response": "7"}
