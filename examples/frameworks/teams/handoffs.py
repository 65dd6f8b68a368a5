"""A researcher who hands over to a writer, who hands over to an editor, with the OpenAI Agents SDK."""

import json
import sys

from agents import Agent, ModelSettings, Runner, set_default_openai_api

set_default_openai_api("chat_completions")  # over responses, an answer cut off at max_tokens is an error to this SDK
common = {"model": "gpt-4o-mini", "model_settings": ModelSettings(max_tokens=200)}

editor = Agent(name="editor", instructions="You are the editor. Shorten the text.", **common)
writer = Agent(name="writer", instructions="You are the writer. Write a text, hand over.", handoffs=[editor], **common)
researcher = Agent(
    name="researcher", instructions="You are the researcher. Name a fact, hand over.", handoffs=[writer], **common
)
print(Runner.run_sync(researcher, json.load(sys.stdin)["topic"], max_turns=6).final_output)
