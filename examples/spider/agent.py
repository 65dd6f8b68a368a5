"""Text to SQL in LangGraph: a writer, a checker and a rewriter, as in arXiv:2508.03680, section 4.1.

The writer writes a query, which is executed. The checker reads the result and says whether it is right; if not, the
rewriter writes another query, up to `REWRITES` times.
"""

import os
import re
from contextlib import closing
from typing import Literal, TypedDict

import database as db
import prompts
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

REWRITES = 2
model = ChatOpenAI(model=os.environ.get("SQL_MODEL", "gpt-4o-mini"), max_tokens=int(os.environ.get("SQL_TOKENS", 128)))


class State(TypedDict, total=False):
    database: str
    question: str
    schema: str
    query: str
    result: str
    verdict: str
    rewrites: int


async def ask(agent: str, text: str) -> str:
    answer = await model.ainvoke([SystemMessage(agent), HumanMessage(text)])
    return str(answer.content).strip()


def query_in(answer: str) -> str:
    """The query of an answer, without the fence that models like to put around it."""
    fenced = re.search(r"```(?:sql(?:ite)?)?\s*(.*?)```", answer, re.DOTALL)
    return (fenced.group(1) if fenced else answer).strip()


def read(state: State) -> State:
    with closing(db.open_database(state["database"])) as connection:
        return {"schema": db.describe(connection), "rewrites": 0}


async def write(state: State) -> State:
    return {"query": query_in(await ask(prompts.WRITER, prompts.to_write(state["schema"], state["question"])))}


def execute(state: State) -> State:
    with closing(db.open_database(state["database"])) as connection:
        return {"result": db.result_of(connection, state["query"])}


def after_execute(state: State) -> Literal["check", "__end__"]:
    return "check" if state["rewrites"] < REWRITES else END


async def check(state: State) -> State:
    seen = prompts.to_check(state["schema"], state["question"], state["query"], state["result"])
    return {"verdict": await ask(prompts.CHECKER, seen)}


def after_check(state: State) -> Literal["rewrite", "__end__"]:
    return END if state["verdict"].startswith(prompts.OK) else "rewrite"


async def rewrite(state: State) -> State:
    seen = (state["schema"], state["question"], state["query"], state["result"], state["verdict"])
    answer = await ask(prompts.REWRITER, prompts.to_rewrite(*seen))
    return {"query": query_in(answer), "rewrites": state["rewrites"] + 1}


builder = StateGraph(State)
for node in (read, write, execute, check, rewrite):
    builder.add_node(node.__name__, node)
builder.add_edge(START, "read")
builder.add_edge("read", "write")
builder.add_edge("write", "execute")
builder.add_conditional_edges("execute", after_execute)
builder.add_conditional_edges("check", after_check)
builder.add_edge("rewrite", "execute")
graph = builder.compile()


async def answer(question: str, database: str) -> str:
    """The query that answers a question about a database."""
    state = await graph.ainvoke({"question": question, "database": database})
    return state["query"]
