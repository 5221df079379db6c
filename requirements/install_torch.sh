#!/usr/bin/env bash
# usage: install_torch.sh PYTHON
# Installs the torch of torch.txt: the CPU build where there is no GPU, the index's default build where there is one.
#   TORCH_SPEC        install exactly this instead, for example TORCH_SPEC="torch==2.13.0"
#   TORCH_CPU_INDEX   package index that is asked for the CPU build when the configured one has none
set -euo pipefail
python=$1
pinned=$(grep -m 1 '^torch==' "$(dirname "$0")/torch.txt")
cpu_index=${TORCH_CPU_INDEX:-}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }
install() { "$python" -m pip install -qq --disable-pip-version-check --no-warn-conflicts "$@"; }

if [ -n "${TORCH_SPEC:-}" ]; then
    install "$TORCH_SPEC"
elif has_gpu; then
    install "$pinned"
elif ! install "$pinned+cpu"; then
    if [ -z "$cpu_index" ]; then
        echo "error: the configured package index has no CPU build of $pinned and this machine has no GPU; set" \
            "TORCH_CPU_INDEX to PyTorch's index of CPU builds, or TORCH_SPEC to a build to take, then again" >&2
        exit 1
    fi
    echo "The configured package index has no CPU build of $pinned: asking TORCH_CPU_INDEX"
    install --index-url "$cpu_index" "$pinned"
fi

version=$("$python" -W ignore -c 'import torch; print(torch.__version__, torch.version.cuda or "none")')
if [ "${version#* }" != none ] && ! has_gpu; then
    echo "error: torch ${version% *} is a CUDA build and this machine has no GPU; set TORCH_CPU_INDEX to an index" \
        "that serves the CPU build, then 'make clean' and again" >&2
    exit 1
fi
echo "torch ${version% *} (CUDA: ${version#* })"
