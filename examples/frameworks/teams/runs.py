"""A researcher, a writer and an editor, one after the other, with the OpenAI Agents SDK."""

import json
import sys

from agents import Agent, ModelSettings, Runner, set_default_openai_api

ROLES = {
    "researcher": "You are the researcher. Name a fact.",
    "writer": "You are the writer. Write a sentence on it.",
    "editor": "You are the editor. Shorten it.",
}
set_default_openai_api("chat_completions")  # over responses, an answer cut off at max_tokens is an error to this SDK

said = json.load(sys.stdin)["topic"]
for name, instructions in ROLES.items():
    settings = ModelSettings(max_tokens=12)
    agent = Agent(name=name, instructions=instructions, model="gpt-4o-mini", model_settings=settings)
    said = Runner.run_sync(agent, said or "?").final_output
print(said)
