#!/usr/bin/env bash
# Makes the environments of the examples that need the package of an agent framework: .peers/examples/{rag,calc} in this
# checkout, with this package, its extra `train` and the requirements.txt of the example. Without them their slow tests
# are skipped.
#
#     tests/examples/setup.sh [NAME...]
#
# An environment that is complete is left alone; remove its folder to make it anew. AGL_FRAMEWORKS_PYTHON (3.11 to 3.13)
# names the interpreter where python3 is another.
set -euo pipefail
cd "$(dirname "$0")/../.."

for name in "${@:-rag calc}"; do
    for each in $name; do
        home=".peers/examples/$each" pins="examples/$each/requirements.txt"
        if cmp -s "$pins" "$home/.installed"; then echo "$home: ready"; continue; fi
        rm -rf "$home"
        "${AGL_FRAMEWORKS_PYTHON:-python3}" -m venv "$home"
        "$home/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
        "$home/bin/pip" install --quiet --disable-pip-version-check -e ".[train]" -r "$pins"
        cp "$pins" "$home/.installed"
        echo "$home: ready"
    done
done
