"""The examples of `examples/frameworks`: how each is run here, and what is known of it beforehand."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.frameworks.service import ENVIRONMENTS, EXAMPLES

PINS = Path(__file__).parent
NOTHING = "nothing"


@dataclass(frozen=True)
class Example:
    """One agent."""

    title: str
    """In the table."""
    file: str
    """Under `examples/frameworks`."""
    environment: str
    """The folder under `.peers/frameworks` that holds its packages; "" for what the machine has."""
    package: str = ""
    """Whose version is shown."""
    arguments: tuple[str, ...] = ()
    changed: str = NOTHING
    """What had to be changed in the agent, as its own documentation writes it, to be trained."""
    continues: bool = True
    """False where the framework rewrites what the model said, so that a call starts a new path of tokens."""
    steps: int = 8
    """Of training."""
    start_steps: int = 120
    """Of supervised learning, for the tiny model to follow the agent."""

    @property
    def name(self) -> str:
        folder, _, file = self.file.partition("/")
        plain = folder if file.startswith("agent.") else f"{folder}_{Path(file).stem}"
        return "_".join([plain, *(argument.partition(":")[0].replace("-", "_") for argument in self.arguments)])

    @property
    def home(self) -> Path:
        return ENVIRONMENTS / self.environment

    @property
    def programs(self) -> Path:
        return self.home / ("node_modules/.bin" if self.environment == "commands" else "bin")

    def missing(self) -> str | None:
        """Why it cannot be run here."""
        needed = {".sh": ("bash", "jq", "curl"), ".mjs": ("node",)}.get(Path(self.file).suffix, ())
        if lacking := [program for program in needed if shutil.which(program) is None]:
            return f"{', '.join(lacking)} not found"
        if self.environment and not (self.home / ".installed").exists():
            return f"{self.home} is not there; run: tests/frameworks/setup.sh {self.environment}"
        return None

    def command(self, warm: bool = False) -> list[str]:
        """`warm`: in Python, by a process that has imported the framework already (`warm.py`)."""
        path = EXAMPLES / self.file
        if path.suffix == ".mjs":  # Node.js finds packages beside the file
            return ["node", str(shutil.copy(path, self.home / path.name)), *self.arguments]
        program = "bash" if path.suffix == ".sh" else str(self.programs / "python")
        before = [str(EXAMPLES / "warm.py")] if warm and path.suffix == ".py" else []
        return [program, *before, str(path), *self.arguments]

    def variables(self) -> dict[str, str]:
        """What its command finds its programs by, and keeps its own files in."""
        return {"PATH": f"{self.programs}:{os.environ['PATH']}"}

    def version(self) -> str:
        """The pinned version of its package."""
        if not self.package:
            return "-"
        if self.environment == "commands":
            return json.loads((PINS / "commands.json").read_text())["dependencies"][self.package]
        if self.environment == "node":
            return json.loads((EXAMPLES / "vercel_ai/package.json").read_text())["dependencies"][self.package]
        pins = (PINS / f"{self.environment}.txt").read_text()
        found = re.search(rf"^{re.escape(self.package)}==(\S+)", pins, re.MULTILINE)
        assert found is not None, f"{self.package} is not in {self.environment}.txt"
        return found[1]


ALL = [
    Example("openai, chat completions", "openai/chat.py", "modern", "openai"),
    Example("openai, responses", "openai/responses.py", "modern", "openai"),
    Example("anthropic", "anthropic/agent.py", "modern", "anthropic"),
    Example("LangChain", "langchain/agent.py", "modern", "langchain"),
    Example("LangGraph", "langgraph/agent.py", "modern", "langgraph"),
    Example("DeepAgents", "deepagents/agent.py", "modern", "deepagents"),
    Example("OpenAI Agents SDK", "openai_agents/agent.py", "modern", "openai-agents"),
    Example("AutoGen", "autogen/agent.py", "modern", "autogen-agentchat"),
    Example("Microsoft Agent Framework", "agent_framework/agent.py", "modern", "agent-framework-core"),
    Example("Pydantic AI", "pydantic_ai/agent.py", "modern", "pydantic-ai-slim"),
    Example("Pydantic AI, chat", "pydantic_ai/agent.py", "modern", "pydantic-ai-slim", ("openai-chat:gpt-4o-mini",)),
    Example(
        "Pydantic AI, Anthropic", "pydantic_ai/agent.py", "modern", "pydantic-ai-slim", ("anthropic:claude-sonnet-4-5",)
    ),
    Example("smolagents", "smolagents/agent.py", "modern", "smolagents", continues=False, start_steps=360),
    Example("CrewAI", "crewai/agent.py", "crewai", "crewai"),
    Example("LlamaIndex", "llama_index/agent.py", "crewai", "llama-index-core"),
    Example("Google ADK", "google_adk/agent.py", "adk", "google-adk"),
    Example("DSPy", "dspy/agent.py", "dspy", "dspy", changed="its cache is off", continues=False, start_steps=360),
    Example("Strands Agents", "strands/agent.py", "dspy", "strands-agents"),
    Example("Vercel AI SDK", "vercel_ai/agent.mjs", "node", "ai"),
    Example("bash, curl and jq", "shell/agent.sh", ""),
    Example(
        "Claude Code", "claude_code/agent.sh", "commands", "@anthropic-ai/claude-code", changed="short prompt, one tool"
    ),
    Example(
        "Codex", "codex/agent.sh", "commands", "@openai/codex", changed="address in `-c`, short prompt", start_steps=360
    ),
]
BY_NAME = {each.name: each for each in ALL}
