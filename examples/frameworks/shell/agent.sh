#!/usr/bin/env bash
# An agent in bash: curl talks to the model, jq reads what it says.
set -euo pipefail

tools='[{"type": "function", "function": {"name": "multiply", "description": "Multiply two numbers.", "parameters": {
  "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}}]'

ask() { # the conversation in, the message out
  jq -c --argjson tools "$tools" '{model: "gpt-4o-mini", messages: ., tools: $tools}' <<<"$1" |
    curl -sS --fail-with-body -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" \
      -d @- "${OPENAI_BASE_URL:-https://api.openai.com/v1}/chat/completions" |
    jq -c '.choices[0].message'
}

messages=$(jq -c '[{role: "system", content: "Use the tool to multiply."}, {role: "user", content: .question}]')
for _ in 1 2 3 4; do
  message=$(ask "$messages")
  messages=$(jq -c --argjson message "$message" '. + [$message]' <<<"$messages")
  if [[ $(jq '.tool_calls // [] | length' <<<"$message") == 0 ]]; then
    jq -r '.content // ""' <<<"$message"
    exit
  fi
  while read -r call; do
    result=$(jq -r '.function.arguments | fromjson? // {} | try (.a * .b) catch "error: give two integers"' <<<"$call")
    messages=$(jq -c --argjson call "$call" --arg result "${result:-error: give two integers}" \
      '. + [{role: "tool", tool_call_id: $call.id, content: $result}]' <<<"$messages")
  done < <(jq -c '.tool_calls[]' <<<"$message")
done
