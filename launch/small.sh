#!/usr/bin/env bash
# The demo's way with a model of 10M parameters and a vocabulary of 8,192, in hours: launch/small.sh [OUT]
#   DATA=DIR TOKENIZER=DIR launch/small.sh OUT   on files in StarCoder's layout, with this tokenizer (CodeLlama's)
# Relative paths start at the project's root. The same command continues an interrupted run.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
data=()
if [[ -n ${DATA:-} && -n ${TOKENIZER:-} ]]; then
    data=(experiment=small_starcoder "data.path=$DATA" "tokenizer=$TOKENIZER")
    export VOCAB=codellama
elif [[ -n ${DATA:-}${TOKENIZER:-} ]]; then
    echo "error: DATA and TOKENIZER must be given together, got DATA=${DATA:-} TOKENIZER=${TOKENIZER:-}. Give both, or neither" >&2
    exit 2
fi
exec bash "$(dirname "$0")/pipeline.sh" small "${1:-runs/small}" "${data[@]}"
