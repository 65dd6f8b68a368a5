"""Prompts and weights together: the demo's calculator with a tiny model that follows some instructions of its prompt.

    python benchmarks/studies/prompts_and_weights.py [--seeds 3] [--steps 10] [--budget 120] [--folder DIR]

The starting policy has seen demonstrations under prompts with up to three of six instructions. One of these makes it
use the calculator more often, one a little; the others change nothing, and without any it mostly answers with the first
number that it reads. From the same policy and the same prompt, without instructions, there are three arms: a prompt
search (`agl.APO`), reinforcement learning (`agl.LightningRL`), and the one after the other (`agl.Sequential`). A critic
behind HTTP names an instruction for what failed: the useful one in one case of four, else any. Printed is the held-out
reward before and after, sampled at temperature 1, with the 95% interval of the paired gain, of each arm and each stage.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any, Final

import agentlightning as agl
from agentlightning.demo import job
from agentlightning.demo.agent import TOOLS, calculator, client
from agentlightning.demo.job import FRESH
from agentlightning.demo.problems import CLEAN, NUMBER, make_tasks, score
from agentlightning.evaluation.intervals import Gain
from agentlightning.models.tiny import make_tiny
from agentlightning.testing import ScriptedServer

RECIPE: Any = job.settings("calculator.toml")
SYSTEM: Final = "Reply ### ANSWER: number ###"
START: Final = "{question}\nHow many?"
"""The prompt that every arm begins with."""
USEFUL: Final = {"Use the calculator.": 0.75, "Write one expression.": 0.15}
"""What an instruction adds to the share of demonstrations that use the calculator."""
WITHOUT: Final = 0.05
"""That share without one."""
INSTRUCTIONS: Final = (*USEFUL, "Be careful.", "Think step by step.", "Be concise.", "Check your work.")
INSIGHT: Final = 0.25
"""How often the critic names the most useful instruction; else it names any."""
ARMS: Final = ("prompts", "weights", "both")


def solve(question: str, base_url: str, prompt: agl.PromptTemplate, model: str = "policy") -> str:
    """The demo's agent, with its instructions from the run's prompt."""
    chat = client().with_options(base_url=base_url).chat.completions
    asked = prompt.format(question=question)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
    for _ in range(4):
        message = chat.create(model=model, messages=messages, tools=TOOLS, max_tokens=256).choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.to_dict())
        for call in message.tool_calls:
            if call.type == "function":
                result = calculator(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


# -- the starting policy -----------------------------------------------------------------------------------------------


def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Conversations under random prompts: the first ones all use the calculator, so that the policy can; of the rest,
    as many as their instructions make."""
    rng, found = random.Random(f"prompts-and-weights/{seed}"), list[dict[str, Any]]()
    for place, task in enumerate(make_tasks("train", count, seed)):
        chosen = rng.sample(INSTRUCTIONS, rng.randint(0, 3))
        share = WITHOUT + sum(USEFUL.get(each, 0.0) for each in chosen)
        calculates = place < CLEAN * count or rng.random() < share
        prompt = "\n".join([START.format(**task), *(f"- {each}" for each in chosen)])
        opening = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
        found.append({"messages": [*opening, *_answer(task, place, calculates)], "tools": TOOLS})
    return found


def _answer(task: dict[str, Any], place: int, calculates: bool) -> list[dict[str, Any]]:
    if not calculates:
        return [{"role": "assistant", "content": f"### ANSWER: {NUMBER.findall(task['question'])[0]} ###"}]
    function = {"name": "calculator", "arguments": json.dumps({"expression": task["expression"]})}
    call = {"id": f"call_{place}", "type": "function", "function": function}
    return [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": str(task["answer"])},
        {"role": "assistant", "content": f"### ANSWER: {task['answer']} ###"},
    ]


def starting_policy(folder: Path, seed: int, steps: int) -> Path:
    """The policy that every arm begins with; made once."""
    start = folder / f"start-{seed}"
    if not start.exists():
        warm_start = RECIPE.warm_start
        records = demonstrations(steps * warm_start.batch_size, seed)
        agl.SFTAlgorithm(
            make_tiny(folder / f"tiny-{seed}", records, seed=seed),
            records,
            output=start,
            steps=steps,
            batch_size=warm_start.batch_size,
            shuffle=False,
            seed=seed,
            optimizer=warm_start.optimizer,
            on_step=lambda step, metrics: (
                print(f"warm start {step}: {metrics['loss']:.3f}") if step % 50 == 0 else None
            ),
        ).train()
    return start


