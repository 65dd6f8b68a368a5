"""The tool of the Python agents, and where they read their question."""

import json
import os
import re
import sys

DESCRIPTION = "Evaluate an arithmetic expression."
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}


def calculate(arguments: object) -> str:
    """The value of the expression in `arguments`, which a model has made up: whatever it is, the answer is text."""
    expression = arguments.get("expression") if isinstance(arguments, dict) else None
    if not isinstance(expression, str) or not re.fullmatch(r"[\d\s+\-*/().]{1,100}", expression) or "**" in expression:
        return "error: give an expression of numbers and + - * / ( )"
    try:
        return f"{eval(expression):g}"
    except (SyntaxError, ArithmeticError, TypeError):
        return "error: not an expression"


def question() -> str:
    task = os.environ.get("AGL_TASK")
    return json.loads(task)["question"] if task else " ".join(sys.argv[1:])
