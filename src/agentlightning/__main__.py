"""`python -m agentlightning` is `agl`, so that torchrun can start it."""

from agentlightning.cli import main

main()
