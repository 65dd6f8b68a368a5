#!/usr/bin/env bash
# Codex, asked one question without a terminal. It reads no variable for its address, so its configuration names one.
set -euo pipefail
provider="{name=\"policy\",base_url=\"$OPENAI_BASE_URL\",env_key=\"OPENAI_API_KEY\"}"
exec codex exec --skip-git-repo-check -s danger-full-access -m gpt-5 -c model_provider=policy \
  -c "model_providers.policy=$provider" "$(jq -r .question)" </dev/null
