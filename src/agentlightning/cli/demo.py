"""`agl demo`: train a real agent on this machine from scratch, and measure the gain."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from agentlightning.cli.opening import RUNS
from agentlightning.cli.options import NewRun
from agentlightning.cli.output import Output, Result
from agentlightning.cli.viewing.live import LiveProgress
from agentlightning.models.resolve import TINY


def demo(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            help="A pretrained model: smollm2-135m, or any other as for agl train. tiny: one made on the spot."
        ),
    ] = TINY,
    seed: Annotated[int, typer.Option(help="Seed of the problems, the starting policy and the sampling.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of reinforcement learning.")] = None,
    run: NewRun = None,
) -> Result:
    """Train an agent by reinforcement learning on this machine: two cores, no GPU.

    The model is made on the spot, without a download, and learns to call a calculator. A pretrained model learns to
    read customers' messages.

    \b
    Examples:
      agl demo
      agl demo --model smollm2-135m --run runs/messages
    """
    from agentlightning.cli.formatting.training_report import report_of
    from agentlightning.demo import job, messages
    from agentlightning.trainer import Trainer

    output: Output = ctx.obj
    directory = output.run_dir = run or RUNS / time.strftime("demo-%Y%m%d-%H%M%S")
    if model == TINY:
        demonstrations = job.write_demonstrations(directory / "demonstrations.jsonl", seed)
        configuration, tasks = job.settings(demonstrations, seed, steps), job.tasks(seed)
    else:
        configuration, tasks = messages.settings(model, seed, steps), messages.tasks(seed)
    trainer = Trainer(configuration, run_dir=directory, progress=LiveProgress(output.console))
    return report_of(trainer.fit(**tasks))
