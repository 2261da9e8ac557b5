#!/usr/bin/env bash
# Speed and quality of a model in one report, beside the model it was made from: launch/evaluate.sh MODEL [BASE]
#   and, as needed: settings of infer.bench as NAME=VALUE (out=DIR, draft=DIR, experiment=paper, speed.rounds=5).
#   RANKS processes share the prompts: one per GPU.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
project=$(cd "$(dirname "$0")/.." && pwd)
if [[ $# -eq 0 || $1 == *=* || $1 == -* ]]; then
    echo "error: wanted launch/evaluate.sh MODEL [BASE] [NAME=VALUE ...]" >&2
    exit 2
fi
settings=("model=${1%/}" "out=${1%/}-report")
shift
if [[ $# -gt 0 && $1 != *=* ]]; then
    settings+=("base=$1")
    shift
fi
bash "$project/launch/setup.sh"
source "$project/.venv/bin/activate"
# Paths are those of the folder that this was called from, which is not searched for modules.
export PYTHONPATH="$project${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
ranks=${RANKS:-$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')}
start=(python) # alone a mistake is one sentence, without torchrun's word on it
[[ $ranks -eq 1 ]] || start=(torchrun --standalone --nproc_per_node "$ranks")
"${start[@]}" -m infer.bench "${settings[@]}" "$@"
