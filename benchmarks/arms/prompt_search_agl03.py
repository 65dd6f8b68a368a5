"""Agent Lightning 0.3's arm of prompt_search.py: its APO, whose rollouts are calls of the simulated world.

Replaced are the evaluation of a prompt (a call instead of a rollout through store and runner) and the rendering of its
requests (by a function instead of POML); gradients, edits, beam and selection are its own. Runs in an environment with
agentlightning==0.3.0.
"""

import asyncio
import contextlib
import json
import logging
import random
import sys
from types import SimpleNamespace

from prompt_world_client import Reached, World, job, worlds


def render(template, context, format):
    """What a template shows, without the Node process that POML starts for each."""
    text = "\n\n".join(each if isinstance(each, str) else json.dumps(each) for each in context.values())
    return {"messages": [{"role": "user", "content": text}]}


sys.modules["poml"] = SimpleNamespace(poml=render)

from agentlightning.algorithm.apo import APO  # noqa: E402
from agentlightning.types import PromptTemplate  # noqa: E402
from openai import AsyncOpenAI  # noqa: E402

from agentlightning.store.memory import InMemoryLightningStore  # noqa: E402

logging.disable(logging.CRITICAL)


class Search(APO):
    world: World

    async def evaluate_prompt_on_batch(self, prompt, resource_name, dataset, mode, *, prefix=None):
        best = self._history_best_prompt
        if best is not None and (self.world.consider(best.template) or self.world.spent()):
            raise Reached
        template = prompt.prompt_template.template
        results = await asyncio.gather(*(asyncio.to_thread(self.world.answer, template, task) for task in dataset))
        rollouts = [
            {
                "status": "succeeded",
                "final_reward": reward,
                "spans": [],
                "messages": [{"messages": [{"role": "assistant", "content": answer}]}],
            }
            for answer, reward in results
        ]
        return rollouts, sum(reward for _, reward in results) / len(results)


async def search(world: World, given: dict, seed: int) -> None:
    random.seed(seed)
    async with AsyncOpenAI(base_url=world.url, api_key="none") as client:
        made = Search(client, gradient_model="critic", apply_edit_model="rewriter", beam_rounds=1000, **given["agl03"])
        made.world = world
        made.set_store(InMemoryLightningStore())
        made.set_initial_resources({"prompt": PromptTemplate(template=given["template"], engine="f-string")})
        with contextlib.suppress(Reached):
            await made.run(train_dataset=given["train"], val_dataset=given["validation"][: given["agl03_validation"]])


if __name__ == "__main__":
    given = job()
    for seed, world in enumerate(worlds(given)):
        asyncio.run(search(world, given, seed))
        world.report()
