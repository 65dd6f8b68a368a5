"""A tool-using agent as a class that knows only its environment.

For each attempt the runner makes an `Agent()` and awaits `run()`. The task is in the environment variable `AGL_TASK`,
as JSON; `AGL_OPENAI_BASE_URL` and `AGL_KEY` lead to the model in training, and the reward is an event posted to
`AGL_EVENT_URL`. Nothing of Agent Lightning is imported.
"""

import asyncio
import json
import os
import re
import urllib.request
from typing import Any

from openai import AsyncOpenAI

CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
MAX_TURNS = 4


def calculate(raw_arguments: str) -> str:
    try:
        expression = str(json.loads(raw_arguments)["expression"])
    except (ValueError, KeyError, TypeError):
        return "error: the arguments are not JSON with an expression"
    if not re.fullmatch(r"[\d\s+\-*/().]{1,100}", expression) or "**" in expression:
        return "error: only numbers and + - * / ( ) are allowed"
    try:
        return f"{eval(expression):g}"
    except (SyntaxError, ArithmeticError, TypeError):
        return "error: not an expression"


class Agent:
    def __init__(self) -> None:
        self.key = os.environ["AGL_KEY"]
        self.event_url = os.environ["AGL_EVENT_URL"]
        self.model = os.environ.get("AGL_MODEL", "gpt-4o-mini")
        task = json.loads(os.environ["AGL_TASK"])
        self.question = str(task["question"])
        self.answer = float(task["answer"])

    async def run(self) -> None:
        base_url = os.environ["AGL_OPENAI_BASE_URL"]
        async with AsyncOpenAI(base_url=base_url, api_key=self.key) as client:
            text = await self.solve(client)
        await asyncio.to_thread(self.post_reward, self.score(text))

    async def solve(self, client: AsyncOpenAI) -> str:
        messages: list[Any] = [{"role": "user", "content": self.question}]
        for _ in range(MAX_TURNS):
            reply = await client.chat.completions.create(model=self.model, messages=messages, tools=[CALCULATOR])
            message = reply.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                result = calculate(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return ""

    def score(self, text: str) -> float:
        found = re.findall(r"### ANSWER: (-?\d+(?:\.\d+)?) ###", text)
        return float(len(found) == 1 and abs(float(found[0]) - self.answer) < 1e-6)

    def post_reward(self, value: float) -> None:
        event = {"event_type": "reward", "data": {"value": value}}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(self.event_url, json.dumps(event).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            response.read()
