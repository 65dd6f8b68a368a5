#!/usr/bin/env bash
# Makes the environments of the peers that the benchmarks run beside: .peers/agl03, .peers/agl1, .peers/litellm,
# .peers/gepa and .peers/trl in this checkout.
#
#     benchmarks/peers.sh            (or: make peers)
#
# Each gets the exact packages of benchmarks/peers/NAME.txt and nothing else. Only trl brings torch, from TORCH_INDEX
# where that is set: on Linux, PyPI's brings CUDA libraries (see the Makefile). An environment that
# is complete is left alone; remove its folder to make it anew. AGL_PEER_PYTHON_03 (3.10 to 3.13) and AGL_PEER_PYTHON_1
# (3.12 or newer) name the interpreters where the ones found by themselves are not right.
set -euo pipefail
cd "$(dirname "$0")/.."

usable() {  # usable OLDEST INTERPRETER: it runs, is at least that version, and can make environments
    "$2" -c "import sys, venv; sys.exit(not sys.version_info >= tuple(map(int, '$1'.split('.'))))" 2>/dev/null
}

find_python() {  # find_python OLDEST
    local each
    for each in python3 python3.11 python3.12 python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[123]*/bin/python; do
        if usable "$1" "$each"; then echo "$each"; return; fi
    done
    return 1
}

make_peer() {  # make_peer NAME PACKAGE OLDEST INTERPRETER
    local home=".peers/$1" pins="benchmarks/peers/$1.txt" python
    if cmp -s "$pins" "$home/.installed"; then echo "$home: ready"; return; fi
    python="${4:-$(find_python "$3")}" || { echo "$home: left out, it needs Python $3 or newer" >&2; return; }
    rm -rf "$home"
    "$python" -m venv "$home"
    # torch with what it depends on, which is not the same from every index; nothing else may bring more.
    if grep -q '^torch==' "$pins"; then
        "$home/bin/pip" install --quiet --disable-pip-version-check ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} \
            "$(grep '^torch==' "$pins")"
    fi
    "$home/bin/pip" install --quiet --disable-pip-version-check --no-deps -r "$pins"
    "$home/bin/python" -W ignore -c "import $2, importlib.metadata as m; print(m.version('$2'))"
    cp "$pins" "$home/.installed"
    echo "$home: ready"
}

make_peer agl03 agentlightning 3.10 "${AGL_PEER_PYTHON_03:-}"
make_peer agl1 agentlightning 3.12 "${AGL_PEER_PYTHON_1:-}"
make_peer litellm litellm 3.10 "${AGL_PEER_PYTHON_LITELLM:-}"
make_peer gepa gepa 3.10 "${AGL_PEER_PYTHON_GEPA:-}"
make_peer trl trl 3.10 "${AGL_PEER_PYTHON_TRL:-}"
