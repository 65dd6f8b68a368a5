#!/usr/bin/env bash
# Claude Code, asked one question without a terminal. Its own system prompt and tools are replaced by a short prompt and
# the shell, so that a tiny model can learn it; leave both options out for a model of ordinary size.
set -euo pipefail
exec claude -p "$(jq -r .question)" --model claude-sonnet-4-5 --system-prompt "Use the shell to multiply." \
  --tools Bash --allowedTools Bash --max-turns 4
