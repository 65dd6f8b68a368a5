#!/usr/bin/env bash
# Makes the environment of the test with a real Phoenix, about 1 GB. Usage: tests/tracing/otlp/setup.sh [FOLDER, default .peers/phoenix]
# The test finds it there, or where the environment variable AGL_PHOENIX says.
set -euo pipefail
root=$(cd "$(dirname "$0")/../../.." && pwd)
folder=${1:-$root/.peers/phoenix}
python3 -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check arize-phoenix==20.26.1
