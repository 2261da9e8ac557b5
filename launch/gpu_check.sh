#!/usr/bin/env bash
# Parity and speed of decoding on this machine's GPU, without downloads: launch/gpu_check.sh [out=FILE] [name=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."
source .venv/bin/activate
python -m infer.gpu_check "out=runs/gpu_check/$(date -u +%Y-%m-%dT%H%M%S).json" "$@"
