"""A graph of one's own in LangGraph, streamed."""

import asyncio

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def calculator(expression: str) -> str:
    """Calculates."""
    return str(eval(expression))


model = ChatOpenAI(model="gpt-4o-mini", streaming=True).bind_tools([calculator])


async def think(state: MessagesState) -> dict:
    return {"messages": [await model.ainvoke(state["messages"])]}


graph = StateGraph(MessagesState)
graph.add_node("think", think)
graph.add_node("tools", ToolNode([calculator]))
graph.add_edge(START, "think")
graph.add_conditional_edges("think", tools_condition)
graph.add_edge("tools", "think")


async def main() -> None:
    state = await graph.compile().ainvoke({"messages": [{"role": "user", "content": "What is 6*7?"}]})
    print(state["messages"][-1].content)


asyncio.run(main())
