#!/usr/bin/env bash
# Every stage with the experiments of one name: launch/pipeline.sh NAME OUT [SETTINGS of data_prep]
#   data -> base model -> its own text -> fine-tune and a draft model -> export -> decode -> report.
# Finished stages are skipped; an interrupted run continues where it stopped. demo.sh calls this.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
cd "$(dirname "$0")/.."
if [[ $# -lt 2 ]]; then
    echo "error: the arguments must be NAME OUT [SETTINGS of data_prep], got: $*. Run launch/demo.sh" >&2
    exit 2
fi
name=$1 out=$2
if [[ $out == -* || $out == *=* ]]; then
    echo "error: OUT must be a folder, got $out. Run launch/demo.sh [OUT]" >&2
    exit 2
fi
shift 2
bash launch/setup.sh
source .venv/bin/activate
ranks=$(python -c 'import os, torch; print(min(2, len(os.sched_getaffinity(0)), torch.cuda.device_count() or 2))')
export OMP_NUM_THREADS=1 # a thread per rank: two that share a core spin
# Large tensors come and go: keep their memory instead of returning it to the kernel each time.
export MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296
train() { torchrun --standalone --nproc_per_node "$ranks" -m train "$@"; }

python -m data_prep experiment="$name" out="$out/data" "$@"
train experiment="${name}_base" data.path="$out/data" out="$out/base"
python -m train.export checkpoint="$out/base" out="$out/base/model_directory"
torchrun --standalone --nproc_per_node "$ranks" -m infer.regenerate model="$out/base/model_directory" \
    data.path="$out/data" documents=512 out="$out/own_text"
python -m data_prep experiment=own data.path="$out/own_text" tokenizer="$out/data/tokenizer" \
    vocab=demo seq_len=512 out="$out/own"
train experiment="$name" data.path="$out/data" data.own="$out/own" model.path="$out/base/model_directory" out="$out/tuned"
train experiment="${name}_draft" data.path="$out/data" out="$out/draft_training"
python -m train.export checkpoint="$out/tuned" out="$out/model" & # side by side: each needs one core
python -m train.export checkpoint="$out/draft_training" out="$out/draft"
wait $!
RANKS=1 bash launch/evaluate.sh "$out/model" "$out/base/model_directory" out="$out/report" experiment="$name" \
    draft="$out/draft" prompts="[humaneval,$out/data/held_out.jsonl]" quality.lines="$out/data/held_out.jsonl"
echo "$name: the report is $out/report/index.html"
