#!/usr/bin/env bash
# Report the speed and quality of a model, compared with its base model: launch/evaluate.sh MODEL [BASE] [NAME=VALUE ...]
#   NAME=VALUE are settings of infer.bench (out=DIR, draft=DIR, experiment=paper, speed.rounds=5).
#   RANKS processes share the prompts: a number, or auto, gpu or cpu (default: one per GPU).
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
project=$(cd "$(dirname "$0")/.." && pwd)
if [[ $# -eq 0 || $1 == *=* || $1 == -* ]]; then
    echo "error: the arguments must be MODEL [BASE] [NAME=VALUE ...], got: $*. Run launch/evaluate.sh --help" >&2
    exit 2
fi
settings=("model=${1%/}" "out=${1%/}-report")
shift
if [[ $# -gt 0 && $1 != *=* ]]; then
    settings+=("base=$1")
    shift
fi
source "$project/launch/stages.sh"
check_ranks
bash "$project/launch/setup.sh"
source "$project/.venv/bin/activate"
# Paths are relative to the caller's folder. PYTHONSAFEPATH keeps Python from importing modules from there.
export PYTHONPATH="$project${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
ranks=${RANKS:-}
if [[ -z $ranks ]]; then
    gpus=$(count_gpus)
    ranks=$((gpus > 0 ? gpus : 1))
fi
start=(python)
[[ $ranks == 1 ]] || start+=("$project/launch/torchrun.py" --standalone --nproc_per_node "$ranks")
"${start[@]}" -m infer.bench "${settings[@]}" "$@"
