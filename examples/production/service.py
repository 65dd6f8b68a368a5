"""The web service: answers customers, records each session, and takes feedback that arrives later.

    AGL_STORE=http://127.0.0.1:4747 uvicorn service:app --port 8000

AGL_STORE is the server of `agl serve`, which holds the store and answers the model calls, so that these are recorded
token by token in the session that makes them. AGL_TOKEN is its access token, if it has one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI, HTTPException
from openai import APIError
from pydantic import BaseModel, Field

import agentlightning as agl
from support import route

SERVER = os.environ.get("AGL_STORE", "http://127.0.0.1:4747")
TOKEN = os.environ.get("AGL_TOKEN", "")


class Question(BaseModel):
    text: str = Field(min_length=1, max_length=2000)


class Answer(BaseModel):
    department: str
    session: str
    """For feedback."""


class Feedback(BaseModel):
    session: str = Field(pattern=r"^ro-[\w-]+$")
    score: float = Field(ge=0, le=1)
    user: str = "customer"


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    os.environ.setdefault("OPENAI_BASE_URL", f"{SERVER}/v1")
    os.environ.setdefault("OPENAI_API_KEY", TOKEN or "none")
    headers = {"authorization": f"Bearer {TOKEN}"} if TOKEN else {}
    async with httpx.AsyncClient(base_url=SERVER, headers=headers, trust_env=False) as client:
        app.state.server = client
        yield
    await asyncio.to_thread(agl.flush_recording)


app = FastAPI(lifespan=lifespan)


@app.post("/ask")
async def ask(question: Question) -> Answer:
    async with agl.track_session({"question": question.text}, store=SERVER, name="support") as session:
        with agl.track_agent("support"):
            try:
                department = await route(question.text)
            except APIError as error:  # the session has failed, and is not learned from
                raise HTTPException(503, f"the model does not answer: {error}", {"retry-after": "1"}) from error
    return Answer(department=department, session=session.rollout_id)


@app.post("/feedback", status_code=204)
async def feedback(given: Feedback) -> None:
    body = {"score": given.score, "source": given.user}
    reply = await app.state.server.post(f"/v1/agl/rollouts/{given.session}/feedback", json=body)
    if reply.status_code == 404:
        raise HTTPException(404, f"there is no session {given.session}")
    if reply.is_error:
        raise HTTPException(502, f"the store refused the feedback: {reply.text[:200]}")
