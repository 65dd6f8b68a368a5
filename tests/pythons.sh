#!/usr/bin/env bash
# Runs a subset of the tests that need no torch on each Python, from 3.11 on, that this machine has beside that of .venv:
# less than a minute each on two cores. Each gets an environment of its own in .peers/python-VERSION.
set -euo pipefail
cd "$(dirname "$0")/.."

TESTS=(tests/assemble tests/ingest tests/recording tests/store tests/tracing tests/util
    tests/docs/test_reference.py tests/test_resources.py)
PACKAGES=(pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis psutil openai grimp joblib aiohttp
    'opentelemetry-exporter-otlp-proto-http>=1.39,<2')
export HYPOTHESIS_EXAMPLES=10

version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
own=$(version .venv/bin/python)
tested=""
for python in python3.{11..19} "${HOME:-/root}"/.pyenv/versions/3.*/bin/python; do
    found=$(version "$python") || continue
    [[ " $own$tested " == *" $found "* || "${found#3.}" -lt 11 ]] && continue
    place=.peers/python-$found
    if [ ! -e "$place/.installed" ] || [ pyproject.toml -nt "$place/.installed" ]; then
        test -x "$place/bin/python" || "$python" -m venv "$place"
        "$place/bin/pip" install --quiet --disable-pip-version-check -e '.[parquet,postgres]' -e plugins/kubernetes -e plugins/weights "${PACKAGES[@]}"
        touch "$place/.installed"
    fi
    echo "Python $found"
    "$place/bin/pytest" -q -n 2 "${TESTS[@]}"
    tested+=" $found"
done
if [ -z "$tested" ]; then
    echo "skipped: this machine has no Python from 3.11 on beside the $own of .venv"
else
    echo "tested with Python$tested beside the $own of .venv"
fi
