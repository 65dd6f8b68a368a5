#!/usr/bin/env bash
# Codex, asked one question without a terminal. It reads no variable for its address, so its configuration names one.
# Its own instructions and its skills are replaced by a short prompt, so that a tiny model can learn it; leave the two
# settings out for a model of ordinary size.
set -euo pipefail
provider="{name=\"policy\",base_url=\"$OPENAI_BASE_URL\",env_key=\"OPENAI_API_KEY\"}"
exec codex exec --skip-git-repo-check -s danger-full-access -m gpt-5 -c model_provider=policy \
  -c "model_providers.policy=$provider" -c skills.include_instructions=false \
  -c model_instructions_file="$(dirname "$(realpath "$0")")/prompt.md" "$(jq -r .question)" </dev/null
