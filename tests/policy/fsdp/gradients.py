"""The gradients of one process and of several over random trees, printed as a line of JSON for each case:

python -m tests.policy.fsdp.gradients RANKS
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tests.support.models import tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from agentlightning.credit import training_samples
from agentlightning.policy.base import UpdateOptions
from agentlightning.policy.config import LocalPolicyConfig, Lora
from agentlightning.policy.fsdp.policy import RankLearner, Ranks, ShardedUpdater
from agentlightning.policy.losses import COUNT, FACTOR, LOSSES, MARGIN, token_losses
from agentlightning.policy.mismatch import corrections
from agentlightning.policy.update.updater import LocalLearner, corrected, for_losses, normalized
from agentlightning.trajectory import TrainingSample, Trajectory, Transition

COLUMNS = ("ref_logprobs", "teacher_logprobs", "proximal_logprobs", "returns", "values", MARGIN, FACTOR, COUNT)
AGGREGATES: tuple[Any, ...] = ("rollout", "token", {"type": "constant", "length": 50})


@dataclass(frozen=True)
class Case:
    seed: int
    loss: Any
    architecture: Any = "llama"
    sharing: Any = "auto"
    aggregate: Any = "rollout"
    settings: dict[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        extra = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.architecture} {self.loss} {self.sharing} {self.aggregate} seed {self.seed} {extra}".strip()


def cases() -> Iterator[Case]:
    wide = {"clip_low": 0.9, "clip_high": 9.0}
    losses: list[Any] = [
        {"type": name, **(wide if name in ("gspo", "turn") else {})} for name in sorted(set(LOSSES) - {"value"})
    ]
    modes = ("auto", "merged", "shared")
    for number, loss in enumerate([*losses, ["ppo", "kl", "entropy"]]):
        yield Case(number, loss, sharing=modes[number % 3], aggregate=AGGREGATES[number % len(AGGREGATES)])
        yield Case(100 + number, loss, sharing=modes[(number + 1) % 3])
    lora = {"lora": Lora(r=4)}
    for number, loss in enumerate(("ppo", losses[0], "nll", {"type": "gspo", **wide})):
        yield Case(200 + number, loss, sharing=modes[number % 3], settings=lora)
    for settings in ({"value_head": "linear"}, {"value_head": "mlp", "lora": Lora(r=2)}):
        yield Case(300, ["ppo", "value"], settings=settings)
    yield Case(400, "ppo", sharing="shared", settings={"gradient_checkpointing": True})
    for architecture in ("qwen3", "gpt2", "mistral"):
        yield Case(500, "ppo", architecture=architecture)


def rollout(name: str, draw: random.Random, prompt: Sequence[int], turns: int, reward: float) -> Trajectory:
    history, calls = list(prompt), list[Transition]()
    for turn in range(turns):
        sampled = tuple(draw.randrange(300) for _ in range(draw.randint(1, 6)))
        logprobs = tuple(-3.0 - (token % 7) / 3 for token in sampled)
        calls.append(Transition(name, "at", f"{name}-{turn}", turn, tuple(history), sampled, logprobs))
        history += [*sampled, *(draw.randrange(300) for _ in range(draw.randint(1, 3)))]
    return Trajectory(name, "at", tuple(calls), reward)


def batch(case: Case) -> list[TrainingSample]:
    """Two to five trees."""
    draw = random.Random(case.seed)
    groups: list[list[Trajectory]] = []
    for group in range(draw.randint(2, 5)):
        prompt = [draw.randrange(300) for _ in range(draw.randint(2, 6))]
        count = draw.randint(2, 4)
        groups.append([rollout(f"{group}.{i}", draw, prompt, draw.randint(1, 3), float(i)) for i in range(count)])

    def column(sample: TrainingSample, name: str) -> list[Any]:
        offset = sum(map(ord, name)) % 11
        nodes = [node.token_ids if node.sampled else () for node in sample.tree.nodes]
        return [np.array([-3.0 - ((token + offset) % 11) / 5 for token in ids], np.float32) for ids in nodes]

    made = training_samples(groups, aggregate=case.aggregate)[0]
    return [replace(each, columns={**each.columns, **{name: column(each, name) for name in COLUMNS}}) for each in made]


class Divided(RankLearner):
    def __init__(self, *given: Any, ranks: Ranks) -> None:
        self._ranks = ranks
        LocalLearner.__init__(self, *given, ShardedUpdater)


def learner(case: Case, make: Any = LocalLearner) -> LocalLearner:
    config = LocalPolicyConfig.model_validate({"model": "none", **case.settings})
    return make(tiny_model(case.architecture), None, config)


def gradient(trained: LocalLearner, case: Case) -> torch.Tensor:
    """Of all trained weights, the critic's included."""
    losses = token_losses(case.loss)
    prepared, _ = corrected(for_losses(batch(case), losses), corrections("truncate"))
    (updater,) = trained.updaters.values()
    updater.zero_grad()
    budget = 20 + case.seed % 60
    with trained.use(trained.own):
        table = normalized(prepared, losses)
        updater._gradient(table, UpdateOptions(loss=losses, token_budget=budget, sharing=case.sharing))
    optimizers = [each for each in (updater.optimizer, updater.value_optimizer) if each is not None]
    found = [p.grad for each in optimizers for p in each.masters if p.grad is not None]
    return torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in found])


def run(rank: int, count: int, store: Path) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), count), rank=rank, world_size=count, timeout=timedelta(seconds=300)
    )
    ranks = Ranks(init_device_mesh("cpu", (count,)), dist.new_group(backend="gloo"), torch.device("cpu"))
    made: dict[str, tuple[LocalLearner, LocalLearner]] = {}
    for case in cases():
        key = f"{case.architecture} {case.settings}"
        if key not in made:
            made[key] = learner(case, partial(Divided, ranks=ranks)), learner(case)
        several, one = made[key]
        found, expected = gradient(several, case), gradient(one, case)
        apart = float((found - expected).norm() / expected.norm().clamp(min=1e-6))
        if rank == 0:
            print(json.dumps({"case": str(case), "apart": apart, "norm": float(expected.norm())}), flush=True)  # noqa: T201


def main() -> None:
    count = int(sys.argv[1])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(count):
            if not (pid := os.fork()):  # After the imports, which take longer than the rest.
                status = 1
                try:
                    run(rank, count, Path(folder) / "store")
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    os._exit(status)
            pids.append(pid)
        failed = [pid for pid in pids if os.waitpid(pid, 0)[1]]
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
