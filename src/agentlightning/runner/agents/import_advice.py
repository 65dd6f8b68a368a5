"""What to install where an agent could not be imported: a package is missing, or its version lacks what is imported.

Reads the error as Python or Node.js prints it, because a command's own interpreter has raised it. Imports nothing.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final

_MISSING: Final = re.compile(r"^ModuleNotFoundError: No module named '([\w.]+)'", re.MULTILINE)
_LACKING: Final = re.compile(r"^ImportError: cannot import name '(\w+)' from '([\w.]+)'", re.M)
_NODE: Final = re.compile(r"Cannot find (?:package|module) '((?:@[\w.-]+/)?[\w-][\w.-]*)'")

_DISTRIBUTIONS: Final = {
    "agent_framework": "agent-framework-core agent-framework-openai",
    "agents": "openai-agents",
    "autogen_agentchat": "autogen-agentchat",
    "autogen_ext": "'autogen-ext[openai]'",
    "google": "google-adk litellm",
    "llama_index": "llama-index-core llama-index-llms-openai",
    "pydantic_ai": "'pydantic-ai-slim[openai]'",
    "strands": "'strands-agents[openai]'",
}
"""What pip calls a module, where that is not the module's name with hyphens."""


def import_advice(errors: str, program: str) -> str | None:
    """What to install, from the last import error in what `program` (the first word of its command) has printed; None
    if it printed none.

    >>> import_advice("ModuleNotFoundError: No module named 'agents'", "python3")
    "the package 'agents' is not installed for python3; run: python3 -m pip install openai-agents"
    """
    if found := _MISSING.findall(errors):
        return _missing(found[-1], program)
    if found := _LACKING.findall(errors):
        name, module = found[-1]
        return _outdated(f"{module}.{name}", module, program)
    if found := _NODE.findall(errors):
        return f"the package {found[-1]!r} is not installed; run in the folder of the agent: npm install {found[-1]}"
    return None


def _missing(module: str, program: str) -> str:
    top = module.partition(".")[0]
    if "." in module and top != "google":  # a namespace of many packages
        return _outdated(module, module, program)
    return f"the package {top!r} is not installed for {program}; run: {_pip(program)} install {_distribution(top)}"


def _outdated(name: str, module: str, program: str) -> str:
    top = module.partition(".")[0]
    return (
        f"the version of {top!r} installed for {program} has no {name}, so it is too old for this agent, or too new;"
        f" for the newest, run: {_pip(program)} install --upgrade {_distribution(top)}"
    )


def _pip(program: str) -> str:
    return f"{shlex.quote(program)} -m pip" if Path(program).name.startswith("python") else "pip"


def _distribution(top: str) -> str:
    return _DISTRIBUTIONS.get(top, top.replace("_", "-"))
