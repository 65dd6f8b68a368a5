#!/usr/bin/env bash
# Makes the environment of the tests with a real Ray, about 300 MB. Usage: tests/integrations/ray/setup.sh [FOLDER, default .peers/ray]
# The tests find it there, or where the environment variable AGL_RAY says.
set -euo pipefail
root=$(cd "$(dirname "$0")/../../.." && pwd)
folder=${1:-$root/.peers/ray}
python3 -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check ray==2.60.0 -e "$root"
"$folder/bin/python" -c 'import ray; print(ray.__version__)'
