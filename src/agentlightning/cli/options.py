"""Types of the command line options that several verbs have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import typer

Agent = Annotated[str | None, typer.Option(help="module:name, path/file.py:name, or a command line in any language.")]
Reward = Annotated[
    str | None, typer.Option(help="module:name or path/file.py:name of (task, output) -> number, or reasoning_gym.")
]
Data = Annotated[
    str | None, typer.Option("--data", help="Tasks: a JSONL, JSON, CSV or Parquet file, or an environment.")
]
Environment = Annotated[
    str | None,
    typer.Option("--env", help="KIND:NAME: an environment with its tasks, agent and reward.", show_default=False),
]
MODEL_HELP: Final = "A directory, a .gguf file, a short name such as smollm2-135m, a hub name, or `tiny`."
Model = Annotated[str | None, typer.Option(help=MODEL_HELP)]
Models = Annotated[
    list[str] | None,
    typer.Option("--model", help="[NAME=]MODEL (a directory, .gguf file, short or hub name, or tiny); repeatable."),
]
Routes = Annotated[
    Path | None,
    typer.Option(
        help="A TOML or JSON file that maps calls to models and providers, and sets budgets.", show_default=False
    ),
]
Store = Annotated[
    str | None,
    typer.Option(
        help="A SQLite file, or postgresql://... (default: $AGL_STORE, else .agentlightning/store.db)",
        show_default=False,
    ),
]
Run = Annotated[
    Path | None,
    typer.Argument(metavar="RUN", help="The directory of a run (default: the newest below runs).", show_default=False),
]
RunStore = Annotated[
    Path | None,
    typer.Option(
        "--run",
        help="The directory of a run, whose store is read (default: the newest below runs, where there is no other"
        " store).",
        show_default=False,
    ),
]
GivenStore = Annotated[
    str | None, typer.Option("--store", help="The store of the run, where it was given one.", show_default=False)
]
NewRun = Annotated[
    Path | None,
    typer.Option("--run", help="The directory of the new run (default: runs/<time>).", show_default=False),
]
RewardWeights = Annotated[
    str | None,
    typer.Option(
        help="Weights of the named dimensions of a reward: '{\"correctness\": 1.0}' (default: those of the run).",
        show_default=False,
    ),
]
Token = Annotated[
    str | None, typer.Option(envvar="AGL_TOKEN", help="The access token of the server.", show_default=False)
]
LogFormat = Annotated[Literal["text", "json"], typer.Option(help="Format of the log on stderr.")]
