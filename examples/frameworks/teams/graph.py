"""A researcher, a writer and an editor as nodes of a LangGraph graph."""

import json
import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

ROLES = {
    "researcher": "You are the researcher. Name a fact.",
    "writer": "You are the writer. Write a sentence on it.",
    "editor": "You are the editor. Shorten it.",
}
model = ChatOpenAI(model="gpt-4o-mini", max_tokens=12)


def node(role: str):
    def speak(state: MessagesState) -> dict:
        said = state["messages"][-1].content
        return {"messages": [model.invoke([SystemMessage(ROLES[role]), HumanMessage(said)])]}

    return speak


graph = StateGraph(MessagesState)
for role in ROLES:
    graph.add_node(role, node(role))
graph.add_edge(START, "researcher")
graph.add_edge("researcher", "writer")
graph.add_edge("writer", "editor")

topic = json.load(sys.stdin)["topic"]
print(graph.compile().invoke({"messages": [HumanMessage(topic)]})["messages"][-1].content)
