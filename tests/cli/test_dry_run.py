"""What `agl train --dry-run` prints of its checks."""

from __future__ import annotations

import pytest

from agentlightning.cli.train import dry_run_lines
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
    lines = [line for each in dry_run_lines(DryRun(checks)) for line in str(each).splitlines()]
    assert lines[-1] == last
    for check in checks:
        assert any(check.text in line for line in lines)
        assert check.advice is None or any(check.advice in line for line in lines)


def test_the_example_shows_calls_of_tools_as_calls() -> None:
    call = {"type": "tool_call", "id": "1", "name": "stock", "arguments": {"item": "drill"}}
    transcript = ({"role": "assistant", "parts": [call]}, {"role": "tool", "parts": [result_of(call)]})
    rollout = DryRunRollout("r1", {}, "succeeded", 1.0, policy_calls=1, transcript=transcript)
    lines = [str(each) for each in dry_run_lines(DryRun((OK,), (rollout,)))]
    assert '  assistant  stock(item="drill")' in lines
    assert "  tool       7" in lines


def result_of(call: dict[str, object]) -> dict[str, object]:
    return {"type": "tool_call_response", "id": call["id"], "response": "7"}
