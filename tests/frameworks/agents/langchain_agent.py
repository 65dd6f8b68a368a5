"""LangChain's agent, which is a LangGraph graph."""

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def calculator(expression: str) -> str:
    """Calculates."""
    return str(eval(expression))


agent = create_agent(ChatOpenAI(model="gpt-4o-mini"), tools=[calculator], system_prompt="Use tools.", name="math")
state = agent.invoke({"messages": [{"role": "user", "content": "What is 6*7?"}]})
print(state["messages"][-1].content)
