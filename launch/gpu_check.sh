#!/usr/bin/env bash
# Check decoding and training on this machine's GPUs, without downloads: launch/gpu_check.sh [options of pytest]
#   launch/gpu_check.sh --figures OUT [PIECE ...]   measure speed, L(q), steps of a model as wide as 7B, and ZeRO:
#     ten minutes of one GPU. PIECEs are parts of SmolLM2-135M's GGUF file. Each result is written to OUT at once.
# All GPUs are used (ZeRO 1 to 3, and a model split over them). GPU_CHECK_DEVICE=cpu runs the checks on a CPU.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
cd "$(dirname "$0")/.."
# Without .venv the machine's own PyTorch is used, since GPU machines often cannot install another.
[[ ! -f .venv/bin/activate ]] || source .venv/bin/activate
if [[ ${1:-} == --figures ]]; then
    exec python3 -m tests.gpu.figures "${@:2}"
fi
python3 -m pytest -m gpu -s tests/gpu "$@"
