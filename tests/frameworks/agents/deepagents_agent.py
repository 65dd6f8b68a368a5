"""deepagents, with its own tools besides."""

from deepagents import create_deep_agent
from langchain_openai import ChatOpenAI


def calculator(expression: str) -> str:
    """Calculates."""
    return str(eval(expression))


agent = create_deep_agent(model=ChatOpenAI(model="gpt-4o-mini"), tools=[calculator], system_prompt="Use tools.")
state = agent.invoke({"messages": [{"role": "user", "content": "What is 6*7?"}]})
print(state["messages"][-1].content)
