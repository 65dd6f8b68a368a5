#!/usr/bin/env bash
# Builds an image of docker/Dockerfile without a Docker daemon, and starts a server from it:
#
#   [TARGET=train] tests/deploy/image.sh [FOLDER]    needs root, and buildah, debootstrap and curl (apt-get install ...)
#
# The core image needs 1 GB, that of training 10 GB while it is made.
# The base image is made by debootstrap, with Debian's Python in the place of python:3.12-slim.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$(mkdir -p "${1:-/tmp/agl-image}" && cd "${1:-/tmp/agl-image}" && pwd)
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
buildah=(buildah --root "$folder/store" --runroot "$folder/run")
target=${TARGET:-core}
certificates=/etc/ssl/certs/ca-certificates.crt

if [ ! -e "$folder/base.done" ]; then
    packages=python3,python3-pip,python3-venv,ca-certificates
    debootstrap --variant=minbase --include=$packages bookworm "$folder/base" "${DEBIAN:-http://deb.debian.org/debian}"
    rm -f "$folder"/base/usr/lib/python3*/EXTERNALLY-MANAGED
    base=$("${buildah[@]}" from scratch)
    "${buildah[@]}" add "$base" "$folder/base" /
    "${buildah[@]}" commit "$base" localhost/python:3.11-slim
    touch "$folder/base.done"
fi
"${buildah[@]}" build --pull=never --network host --volume "$certificates:$certificates:ro" --build-arg PYTHON=3.11 \
    --ignorefile docker/Dockerfile.dockerignore -f docker/Dockerfile --target "$target" -t "agentlightning:$target" .

container=$("${buildah[@]}" from --pull=never "localhost/agentlightning:$target")
"${buildah[@]}" run "$container" -- agl --version
port=${PORT:-4799}
"${buildah[@]}" run "$container" -- agl serve --port "$port" --no-token --json &
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
for _ in $(seq 60); do
    if curl -sf "http://127.0.0.1:$port/readyz"; then
        echo " the server of the image is ready"
        exit 0
    fi
    sleep 0.5
done
echo "the server of the image did not become ready" >&2
exit 1
