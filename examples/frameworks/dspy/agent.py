"""DSPy's ReAct. Its cache is off: from it, all rollouts of a task would have the same answer."""

import json
import sys

import dspy


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


dspy.configure(lm=dspy.LM("openai/gpt-4o-mini", cache=False))
agent = dspy.ReAct("question -> answer", tools=[multiply], max_iters=3)
print(agent(question=json.load(sys.stdin)["question"]).answer)
