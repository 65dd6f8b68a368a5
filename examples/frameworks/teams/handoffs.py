"""A triage agent that hands each question over to one of two specialists, with the OpenAI Agents SDK."""

import json
import sys

from agents import Agent, ModelSettings, Runner, set_default_openai_api

set_default_openai_api("chat_completions")  # over responses, an answer cut off at max_tokens is an error to this SDK
common = {"model": "gpt-4o-mini", "model_settings": ModelSettings(max_tokens=100)}

sums = Agent(name="sums", instructions="You are the sums agent. Add the numbers.", **common)
words = Agent(name="words", instructions="You are the words agent. Look at the letters.", **common)
triage = Agent(
    name="triage", instructions="You are the triage agent. Hand the question over.", handoffs=[sums, words], **common
)
result = Runner.run_sync(triage, json.load(sys.stdin)["question"], max_turns=4)
print(f"{result.last_agent.name}: {result.final_output}")
