#!/usr/bin/env bash
# Makes the environment of the tests with a server that speaks S3, about 300 MB. Usage: plugins/weights/tests/setup.sh [FOLDER, default .peers/moto]
# The tests find it there, or where the environment variable AGL_MOTO says. They need s3fs beside agentlightning, too: pip install s3fs
set -euo pipefail
root=$(cd "$(dirname "$0")/../../.." && pwd)
folder=${1:-$root/.peers/moto}
python3 -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check 'moto[server]==5.2.5'
"$folder/bin/moto_server" --help > /dev/null
echo "$folder: ready"
