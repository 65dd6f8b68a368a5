#!/usr/bin/env bash
# Makes the environments of the frameworks that tests/frameworks runs: .peers/frameworks/{modern,crewai,adk,dspy,old} and,
# with Node.js 20 or newer, .peers/frameworks/{node,commands} in this checkout. Without them their tests are skipped.
#
#     tests/frameworks/setup.sh [NAME...]
#
# Each gets the exact packages that NAME.txt (commands: commands.json, node: examples/frameworks/vercel_ai/package.json)
# lists here, and nothing else. An environment
# that is complete is left alone; remove its folder to make it anew. AGL_FRAMEWORKS_PYTHON (3.11 to 3.13) names the
# interpreter where the one found by itself is not right.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
cd "$here/../.."

find_python() {
    local each
    for each in "${AGL_FRAMEWORKS_PYTHON:-}" python3 python3.11 python3.12 python3.13; do
        if "$each" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            echo "$each"
            return
        fi
    done
    return 1
}

make_python() {
    local home=".peers/frameworks/$1" pins="$here/$1.txt" python
    if cmp -s "$pins" "$home/.installed"; then echo "$home: ready"; return; fi
    python="$(find_python)" || { echo "$home: left out, it needs Python 3.11 to 3.13" >&2; return; }
    rm -rf "$home"
    "$python" -m venv "$home"
    "$home/bin/pip" install --quiet --disable-pip-version-check --no-deps -r "$pins"
    cp "$pins" "$home/.installed"
    echo "$home: ready"
}

make_node() { # NAME PACKAGE.JSON
    local home=".peers/frameworks/$1"
    if cmp -s "$2" "$home/.installed"; then echo "$home: ready"; return; fi
    command -v npm >/dev/null || { echo "$home: left out, it needs npm" >&2; return; }
    rm -rf "$home"
    mkdir -p "$home"
    cp "$2" "$home/package.json"
    (cd "$home" && npm install --silent --no-audit --no-fund)
    cp "$2" "$home/.installed"
    echo "$home: ready"
}

for name in "${@:-modern crewai adk dspy old commands node}"; do
    for each in $name; do
        case "$each" in
            commands) make_node commands "$here/commands.json" ;;
            node) make_node node examples/frameworks/vercel_ai/package.json ;;
            *) make_python "$each" ;;
        esac
    done
done
