#!/usr/bin/env bash
# SDSAT's Tables 1, 3 and 4 of several models beside each other: launch/tables.sh OUT BASE MODEL... [NAME=VALUE ...]
#   pass@1 of HumanEval, of MBPP with MBPP=FILE, exact match of infilling in both orders with INFILLING=FILE, speed by k
#   and temperature; for each model in OUT/its name, then all beside each other. MBPP and INFILLING are files of the
#   environment, NAME=VALUE settings of infer.bench (experiment=qwen unless given). RANKS processes share the prompts.
# Finished parts are skipped; an interrupted run continues where it stopped.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
project=$(cd "$(dirname "$0")/.." && pwd)
if [[ $# -lt 2 || $1 == *=* || $2 == *=* ]]; then
    echo "error: the arguments must be OUT BASE MODEL... [NAME=VALUE ...], got: $*. Run launch/tables.sh --help" >&2
    exit 2
fi
out=$(realpath -m "$1") # compared in another folder
shift
models=()
while [[ $# -gt 0 && $1 != *=* ]]; do
    models+=("${1%/}")
    shift
done
settings=("$@")
[[ "$*" == *experiment=* ]] || settings+=(experiment=qwen)
[[ -z ${INFILLING:-} || "$*" == *prompts=* ]] || settings+=(prompts="[humaneval,'$INFILLING']")
reports=()
for model in "${models[@]}"; do
    report=$out/${model##*/}
    files=()
    [[ -z ${MBPP:-} ]] || files+=(quality.mbpp="$MBPP")
    if [[ -n ${INFILLING:-} ]]; then
        files+=(quality.infilling="$INFILLING")
        bash "$project/launch/evaluate.sh" "$model" "${settings[@]}" part=quality quality.humaneval=false \
            quality.infilling="$INFILLING" quality.order=spm out="$report-spm"
        reports+=("'$report-spm'")
    fi
    bash "$project/launch/evaluate.sh" "$model" "${settings[@]}" "${files[@]}" out="$report"
    reports+=("'$report'")
done
cd "$project"
source .venv/bin/activate
python -m infer.bench.compare reports="[$(IFS=,; echo "${reports[*]}")]"
