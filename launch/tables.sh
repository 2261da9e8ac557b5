#!/usr/bin/env bash
# Make SDSAT's Tables 1, 3 and 4 for several models: launch/tables.sh OUT BASE MODEL... [NAME=VALUE ...]
#   The tables have pass@1 of HumanEval, pass@1 of MBPP (with MBPP=FILE), exact match of infilling in both orders (with
#   INFILLING=FILE), loss (with quality.held_out=FILE), and speed by k and temperature. Each model's report is in
#   OUT/MODEL; a comparison is printed last, at its end one table of all models.
#   MBPP and INFILLING are environment variables, NAME=VALUE settings of infer.bench (default: experiment=qwen). RANKS
#   processes share the prompts.
# A rerun skips finished parts and continues an interrupted one.
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
source "$project/launch/stages.sh"
check_path OUT "$1" folder
for name in MBPP INFILLING; do
    check_path "$name" "${!name:-}" file
done
out=$(realpath -m "$1") # absolute, since the comparison runs in another folder
check_path OUT "$out" folder
shift
models=()
while [[ $# -gt 0 && $1 != *=* ]]; do
    models+=("${1%/}")
    shift
done
if [[ -n $(printf '%s\n' "${models[@]##*/}" | sort | uniq -d) ]]; then
    echo "error: BASE and each MODEL must have different folder names, because each report has the name of its model," \
        "got: ${models[*]}. Rename a folder, or give a link to it" >&2
    exit 2
fi
settings=("$@")
[[ "$*" == *experiment=* ]] || settings+=(experiment=qwen)
[[ -z ${INFILLING:-} || "$*" == *prompts=* ]] || settings+=(prompts="[humaneval,'$INFILLING']")
reports=()
for model in "${models[@]}"; do
    report=$out/${model##*/}
    files=()
    [[ -z ${MBPP:-} ]] || files+=(quality.mbpp="$MBPP")
    if [[ -n ${INFILLING:-} ]]; then
        files+=(quality.infilling="$INFILLING" quality.order=both)
    fi
    bash "$project/launch/evaluate.sh" "$model" "${settings[@]}" "${files[@]}" out="$report"
    reports+=("'$report'")
done
cd "$project"
source .venv/bin/activate
python -m infer.bench.compare reports="[$(IFS=,; echo "${reports[*]}")]"
