#!/usr/bin/env bash
# The main job on this machine: data -> base model -> fine-tune and a draft model -> export -> decode -> report.
# Finished stages are skipped; an interrupted demo continues where it stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
bash launch/setup.sh
source .venv/bin/activate
ranks=$(python -c 'import os, torch; print(min(2, len(os.sched_getaffinity(0)), torch.cuda.device_count() or 2))')
export OMP_NUM_THREADS=1 # a thread per rank: two that share a core spin
# Large tensors come and go: keep their memory instead of returning it to the kernel each time.
export MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296
out=${1:-runs/demo}
train() { torchrun --standalone --nproc_per_node "$ranks" -m train "$@"; }

python -m data_prep experiment=demo out="$out/data"
train experiment=demo_base data.path="$out/data" out="$out/base"
python -m train.export checkpoint="$out/base" out="$out/base/model_directory"
train experiment=demo data.path="$out/data" model.path="$out/base/model_directory" out="$out/tuned"
train experiment=demo_draft data.path="$out/data" out="$out/draft_training"
python -m train.export checkpoint="$out/tuned" out="$out/model" & # side by side: each needs one core
python -m train.export checkpoint="$out/draft_training" out="$out/draft"
wait $!
RANKS=1 bash launch/evaluate.sh "$out/model" "$out/base/model_directory" out="$out/report" \
    speed.experiment=demo speed.draft="$out/draft" speed.prompts.held_out.path="$out/data/held_out.jsonl" \
    quality.experiment=demo quality.benchmarks.held_out.path="$out/data/held_out.jsonl"
echo "demo: the report is $out/report/index.html"
