#!/usr/bin/env bash
# Decoding and training on this machine's GPUs, without downloads: launch/gpu_check.sh [pytest's options]
# All GPUs take part: ZeRO 1 to 3, and a model divided over them. GPU_CHECK_DEVICE=cpu tries the checks themselves.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
cd "$(dirname "$0")/.."
source .venv/bin/activate
python -m pytest -m gpu -s tests/gpu "$@"
