#!/usr/bin/env bash
# Train SmolLM2-135M by the demo's recipe for hours: launch/smollm2.sh [OUT]
#   It uses about 680 thousand tokens of the model's own text. Estimated time on two cores: two to three hours with
#   AVX512-BF16, six with AVX2.
# A rerun skips finished stages and continues an interrupted one.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
project=$(cd "$(dirname "$0")/.." && pwd)
source "$project/launch/stages.sh"
out=$(in_project "${1:-$project/runs/smollm2}")
cd "$project"
bash launch/pipeline.sh smollm2 "$out" 4096 2048 0.05
RANKS=1 bash launch/evaluate.sh "$out/model" "$out/base" out="$out/report" experiment=smollm2 draft="$out/draft" \
    prompts="[humaneval,'$out/documents/held_out.jsonl','$out/chat/held_out.jsonl']"
