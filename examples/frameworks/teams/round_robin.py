"""A researcher, a writer and an editor who take turns in an AutoGen team."""

import asyncio
import json
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient

ROLES = {
    "researcher": "You are the researcher. Name a fact.",
    "writer": "You are the writer. Write a sentence on it.",
    "editor": "You are the editor. Shorten it.",
}


async def main() -> None:
    client = OpenAIChatCompletionClient(model="gpt-4o-mini", max_tokens=12)
    agents = [AssistantAgent(name, model_client=client, system_message=system) for name, system in ROLES.items()]
    team = RoundRobinGroupChat(agents, termination_condition=MaxMessageTermination(1 + len(agents)))
    result = await team.run(task=json.load(sys.stdin)["topic"])
    print(result.messages[-1].content)
    await client.close()


asyncio.run(main())
