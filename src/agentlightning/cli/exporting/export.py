"""`agl export`: the weights or the rollouts of a run, for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import typer
from msgspec.structs import asdict

from agentlightning.cli.opening import run_or_newest, weights_of
from agentlightning.cli.options import GivenStore, RewardWeights, Run
from agentlightning.cli.output import Result, agl
from agentlightning.errors import ConfigError
from agentlightning.models import Precision
from agentlightning.util.printable import printable

Form = Literal["hf", "gguf-ready", "gguf", "openai-jsonl", "trl-jsonl", "dpo-jsonl"]
"""What is written."""
SUFFIXES: Final = {"hf": "", "gguf-ready": "", "gguf": ".gguf"}
"""What the names of weights end in; of rollouts, it is `.jsonl`."""


async def export(
    run: Run = None,
    to: Annotated[
        Form, typer.Option("--to", help="hf, gguf-ready and gguf: weights; the others: rollouts as lines.")
    ] = "hf",
    out: Annotated[Path | None, typer.Option(help="File or directory (default: RUN/export/FORM).")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only rollouts with at least this reward.")] = None,
    target_agent: Annotated[str | None, typer.Option(help="Only calls of agents whose name matches.")] = None,
    store: GivenStore = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file of --out, if there is one.")] = False,
    reward_weights: RewardWeights = None,
    precision: Annotated[Precision | None, typer.Option(help="Of the matrices of a GGUF file (default: f16).")] = None,
) -> Result:
    """Write the weights of a run for transformers, llama.cpp or Ollama, or its training rollouts as a data set.

    \b
    Examples:
      agl export runs/first --to gguf --out my-model.gguf
      agl export runs/first --to trl-jsonl --min-reward 0.5
    """
    from agentlightning.training.export import Selection, export_dataset, export_weights

    run = run_or_newest(run)
    if precision is not None and to != "gguf":
        raise ConfigError(f"--precision is that of a GGUF file, and --to {to} writes none; leave it out")
    path, suffix = out or run / "export" / to, SUFFIXES.get(to, ".jsonl")
    if suffix:
        path = path if path.suffix == suffix else path.with_name(path.name + suffix)
        if out is not None and not overwrite and path.exists():
            raise ConfigError(f"{path} exists; give another --out, or --overwrite")
    if to == "hf" or to == "gguf-ready" or to == "gguf":
        only = {
            "--min-reward": min_reward,
            "--target-agent": target_agent,
            "--store": store,
            "--reward-weights": reward_weights,
        }
        if unused := [name for name, value in only.items() if value is not None]:
            raise ConfigError(f"{', '.join(unused)} select rollouts, and --to {to} writes weights; leave them out")
        weights = export_weights(run, to, path, precision or "f16")
        found = {"path": str(path), "files": list(weights.files), "merged": weights.merged}
        after = agl("serve", "--allow-unattributed", model=path)
    else:
        selection = Selection(min_reward, target_agent, weights_of(reward_weights, run))
        rows = await export_dataset(run, to, path, selection, store)
        found = asdict(rows) | {"path": str(path)}
        learning = {"openai-jsonl": "sft", "dpo-jsonl": "dpo"}.get(to)
        after = agl(learning, model="tiny", data=path) if learning else agl("report", run)
    lines = "\n".join(printable(f"{key}: {value}") for key, value in found.items())
    return Result(found, lambda console: console.print(lines), [after])
