"""OpenAI's SDK, responses, streamed, with `previous_response_id`."""

import json

from openai import OpenAI

SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOLS = [{"type": "function", "name": "calculator", "parameters": SCHEMA, "strict": False}]

client = OpenAI()
given, previous = "What is 6*7?", None
while True:
    options = {"previous_response_id": previous} if previous else {}
    with client.responses.stream(model="gpt-4o-mini", input=given, tools=TOOLS, **options) as events:
        for _ in events:
            pass
        reply = events.get_final_response()
    calls = [item for item in reply.output if item.type == "function_call"]
    if not calls:
        break
    values = [(call, eval(json.loads(call.arguments)["expression"])) for call in calls]
    given = [{"type": "function_call_output", "call_id": call.call_id, "output": str(value)} for call, value in values]
    previous = reply.id
print(reply.output_text)
