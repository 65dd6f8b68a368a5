"""Closed command-line agents are recorded to the token too: Claude Code and Codex, as they are installed from npm."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentlightning import span as names
from agentlightning.assemble import calls
from agentlightning.errors import PolicyError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

QUESTION = "What is 6*7? Have the shell work it out."
QUIET = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}


def script(tool: str, arguments: dict[str, Any]) -> Any:
    """Call the tool, and answer once the shell has."""
    call = f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"

    def answer(messages: list[dict[str, Any]]) -> str:
        results = [message["content"] for message in messages if message["role"] == "tool"]
        return f"It is {re.findall('[0-9]+', results[-1])[-1]}." if results else call

    return answer


async def check(service: Any) -> None:
    """Two calls with their tokens; the second goes on in those of the first."""
    kept = [span.attributes for span in await service.calls()]
    assert len(kept) == 2
    first, second = kept
    assert [call[names.PROMPT_TOKEN_IDS] for call in kept] == [prompt for prompt, _ in service.engine.calls]
    known = first[names.PROMPT_TOKEN_IDS] + first[names.RESPONSE_TOKEN_IDS]
    assert second[names.PROMPT_TOKEN_IDS][: len(known)] == known
    assert second[names.CONTINUES] == (await service.calls())[0].span_id


async def test_claude_code_finishes_and_every_token_of_it_is_recorded(
    serve: Any, programs: Any, tmp_path: Path
) -> None:
    claude = programs("commands") / "claude"
    service = await serve(script("Bash", {"command": "echo $((6*7))", "description": "Multiply"}))
    options = ["--allowedTools", "Bash", "--model", "claude-sonnet-4-5", "--output-format", "json"]
    ended = await service.run([claude, "-p", QUESTION, *options], tmp_path, QUIET)
    assert ended.code == 0, ended.stderr + ended.stdout
    assert json.loads(ended.stdout)["result"] == "It is 42."
    await check(service)
    prompt = service.engine.chat.decode(service.engine.calls[0][0])
    assert "x-anthropic-billing-header" not in prompt


@pytest.mark.parametrize("how", ["a provider of its own", "the built-in provider"])
async def test_codex_finishes_and_every_token_of_it_is_recorded(
    serve: Any, programs: Any, tmp_path: Path, how: str
) -> None:
    """The built-in provider asks for a websocket first, and is told that there is none."""
    codex = programs("commands") / "codex"
    service = await serve(script("exec_command", {"cmd": "echo $((6*7))"}))
    url = service.environment["OPENAI_BASE_URL"]
    options = ["-c", f'openai_base_url="{url}"']
    if how == "a provider of its own":
        provider = f'{{name="policy",base_url="{url}",env_key="OPENAI_API_KEY"}}'
        options = ["-c", "model_provider=policy", "-c", f"model_providers.policy={provider}"]
    command = [codex, "exec", "--skip-git-repo-check", "-s", "danger-full-access", "-m", "gpt-5", *options, QUESTION]
    ended = await service.run(command, tmp_path)
    assert ended.code == 0, ended.stderr + ended.stdout
    assert "It is 42." in ended.stdout
    assert "Reconnecting" not in ended.stderr
    await check(service)


async def test_a_call_of_claude_code_that_fails_is_made_again_and_only_its_answer_counts(
    serve: Any, programs: Any, tmp_path: Path
) -> None:
    claude = programs("commands") / "claude"
    failures = iter([PolicyError("the device is lost")] * 2)
    answer = script("Bash", {"command": "echo $((6*7))", "description": "Multiply"})

    def unlucky(messages: list[dict[str, Any]]) -> str | Exception:
        return next(failures, None) or answer(messages)

    service = await serve(unlucky)
    options = ["--allowedTools", "Bash", "--model", "claude-sonnet-4-5", "--output-format", "json"]
    ended = await service.run([claude, "-p", QUESTION, *options], tmp_path, QUIET)
    assert json.loads(ended.stdout)["result"] == "It is 42."
    spans = await service.calls()
    requests = [span.attributes[names.REQUEST] for span in spans]
    assert [span.status_code for span in spans] == ["ERROR", "ERROR", "OK", "OK"]
    assert len(set(requests[:3])) == 1
    assert requests[0].startswith(names.SENT_ONCE)
    assert calls(spans) == spans[2:]
