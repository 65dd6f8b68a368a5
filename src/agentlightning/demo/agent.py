"""An ordinary agent: it solves word problems with a calculator, through any OpenAI-compatible endpoint."""

import ast
import functools
import json
import operator as do
from typing import Any

from openai import OpenAI

SYSTEM = "Use the calculator, then reply ### ANSWER: number ###"
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
CALCULATOR = {"name": "calculator", "description": "Evaluate an arithmetic expression.", "parameters": PARAMETERS}
TOOLS: list[Any] = [{"type": "function", "function": CALCULATOR}]
BINARY: dict[type, Any] = {ast.Add: do.add, ast.Sub: do.sub, ast.Mult: do.mul, ast.Div: do.truediv}


@functools.cache
def client() -> OpenAI:
    return OpenAI(base_url="http://localhost", api_key="unused")


def evaluate(node: ast.AST) -> float:
    match node:
        case ast.Expression(body=body):
            return evaluate(body)
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -evaluate(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            return BINARY[type(op)](evaluate(left), evaluate(right))
        case _:
            raise ValueError("only numbers, + - * / and parentheses")


def calculator(arguments: str) -> str:
    try:
        return str(evaluate(ast.parse(json.loads(arguments)["expression"][:200], mode="eval")))
    except (ValueError, TypeError, KeyError, SyntaxError, ArithmeticError) as error:
        return f"error: {error}"


def solve(question: str, base_url: str, model: str = "policy") -> str:
    chat = client().with_options(base_url=base_url).chat.completions
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    for _ in range(4):
        message = chat.create(model=model, messages=messages, tools=TOOLS, max_tokens=256).choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.to_dict())
        for call in message.tool_calls:
            if call.type == "function":
                result = calculator(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""
