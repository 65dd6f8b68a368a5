"""Our arm of prompt_search.py: `agl.APO` in a `Trainer`, with an agent that calls the simulated world."""

import contextlib
import tempfile
from pathlib import Path

from prompt_world_client import Reached, World, job, worlds
from rich.console import Console

import agentlightning as agl
from agentlightning.util.progress import Progress


def search(world: World, given: dict, seed: int) -> None:
    url = world.url

    def agent(task, resources):
        import json
        import urllib.request

        message = {"role": "user", "content": resources["prompt"].format(**task)}
        body = json.dumps({"model": "follower", "messages": [message]}).encode()
        with urllib.request.urlopen(f"{url}/chat/completions", body) as response:
            return json.load(response)["choices"][0]["message"]["content"]

    def reward(task, output):
        from prompt_world_client import grade

        return grade(output)

    def consider(texts, calls: int) -> None:
        if world.consider(texts["prompt"], calls):
            raise Reached

    algorithm = agl.APO(
        critic={"model": "critic", "base_url": world.url},
        editor={"model": "editor", "base_url": world.url},
        budget={"calls": given["budget"]},
        patience=1000,
        seed=seed,
    )
    algorithm.on_favourite = consider
    with tempfile.TemporaryDirectory() as folder:
        trainer = agl.Trainer(
            algorithm=algorithm,
            initial_resources={"prompt": agl.PromptTemplate(template=given["template"])},
            reward=reward,
            run_dir=Path(folder) / "run",
            progress=Progress(console=Console(quiet=True)),
        )
        with contextlib.suppress(Reached):
            result = trainer.fit(agent, given["train"], given["validation"], held_out_dataset=given["held_out"])
            world.consider(result.best_prompt.template)


if __name__ == "__main__":
    given = job()
    for seed, world in enumerate(worlds(given)):
        search(world, given, seed)
        world.report()
