"""A program: choose between two prompt templates with an algorithm that trains no weights.

It runs as if no package of the `train` extra were installed. A coroutine stands in for the runner and its agent, which
answers with its prompt. Usage: prompt_selection.py RUN_DIR
"""

import asyncio
import contextlib
import json
import sys
from pathlib import Path

import agentlightning as agl

for name in ("torch", "transformers", "tokenizers", "safetensors", "numpy", "matplotlib"):
    sys.modules[name] = None  # type: ignore[assignment]

TASKS = [{"word": word} for word in ("red", "green", "blue", "white", "black", "pink")]
PROMPTS = ("Say {word}.", "Please say {word}!")


class PromptSelection(agl.Algorithm):
    """Tries a template at each step, and keeps the better one."""

    learns_weights = False
    total_steps = len(PROMPTS)

    def __init__(self) -> None:
        self.seen = []

    async def run(self, training: agl.Training) -> None:
        assert training.learner is None
        best = (await training.evaluate()).mean
        while training.step < self.total_steps:
            before = training.resources["prompt"]
            await training.publish({"prompt": agl.PromptTemplate(template=PROMPTS[training.step])})
            collected = await training.collect(tasks=2, group_size=1, temperature=1.0)
            rewards = [each.reward for each in collected.trajectories]
            self.seen.append(rewards)
            mean = sum(rewards) / len(rewards)
            if mean < best:
                await training.publish({"prompt": before})
            best = max(best, mean)
            await training.finish_step(collected, {"reward": mean})


async def run_agents(store: agl.LightningStore) -> None:
    while True:
        rollout = await store.dequeue_rollout(timeout=5)
        if rollout is None:
            continue
        resources = (await store.get_resources_by_id(rollout.resources_id)).resources
        assert list(resources) == ["prompt"], "no policy, no model"
        answer = resources["prompt"].format(**rollout.input)
        attributes = {"gen_ai.evaluation.score.value": float(answer.startswith("Please"))}
        ids = rollout.rollout_id, rollout.attempt.attempt_id
        await store.add_span(agl.Span(*ids, "gen_ai.evaluation.result", 0.0, span_id="1" * 16, attributes=attributes))
        await store.update_attempt(*ids, status="succeeded")


async def main(run_dir: Path) -> None:
    store, algorithm = agl.InMemoryLightningStore(), PromptSelection()
    config = agl.TrainConfig(
        evaluation=agl.config.EvaluationConfig(every=1, modes=("greedy",)), runner=agl.config.RunnerConfig(hosts=0)
    )
    prompt = agl.PromptTemplate(template="{word}?")
    trainer = agl.Trainer(
        config, algorithm=algorithm, store=store, run_dir=run_dir, initial_resources={"prompt": prompt}
    )
    agents = asyncio.create_task(run_agents(store))
    result = await trainer.fit_async(train_dataset=TASKS[:2], val_dataset=TASKS[2:4], held_out_dataset=TASKS[4:])
    resumed = agl.Trainer.resume(run_dir, algorithm=PromptSelection(), store=store)
    again = await resumed.fit_async()
    agents.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await agents
    await store.close()
    gain = result.held_out["greedy"]
    prompts = json.loads((result.checkpoint / "resources.json").read_text())
    report = {"seen": algorithm.seen, "gain": [gain.before, gain.after], "prompts": prompts}
    start = (run_dir / "start").exists()
    sys.stdout.write(json.dumps({**report, "again": again.steps, "start": start}))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
