#!/usr/bin/env bash
# Train Qwen2.5-Coder-0.5B-Instruct and make the papers' tables: launch/qwen.sh GGUF [OUT] [NAME=VALUE ...]
#   GGUF is Qwen's GGUF file, or the name of a Transformers model on the hub. NAME=VALUE are settings of data_prep for
#   code in StarCoder's schema (data.path=STARCODER benchmarks=all budget=20M); the default is Python's standard library.
#   The environment variables MBPP and INFILLING are benchmark files for the tables. CHAT is a file of prompts to answer in
#   place of the model's own, which are mostly code. They, GGUF and OUT are relative to the current folder, paths in
#   NAME=VALUE to the project's root.
#   base -> code with infilling -> own answers and own continuations -> gated fine-tune, at 512 and then 2,048 tokens
#   -> export -> tables of base and gated -> the paper's fine-tune (dual, all weights) -> tables of the three.
# It takes hours on two cores, minutes on a GPU (docs/training.md, Recipes). A rerun skips finished stages and continues
# an interrupted one.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
if [[ $# -eq 0 || $1 == *=* || $1 == -* ]]; then
    echo "error: the arguments must be GGUF [OUT] [NAME=VALUE ...], got: $*. Run launch/qwen.sh --help" >&2
    exit 2
fi
project=$(cd "$(dirname "$0")/.." && pwd)
source "$project/launch/stages.sh"
given=$1
[[ ! -e $1 ]] || given=$(realpath "$1")
shift
for name in MBPP INFILLING CHAT; do
    if [[ -n ${!name:-} ]]; then
        if [[ ! -f ${!name} ]]; then
            echo "error: $name must be a file, got ${!name}. Check the path" >&2
            exit 2
        fi
        printf -v "$name" %s "$(realpath "${!name}")"
        check_path "$name" "${!name}" file
    fi
done
folder=runs/qwen
if [[ $# -gt 0 && $1 != *=* ]]; then
    folder=$(in_project "$1")
    shift
fi
cd "$project"
begin "$folder"
code=(experiment=qwen "$@")
[[ $# -gt 0 ]] || code=(experiment=demo held_out=0.1)
# Settings for a GPU, which is faster with larger batches and more windows.
fast=() long=()
wide=1 # ranks at 2,048 tokens: on a CPU one rank takes 11 GiB and both cores
if [[ $gpus -gt 0 ]]; then
    fast=(global_batch=8 micro_batch=4 loss_chunk=8192 objective.start_rate=0.5)
    long=(global_batch=4 micro_batch=1 loss_chunk=8192)
    wide=$ranks
fi

base=$given # a name on the hub
if [[ -e $given ]]; then
    base=$out/base
    python -m train.convert gguf="$given" out="$base"
fi
whole_files() { # LENGTH OUT: prepare the code in sequences of LENGTH tokens
    python -m data_prep tokenizer="$base" "${code[@]}" data.split_chars=null seq_len="$1" fim_rate=0.5 \
        ngrams.megabytes=1 out="$2"
}
whole_files 2048 "$out/documents"
python -m data_prep tokenizer="$base" "${code[@]}" data.split_chars=1800 seq_len=512 fim_rate=0 ngrams.megabytes=0 \
    out="$out/pieces"
chat_prompts=${CHAT:-}
own_text "$out/pieces" "$base" 1024 512 768 0.05 192 256
python -m data_prep tokenizer="$base" seq_len=2048 experiment=own data.path="$out/own_code" out="$out/code_long"
run train experiment=qwen data.path="$out/chat" data.own="$out/code" model.path="$base" "${fast[@]}" out="$out/short"
python -m train.export checkpoint="$out/short" out="$out/short_model" dtype=float32
ranks=$wide OMP_NUM_THREADS=2 run train experiment=qwen_long data.path="$out/documents" data.own="$out/code_long" \
    model.path="$base" model.adapter="$out/short_model" "${long[@]}" out="$out/tuned"
python -m train.export checkpoint="$out/tuned" out="$out/gated" dtype=float32
python -m infer.bench model="$out/gated" experiment=qwen part=speed prompts="['$out/documents/held_out.jsonl']" \
    prompt_lengths=[512,1024,2048,4096] count=6 speed.decoders=[hybrid,sdsat] speed.k=[5] speed.temperatures=[0] \
    out="$out/lengths"
sets="humaneval,'$out/chat/held_out.jsonl'${INFILLING:+,'$INFILLING'}"
tables=(prompts="[$sets]" quality.held_out="$out/documents/held_out.jsonl")
bash launch/tables.sh "$out/tables" "$base" "$out/gated" "${tables[@]}"
# The paper's fine-tune. On a CPU its 400 steps of 16,384 tokens would take more than a day.
data=$out/documents
slow=()
if [[ $gpus -eq 0 ]]; then
    data=$out/documents_1024 # sequences of 2,048 need 22 GiB
    whole_files 1024 "$data"
    slow=(deepspeed=zero0 global_batch=2 minutes=75 optimizer.lr=3.0e-5 optimizer.min_lr=3.0e-6
        optimizer.warmup_steps=15)
fi
ranks=$wide OMP_NUM_THREADS=2 run train experiment=qwen_dual data.path="$data" model.path="$base" "${slow[@]}" \
    out="$out/dual_training"
python -m train.export checkpoint="$out/dual_training" out="$out/dual" dtype=float32
bash launch/tables.sh "$out/tables" "$base" "$out/dual" "$out/gated" "${tables[@]}"
