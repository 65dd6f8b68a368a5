"""The `openai` package, over responses: streamed, and continued by `previous_response_id`."""

import json
import sys

from openai import OpenAI

MODEL = "gpt-4o-mini"
SYSTEM = "Use the tool to multiply."
INTEGER = {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "required": ["a", "b"]}
MULTIPLY = {
    "type": "function",
    "name": "multiply",
    "description": "Multiply two numbers.",
    "parameters": PARAMETERS,
    "strict": False,
}
TURNS = 4


def multiply(arguments: str) -> str:
    try:
        values = json.loads(arguments)
        return str(int(values["a"]) * int(values["b"]))
    except (ValueError, KeyError, TypeError):
        return "error: give two integers, a and b"


def answer(question: str) -> str:
    client = OpenAI()
    given, options = question, {}
    for _ in range(TURNS):
        request = {"model": MODEL, "instructions": SYSTEM, "input": given, "tools": [MULTIPLY], **options}
        with client.responses.stream(**request) as events:
            reply = events.get_final_response()
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return reply.output_text
        results = [(call.call_id, multiply(call.arguments)) for call in calls]
        given = [{"type": "function_call_output", "call_id": id, "output": result} for id, result in results]
        options = {"previous_response_id": reply.id}
    return ""


print(answer(json.load(sys.stdin)["question"]))
