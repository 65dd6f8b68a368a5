"""Three levels of agents that move a robot through a warehouse, trained together and each alone.

    python warehouse.py [--directory DIRECTORY]

    director   sees the colour of the parcel, says on which side it is; once for two moves
    foreman    hears the side, says which way to go; once for each move
    driver     hears the way, presses a key

Each is an agent with an adapter of its own over one tiny model, and the environment of the one above it (`agl.Level`).
The rollout's reward is 1 if the robot reaches the parcel; the foreman and the driver have rewards of their own: whether
the robot went where the level above wanted. Before training each says the right word half of the time. One that learns
alone still depends on two that err half of the time; together they find the parcels.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import httpx

import agentlightning as agl
from agentlightning.evaluation.intervals import Gain
from agentlightning.hierarchy import LevelStep
from agentlightning.models.tiny import make_tiny

SEED = 0
SIDES = {"red": "north", "blue": "east", "green": "south", "black": "west"}
"""Where parcels of a colour are."""
WAYS = {"north": "up", "east": "right", "south": "down", "west": "left"}
KEYS = {"up": "w", "right": "d", "down": "s", "left": "a"}
MOVES = {"w": (0, 1), "d": (1, 0), "s": (0, -1), "a": (-1, 0)}
LEVELS = {"director": SIDES, "foreman": WAYS, "driver": KEYS}
"""What each level is to say to what it sees or hears."""
RUNS = {"together": tuple(LEVELS), **{f"{level} alone": (level,) for level in LEVELS}}


def direction(side: str) -> tuple[int, int]:
    return MOVES[KEYS[WAYS[side]]]


class Warehouse:
    """The robot is in the middle, the parcel two cells away on a side. It moves twice."""

    def __init__(self, parcel: str) -> None:
        self.parcel, self.place, self.moves = parcel, (0, 0), 0

    def reset(self) -> tuple[tuple[int, int], dict[str, Any]]:
        return self.place, {}

    def step(self, key: str) -> tuple[tuple[int, int], float, bool, bool, dict[str, Any]]:
        x, y = MOVES.get(key, (0, 0))
        self.place, self.moves = (self.place[0] + x, self.place[1] + y), self.moves + 1
        x, y = direction(SIDES[self.parcel])
        return self.place, float(self.place == (2 * x, 2 * y)), self.moves == 2, False, {}


def went(step: LevelStep, side: str | None) -> float:
    """1 if the robot went to that side."""
    if side not in WAYS:
        return 0.0
    (x0, y0), (x1, y1), (x, y) = step.observations[0], step.observations[-1], direction(side)
    return float((x1 - x0) * x + (y1 - y0) * y > 0)


def prompt(level: str, heard: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{level} {heard}"}]


@cache
def http_client() -> httpx.AsyncClient:
    """One for all rollouts of a process."""
    return httpx.AsyncClient(trust_env=False, timeout=60)


async def agent(parcel: str, llm: agl.LLM) -> float:
    """The three levels on one task; 1 if the robot reaches the parcel."""

    async def say(level: str, heard: str) -> str:
        body = {"model": llm.model, "messages": prompt(level, heard), "max_tokens": 4}
        reply = await http_client().post(f"{llm.base_url}/chat/completions", json=body)
        reply.raise_for_status()
        return str(reply.json()["choices"][0]["message"]["content"]).strip()

    sides = {way: side for side, way in WAYS.items()}
    driver = agl.Level(
        "driver",
        lambda place, way: say("driver", way),
        Warehouse(parcel),
        credit=lambda step: went(step, sides.get(step.goal)),
    )
    foreman = agl.Level(
        "foreman", lambda place, side: say("foreman", side), driver, steps=2, credit=lambda step: went(step, step.goal)
    )
    director = agl.Level("director", lambda place, _: say("director", parcel), foreman)
    return await director.run()


def make_speaker(directory: Path) -> Path:
    """A model that says the right word half of the time, and each other word of its level a sixth of it."""
    conversations = [
        [*prompt(level, heard), {"role": "assistant", "content": word}]
        for level, answers in LEVELS.items()
        for heard, right in answers.items()
        for word in (*answers.values(), right, right)
    ]
    agl.SFTAlgorithm(
        str(make_tiny(directory / "new", conversations, seed=SEED)),
        conversations,
        output=directory / "model",
        steps=200,
        batch_size=len(conversations),
        optimizer=agl.config.OptimizerConfig(lr=3e-3),
        seed=SEED,
    ).train()
    return directory / "model"


def train(name: str, model: Path, directory: Path, steps: int) -> Gain:
    """The share of parcels that are found before and after training the levels of a run."""
    learning = RUNS[name]
    trainer = agl.Trainer(
        agl.TrainConfig(
            policy=agl.config.PolicyConfig(model=str(model), device="cpu"),
            evaluation=agl.config.EvaluationConfig(modes=("sampled",), every=0),
        ),
        algorithm=agl.LightningRL(
            steps=steps,
            tasks_per_step=4,
            group_size=16,
            agents={level: agl.Lora(r=8) if level in learning else "frozen" for level in LEVELS},
            agent_rewards="own",
            optimizer={"lr": 3e-3},
        ),
        run_dir=directory / name.replace(" ", "-"),
        seed=SEED,
    )
    tasks = [{"parcel": colour} for colour in SIDES] * 16
    return trainer.fit(f"{Path(__file__)}:agent", tasks, tasks[:4], held_out_dataset=tasks).held_out["sampled"]


def main(directory: Path, steps: int = 60) -> dict[str, float]:
    """The share of parcels found after each run."""
    speaker = make_speaker(directory)
    found = {name: train(name, speaker, directory, steps) for name in RUNS}
    for name, gain in found.items():
        low, high = gain.interval
        print(f"{name:14} {gain.before:.0%} -> {gain.after:.0%} of the parcels, gain {low:+.2f} to {high:+.2f}")
    return {name: gain.after for name, gain in found.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="of the model and the runs; default: one that is removed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        main(options.directory or Path(temporary))
