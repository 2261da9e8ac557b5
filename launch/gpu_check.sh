#!/usr/bin/env bash
# Decoding and training on this machine's GPUs, without downloads: launch/gpu_check.sh [pytest's options]
#   launch/gpu_check.sh --figures OUT [PIECE ...]   ten minutes of one GPU: speed, L(q), steps of 7B's width, ZeRO.
#     PIECEs: SmolLM2-135M's GGUF file in pieces. Each part's result is in OUT as soon as it ends.
# All GPUs take part: ZeRO 1 to 3, and a model divided over them. GPU_CHECK_DEVICE=cpu tries the checks themselves.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
cd "$(dirname "$0")/.."
# A GPU machine may have its own PyTorch and no way to install another.
[[ ! -f .venv/bin/activate ]] || source .venv/bin/activate
if [[ ${1:-} == --figures ]]; then
    exec python3 -m tests.gpu.figures "${@:2}"
fi
python3 -m pytest -m gpu -s tests/gpu "$@"
