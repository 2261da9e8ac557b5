#!/usr/bin/env bash
# Speed and quality of a model in one report, beside the model it was made from: launch/evaluate.sh MODEL [BASE]
#   and, as needed: out=DIR and what else both stages take; speed.NAME=VALUE for infer.speed (speed.draft=DIR),
#   quality.NAME=VALUE for infer.quality (quality.samples=10); training=DIR, the training folder, for the report.
#   RANKS processes share the prompts: one per GPU.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
project=$(cd "$(dirname "$0")/.." && pwd)
if [[ $# -eq 0 || $1 == *=* || $1 == -* ]]; then
    echo "error: wanted launch/evaluate.sh MODEL [BASE] [out=DIR] [training=DIR] [speed.NAME=VALUE] [quality.NAME=VALUE]" >&2
    exit 2
fi
model=${1%/} speed=(experiment=quick) quality=(experiment=paper)
shift
both=("model=$model" "out=$model-report")
training=() report=("out=$model-report")
if [[ $# -gt 0 && $1 != *=* ]]; then
    both+=("base=$1")
    shift
fi
for setting in "$@"; do
    case $setting in
        speed.experiment=*) speed[0]=${setting#speed.} ;;
        speed.*) speed+=("${setting#speed.}") ;;
        quality.experiment=*) quality[0]=${setting#quality.} ;;
        quality.*) quality+=("${setting#quality.}") ;;
        training=*) training=("$setting") ;;
        *)
            both+=("$setting")
            [[ $setting != out=* && $setting != tracker.* ]] || report+=("$setting")
            ;;
    esac
done
bash "$project/launch/setup.sh"
source "$project/.venv/bin/activate"
# Paths are those of the folder that this was called from, which is not searched for modules.
export PYTHONPATH="$project${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
ranks=${RANKS:-$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')}
start=(python) # alone a mistake is one sentence, without torchrun's word on it
[[ $ranks -eq 1 ]] || start=(torchrun --standalone --nproc_per_node "$ranks")
measure() { "${start[@]}" -m "$@" "${both[@]}"; }
told=$(mktemp) # what the first says on stderr: the second says no line of it, nor the page on it, again
trap 'rm -f "$told"' EXIT
new_lines='BEGIN { while ((getline line < told) > 0) seen[line] }
    $0 in seen { again = 1; next }
    !(again && /^  see docs/) { print; fflush() }
    { again = 0 }'
code=0 # what one of them cannot do keeps nobody from the other's figures
{ measure infer.speed "${speed[@]}" 2>&1 >&3 | tee "$told" >&2; } 3>&1 || code=$?
{ measure infer.quality "${quality[@]}" 2>&1 >&3 | awk -v told="$told" "$new_lines" >&2; } 3>&1 || code=$?
[[ $code -ne 0 || ${#training[@]} -eq 0 ]] || python -m infer.report "${report[@]}" "${training[@]}" >/dev/null
exit "$code"
