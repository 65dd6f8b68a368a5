"""smolagents: what was called and what came of it are told to the model as text."""

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def calculator(expression: str) -> str:
    """Calculates.

    Args:
        expression: What to calculate.
    """
    return str(eval(expression))


agent = ToolCallingAgent(tools=[calculator], model=OpenAIModel("gpt-4o-mini"), max_steps=3, verbosity_level=0)
print(agent.run("What is 6*7?"))
