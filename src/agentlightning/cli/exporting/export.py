"""`agl export`: the weights or the rollouts of a run, for other programs."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from agentlightning.cli.opening import run_or_newest, weights_of
from agentlightning.cli.options import Json, RewardWeights, Run
from agentlightning.cli.output import Output, agl, errors_reported
from agentlightning.models import Precision
from agentlightning.util.printable import printable


class Form(StrEnum):
    """What is written."""

    HF = "hf"
    GGUF_READY = "gguf-ready"
    GGUF = "gguf"
    OPENAI = "openai-jsonl"
    TRL = "trl-jsonl"
    DPO = "dpo-jsonl"


def export(
    run: Run = None,
    to: Annotated[
        Form, typer.Option("--to", help="hf, gguf-ready and gguf: weights; the others: rollouts as lines.")
    ] = Form.HF,
    out: Annotated[Path | None, typer.Option(help="File or directory (default: RUN/export/FORM).")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only rollouts with at least this reward.")] = None,
    target_agent: Annotated[str | None, typer.Option(help="Only calls of agents whose name matches.")] = None,
    store: Annotated[str | None, typer.Option(help="The store of the run, where it was given one.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file of --out, if there is one.")] = False,
    reward_weights: RewardWeights = None,
    precision: Annotated[Precision | None, typer.Option(help="Of the matrices of a GGUF file (default: f16).")] = None,
    as_json: Json = False,
) -> None:
    """Write the weights of a run for transformers, llama.cpp or Ollama, or its training rollouts as a data set.

    \b
    Examples:
      agl export runs/first --to gguf --out my-model.gguf
      agl export runs/first --to trl-jsonl --min-reward 0.5
    """
    output = Output(as_json)
    with errors_reported(output):
        run = run_or_newest(run)
        keep = out is not None and not overwrite
        path = out or run / "export" / to.value
        found = _export(run, to, path, min_reward, target_agent, store, reward_weights, precision, keep)
        learning = {Form.OPENAI: "sft", Form.DPO: "dpo", Form.TRL: "sft"}.get(to)
        after = agl(learning, model="tiny", data=found["path"]) if learning else agl("serve", model=found["path"])
        lines = "\n".join(printable(f"{key}: {value}") for key, value in found.items())
        output.finish(found, lambda console: console.print(lines, markup=False, highlight=False), after)


def _export(
    run: Path,
    to: Form,
    out: Path,
    min_reward: float | None,
    agent: str | None,
    store: str | None,
    weights: str | None,
    precision: Precision | None,
    keep: bool,
) -> dict[str, Any]:
    from agentlightning.errors import ConfigError
    from agentlightning.training.export import Selection, export_dataset, export_weights

    if precision is not None and to is not Form.GGUF:
        raise ConfigError(f"--precision is that of a GGUF file, and --to {to.value} writes none; leave it out")
    if to in (Form.HF, Form.GGUF_READY, Form.GGUF):
        given = {"--min-reward": min_reward, "--target-agent": agent, "--store": store, "--reward-weights": weights}
        unused = [name for name, value in given.items() if value is not None]
        if unused:
            raise ConfigError(
                f"{', '.join(unused)} select rollouts, and --to {to.value} writes weights; leave them out"
            )
        if to is Form.GGUF:
            out = out if out.suffix == ".gguf" else out.with_name(f"{out.name}.gguf")
            _check_new(out, keep)
        written = export_weights(run, to.value, out, precision or "f16")
        return {"path": str(written.path), "files": list(written.files), "merged": written.merged}
    path = out if out.suffix == ".jsonl" else out.with_name(f"{out.name}.jsonl")
    _check_new(path, keep)
    selection = Selection(min_reward, agent, weights_of(weights, run))
    found = asyncio.run(export_dataset(run, to.value, path, selection, store))
    return {
        "path": str(found.path),
        "records": found.records,
        "rollouts": found.rollouts,
        "skipped": dict(found.skipped),
    }


def _check_new(path: Path, keep: bool) -> None:
    from agentlightning.errors import ConfigError

    if keep and path.exists():
        raise ConfigError(f"{path} exists; give another --out, or --overwrite")
