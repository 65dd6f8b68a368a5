#!/usr/bin/env bash
# A tool-using agent in bash: curl talks to the model, jq reads what it says.
set -euo pipefail

url="${OPENAI_BASE_URL:-https://api.openai.com/v1}/chat/completions"
model="${AGL_MODEL:-gpt-4o-mini}"
tools='[{"type": "function", "function": {"name": "calculator", "description": "Evaluate an arithmetic expression.",
  "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}}}]'

calculate() {
  if [[ $1 =~ ^[0-9\ +*/().-]{1,100}$ && $1 != *"**"* ]]; then
    awk "BEGIN { print $1 }" 2>/dev/null || echo "error: not an expression"
  else
    echo "error: only numbers and + - * / ( ) are allowed"
  fi
}

ask() { # the conversation in, the message out
  jq -c --arg model "$model" --argjson tools "$tools" '{model: $model, tools: $tools, messages: .}' <<<"$1" |
    curl -sS --fail-with-body -H "Authorization: Bearer ${OPENAI_API_KEY:-}" -H "Content-Type: application/json" -d @- "$url" |
    jq -c '.choices[0].message'
}

if [[ -n ${AGL_TASK:-} ]]; then question=$(jq -r .question <<<"$AGL_TASK"); else question="$*"; fi
messages=$(jq -nc --arg question "$question" '[{role: "user", content: $question}]')
for _ in 1 2 3 4; do
  message=$(ask "$messages")
  messages=$(jq -c --argjson message "$message" '. + [$message]' <<<"$messages")
  if [[ $(jq '.tool_calls // [] | length' <<<"$message") == 0 ]]; then
    jq -r '.content // ""' <<<"$message"
    exit
  fi
  while read -r call; do
    expression=$(jq -r '.function.arguments | fromjson? | .expression? // ""' <<<"$call")
    messages=$(jq -c --arg id "$(jq -r .id <<<"$call")" --arg result "$(calculate "$expression")" \
      '. + [{role: "tool", tool_call_id: $id, content: $result}]' <<<"$messages")
  done < <(jq -c '.tool_calls[]' <<<"$message")
done
