"""What the three agents are told."""

WRITER = "You write a SQLite query."
CHECKER = "You check a SQLite query: OK or WRONG."
REWRITER = "You correct a SQLite query."
OK, WRONG = "OK", "WRONG"


def to_write(schema: str, question: str) -> str:
    return f"{schema}\n{question}"


def to_check(schema: str, question: str, query: str, result: str) -> str:
    return f"{to_write(schema, question)}\n{query}\n{result}"


def to_rewrite(schema: str, question: str, query: str, result: str, verdict: str) -> str:
    return f"{to_check(schema, question, query, result)}\n{verdict}"