# -- critic and editor -------------------------------------------------------------------------------------------------


class Adviser:
    """A critic that seldom knows what helps, and an editor that adds what the critic names."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"adviser/{seed}")

    def critique(self, text: str) -> str:
        knows = self._random.random() < INSIGHT
        return f"The answers lack this: {INSTRUCTIONS[0] if knows else self._random.choice(INSTRUCTIONS)}"

    def edit(self, text: str) -> str:
        advice = re.findall(r"lack this: (.+)", text)[-1]
        lines = re.findall(r"^\[(\d+)\] (.*)$", text, re.MULTILINE)
        known = any(advice in line for _, line in lines)
        add = {"op": "add", "after": max(int(number) for number, _ in lines), "text": f"- {advice}"}
        return json.dumps({"edits": [] if known else [add]})


# -- the arms ----------------------------------------------------------------------------------------------------------


def algorithm(arm: str, url: str, steps: int, budget: int, seed: int) -> agl.Algorithm[Any]:
    models = {
        part: {"model": part, "base_url": url, "input_price": 1.0, "output_price": 4.0} for part in ("critic", "editor")
    }
    search = agl.APO(**models, budget={"calls": budget}, seed=seed)
    learn = agl.LightningRL(
        steps=steps,
        tasks_per_step=RECIPE.algorithm.tasks_per_step,
        group_size=RECIPE.algorithm.group_size,
        minibatches=RECIPE.algorithm.minibatches,
        aggregate="token",
        optimizer=agl.config.OptimizerConfig(lr=3e-4, schedule="cosine", warmup_steps=min(2, steps - 1), clip_norm=1.0),
    )
    return {"prompts": search, "weights": learn}.get(arm) or agl.Sequential([search, learn])


def run(
    arm: str, start: Path, directory: Path, seed: int, steps: int, budget: int, held_out: int
) -> agl.TrainingResult:
    """One arm. A prompt search alone trains no policy: the gateway serves the starting one."""
    served = {"models": {"policy": str(start)}, "default_model": "policy"} if arm == "prompts" else {}
    config = agl.TrainConfig(
        run={"seed": seed, "keep_checkpoints": 1},
        policy={"model": str(start)},
        gateway=served,
        runner={"concurrency": 128, "timeout_seconds": 300},
        evaluation={"every": 0, "modes": ("sampled",)},
    )
    adviser = Adviser(seed)
    with ScriptedServer({"critic": adviser.critique, "editor": adviser.edit}) as server:
        return agl.Trainer(
            config,
            algorithm=algorithm(arm, server.url, steps, budget, seed),
            reward=score,
            run_dir=directory,
            initial_resources={"prompt": agl.PromptTemplate(template=START)},
        ).fit(
            solve,
            make_tasks("train", RECIPE.algorithm.tasks_per_step * steps, seed + FRESH),
            make_tasks("val", held_out // 2, seed),
            held_out_dataset=make_tasks("test", held_out, seed),
        )


def shown(gain: Gain) -> str:
    low, high = gain.interval
    return f"{gain.before:.3f} -> {gain.after:.3f}, {gain.gain:+.3f} ({low:+.3f} to {high:+.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="steps of reinforcement learning")
    parser.add_argument("--budget", type=int, default=120, help="evaluations of the prompt search")
    parser.add_argument("--held-out", type=int, default=job.HELD_OUT, help="tasks; half as many validate")
    parser.add_argument("--warm-start", type=int, default=RECIPE.warm_start.steps, help="its steps")
    parser.add_argument("--folder", type=Path, help="where runs and starting policies are kept")
    parser.add_argument("--arms", default=",".join(ARMS))
    given = parser.parse_args()
    folder: Path = given.folder or Path(tempfile.mkdtemp())
    for seed in range(given.seeds):
        start = starting_policy(folder, seed, given.warm_start)
        for arm in given.arms.split(","):
            result = run(arm, start, folder / f"{arm}-{seed}", seed, given.steps, given.budget, given.held_out)
            text = result.report(examples=1)
            (result.run_dir / "report.md").write_text(text)
            print(f"seed {seed}, {arm}: {shown(result.held_out['sampled'])}, {result.seconds:.0f} s", flush=True)
            for number, stage in enumerate(result.stages, 1):
                print(f"  stage {number}, {stage.name}: {shown(stage.held_out['sampled'])}, {stage.steps} steps")
            print(f"  prompt: {result.best_prompt.template!r}, money {result.cost.search_money}", flush=True)


if __name__ == "__main__":
    main()
