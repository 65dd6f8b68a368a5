"""A calculator as an MCP server over stdio: one tool, `calculate`."""

import ast
import math
import operator
from collections.abc import Callable

from mcp.server.fastmcp import FastMCP

LONGEST, LARGEST = 200, 1e15
"""The characters of an expression and the absolute value of a number: an agent may ask for 9**9**9."""
BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: math.pow,
}

server = FastMCP("calculator", log_level="ERROR")


@server.tool()
async def calculate(expression: str) -> str:
    """Calculate an arithmetic expression."""
    return f"{evaluate(expression):.12g}"


def evaluate(expression: str) -> float:
    """Raises ValueError or ArithmeticError for what cannot be calculated."""
    if len(expression) > LONGEST:
        raise ValueError(f"longer than {LONGEST} characters")
    try:
        return value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body)
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"not an expression: {expression}") from error


def value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as found):
            pass
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            found = -value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            found = BINARY[type(op)](value(left), value(right))
        case _:
            raise ValueError("only numbers, + - * / // % ** and parentheses")
    if not abs(found) <= LARGEST:
        raise ValueError(f"numbers go up to {LARGEST:g}")
    return found


if __name__ == "__main__":
    server.run()
