"""A LangGraph graph of a model and its tools, streamed."""

import asyncio
import json
import sys

from langchain_core.messages import SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

SYSTEM = SystemMessage("Use the tool to multiply.")


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


model = ChatOpenAI(model="gpt-4o-mini", streaming=True).bind_tools([multiply])


async def think(state: MessagesState) -> dict:
    return {"messages": [await model.ainvoke([SYSTEM, *state["messages"]])]}


graph = StateGraph(MessagesState)
graph.add_node("think", think)
graph.add_node("tools", ToolNode([multiply]))
graph.add_edge(START, "think")
graph.add_conditional_edges("think", tools_condition)
graph.add_edge("tools", "think")


async def main() -> None:
    question = {"role": "user", "content": json.load(sys.stdin)["question"]}
    state = await graph.compile().ainvoke({"messages": [question]}, {"recursion_limit": 10})
    print(state["messages"][-1].content)


asyncio.run(main())
