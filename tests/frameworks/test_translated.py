"""Closed command-line agents are served by providers of another dialect: Claude Code by one that speaks OpenAI's, Codex
by one that speaks Anthropic's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.provider import Reply, ScriptedProvider, Seen, chat_answer
from tests.support.provider_streams import (
    chat_events,
    messages_answer,
    messages_events,
    response_answer,
    response_events,
)

from agentlightning import span as names
from agentlightning.gateway.config import GatewayConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

QUESTION = "What is 6*7? Have the shell work it out."
QUIET = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
THOUGHT = {"type": "thinking", "thinking": "The shell can.", "signature": "c2lnbmVk"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "exec_command", "input": {"cmd": "echo $((6*7))"}}

REASONING = {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": "gAAA"}
CALL = {
    **{"id": "fc_1", "type": "function_call", "call_id": "call_1", "name": "Bash", "status": "completed"},
    "arguments": json.dumps({"command": "echo $((6*7))", "description": "Multiply"}),
}


def config(provider: ScriptedProvider, dialect: str, *paths: str) -> GatewayConfig:
    base = provider.url if dialect == "anthropic" else f"{provider.url}/v1"
    them = {"name": "them", "dialect": dialect, "base_urls": [base], "paths": paths or None}
    return GatewayConfig.model_validate({"providers": [them], "routes": [{"model": "*", "provider": "them"}]})


def as_openai(seen: Seen) -> Reply:
    results = [message["content"] for message in seen.json["messages"] if message["role"] == "tool"]
    arguments = json.dumps({"command": "echo $((6*7))", "description": "Multiply"})
    call = {"id": "call_1", "type": "function", "function": {"name": "Bash", "arguments": arguments}}
    text, calls = (f"It is {results[-1]}.", []) if results else ("", [call])
    if seen.json.get("stream"):
        return Reply(events=chat_events([text] if text else [], calls, thought="" if results else "The shell can."))
    return Reply(chat_answer(text, calls))


def as_responses(seen: Seen) -> Reply:
    items = seen.json["input"]
    results = [item["output"] for item in items if item.get("type") == "function_call_output"]
    text = {"type": "output_text", "text": f"It is {results[-1] if results else 0}.", "annotations": []}
    said = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
    turn = [said] if results or not seen.json.get("tools") else [REASONING, CALL]
    return Reply(events=response_events(turn)) if seen.json.get("stream") else Reply(response_answer(turn))


def as_anthropic(seen: Seen) -> Reply:
    turns = [block for turn in seen.json["messages"] for block in turn["content"]]
    results = [block for block in turns if block["type"] == "tool_result"]
    blocks = [{"type": "text", "text": "It is 42."}] if results and "42" in str(results) else [THOUGHT, USE]
    return Reply(events=messages_events(blocks)) if seen.json.get("stream") else Reply(messages_answer(blocks))


async def test_claude_code_is_served_by_a_server_of_chat_completions(serve: Any, programs: Any, tmp_path: Path) -> None:
    claude = programs("commands") / "claude"
    async with ScriptedProvider(as_openai) as them:
        service = await serve([], config(them, "openai"))
        options = ["--allowedTools", "Bash", "--model", "claude-sonnet-4-5", "--output-format", "json"]
        ended = await service.run([claude, "-p", QUESTION, *options], tmp_path, QUIET)
        assert ended.code == 0, ended.stderr + ended.stdout
        assert json.loads(ended.stdout)["result"] == "It is 42."
    first, second = [seen.json for seen in them.seen if seen.json.get("tools")]
    assert second["messages"][: len(first["messages"])] == first["messages"]
    assert [message["role"] for message in second["messages"][len(first["messages"]) :]] == ["assistant", "tool"]
    assert all(span.attributes[names.TOKENS] == "none" for span in await service.calls())


async def test_claude_code_is_served_by_a_model_that_serves_only_responses(
    serve: Any, programs: Any, tmp_path: Path
) -> None:
    claude = programs("commands") / "claude"
    async with ScriptedProvider(as_responses) as them:
        service = await serve([], config(them, "openai", "responses"))
        options = ["--allowedTools", "Bash", "--model", "claude-sonnet-4-5", "--output-format", "json"]
        ended = await service.run([claude, "-p", QUESTION, *options], tmp_path, QUIET)
        assert ended.code == 0, ended.stderr + ended.stdout
        assert json.loads(ended.stdout)["result"] == "It is 42."
    first, second = [seen.json["input"] for seen in them.seen if seen.json.get("tools")]
    assert second[: len(first) + 2] == [*first, REASONING, CALL]


async def test_codex_is_served_by_anthropic_and_sends_its_thoughts_back(
    serve: Any, programs: Any, tmp_path: Path
) -> None:
    codex = programs("commands") / "codex"
    async with ScriptedProvider(as_anthropic) as them:
        service = await serve([], config(them, "anthropic"))
        options = ["-c", f'openai_base_url="{service.environment["OPENAI_BASE_URL"]}"']
        command = [codex, "exec", "--skip-git-repo-check", "-s", "danger-full-access", "-m", "gpt-5", *options]
        command += ["-c", 'model_reasoning_effort="medium"']
        ended = await service.run([*command, QUESTION], tmp_path)
        assert ended.code == 0, ended.stderr + ended.stdout
        assert "It is 42." in ended.stdout
    first, second = [seen.json for seen in them.seen]
    assert (first["thinking"], first["output_config"]["effort"]) == ({"type": "adaptive"}, "medium")
    assert second["messages"][1] == {"role": "assistant", "content": [THOUGHT, USE]}
