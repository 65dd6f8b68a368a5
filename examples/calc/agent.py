"""An agent that solves word problems with the calculator of an MCP server, written with AutoGen."""

import asyncio
import os
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import anyio
from autogen_agentchat.agents import AssistantAgent
from autogen_core import CancellationToken
from autogen_core.tools import ToolResult, ToolSchema
from autogen_ext.models.openai import OpenAIChatCompletionClient
from autogen_ext.tools.mcp import McpWorkbench, StdioServerParams
from mcp import McpError

SYSTEM = "Use the calculator, then reply ### ANSWER: number ###"
PATIENCE_SECONDS = 60
"""How long the server may take to start or to answer."""
SERVER = StdioServerParams(
    command=sys.executable, args=[str(Path(__file__).with_name("calculator.py"))], read_timeout_seconds=PATIENCE_SECONDS
)


@cache
def model_client() -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(model="gpt-4.1-nano", max_tokens=int(os.environ.get("MAX_TOKENS", "512")))


class Calculator(McpWorkbench):
    """The tools of the server. Where it has ended, ConnectionError: McpWorkbench would tell the model, or wait."""

    async def list_tools(self) -> list[ToolSchema]:
        try:
            return await asyncio.wait_for(super().list_tools(), 2 * PATIENCE_SECONDS)
        except (McpError, RuntimeError, TimeoutError, anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            raise ConnectionError(f"the MCP server of the calculator does not answer: {error!r}") from error

    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        cancellation_token: CancellationToken | None = None,
        call_id: str | None = None,
    ) -> ToolResult:
        answer = super().call_tool(name, arguments, cancellation_token, call_id)
        try:
            result = await asyncio.wait_for(answer, 2 * PATIENCE_SECONDS)
        except TimeoutError as error:
            raise ConnectionError(f"the MCP server of the calculator did not answer {arguments}") from error
        if result.is_error:
            await self.list_tools()  # raises if the error is that of the server, and not the model's
        return result


calculator: Calculator | None = None
"""One server for all problems of this process: starting it costs more than solving one."""


async def solve(question: str) -> str:
    global calculator
    workbench = calculator = calculator or Calculator(SERVER)
    agent = AssistantAgent(
        "solver", model_client=model_client(), workbench=workbench, system_message=SYSTEM, max_tool_iterations=4
    )
    try:
        result = await agent.run(task=question)
    except ConnectionError:
        if calculator is workbench:
            calculator = None  # the next problem starts another server
        raise
    return result.messages[-1].to_text()
