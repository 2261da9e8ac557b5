#!/usr/bin/env bash
# Decoding and training on this machine's GPU, without downloads: launch/gpu_check.sh [out=FILE] [name=value ...]
# Settings are those of infer.gpu_check; train.NAME=VALUE is for train.gpu_check; device=cpu is for both.
# Decoding is written to FILE, training beside it to FILE's name with .train.json. Either runs if the other fails.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
cd "$(dirname "$0")/.."
source .venv/bin/activate
out=runs/gpu_check/$(date -u +%Y-%m-%dT%H%M%S).json infer=() train=()
for setting in "$@"; do
    case $setting in
        out=*) out=${setting#out=} ;;
        device=*) infer+=("$setting") train+=("$setting") ;;
        train.*) train+=("${setting#train.}") ;;
        *) infer+=("$setting") ;;
    esac
done
code=0
python -m infer.gpu_check "out=$out" "${infer[@]}" || code=$?
python -m train.gpu_check "out=${out%.json}.train.json" "${train[@]}" || code=$?
exit "$code"
