#!/usr/bin/env bash
# Makes the environments of the clients whose suites tests/clients runs: .peers/clients/{sdk,langchain,litellm,instructor,dspy}
# in this checkout. Without them their tests are skipped.
#
#     tests/clients/setup.sh [NAME...]
#
# An environment that is complete is left alone; remove its folder to make it anew. AGL_CLIENTS names another folder for all.
set -euo pipefail
cd "$(dirname "$0")/../.."
homes="${AGL_CLIENTS:-.peers/clients}"

packages() {
    case "$1" in
        sdk) echo "openai==3.54.0 anthropic==2.12.0" ;;
        langchain) echo "langchain-tests==1.1.9 langchain-openai==1.7.3 langchain-anthropic==1.7.7 pytest-asyncio" ;;
        litellm) echo "litellm==1.106.2 mcp==2.3.0" ;; # it imports mcp and does not require it
        instructor) echo "instructor==1.17.0 anthropic==2.12.0" ;;
        dspy) echo "dspy==3.4.1 litellm==1.106.2 mcp==2.3.0" ;;
        *) echo "$1 is not one of sdk, langchain, litellm, instructor, dspy" >&2; return 1 ;;
    esac
}

for name in ${@:-sdk langchain litellm instructor dspy}; do
    wanted="$(packages "$name") pytest"
    if [ "$(cat "$homes/$name/.installed" 2>/dev/null)" = "$wanted" ]; then echo "$homes/$name: ready"; continue; fi
    rm -rf "${homes:?}/$name"
    python3 -m venv "$homes/$name"
    # shellcheck disable=SC2086  # several packages
    "$homes/$name/bin/pip" install --quiet --disable-pip-version-check $wanted
    echo "$wanted" > "$homes/$name/.installed"
    echo "$homes/$name: ready"
done
