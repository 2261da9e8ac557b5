#!/usr/bin/env bash
# What docs/results.md tells, measured again on a finished demo: launch/drill.sh [NAME ...]; without names all of it,
# most of a day on two cores. Each tells OUT/NAME.txt what it found. DEMO=runs/demo OUT=runs/drills, and SHARED, a folder
# with StarCoder's sample, MBPP and CodeLlama's tokenizer, for those that read them.
#   lossless draft families graphs near_ties long_text soak    decoding, held against plain decoding
#   resume round_trip portable                                 training and export
#   kills fuzz places demo_places                              what the world does to all of it
#   canonical repeatability                                    the sandbox, the report
#   quick_start as_written versions                            the documentation, the ranges
#   learning data_rate step_time loss_memory plan_memory export_memory loop_overhead draft_overhead baseline policies
#   harness study                                              figures (tests/benchmarks); best on a quiet machine
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
cd "$(dirname "$0")/.."
bash launch/setup.sh
source .venv/bin/activate
export OMP_NUM_THREADS=1
demo=${DEMO:-runs/demo} out=${OUT:-runs/drills} shared=${SHARED:-../shared/data}
model=$demo/model held_out=$demo/data/held_out.jsonl draft=$demo/draft base=$demo/base/model_directory
mkdir -p "$out"
run() { python -m "tests.drills.$@"; }
measure() { python -m "tests.benchmarks.$@"; }
drill() {
    case $1 in
        lossless) run lossless "$model" "$held_out" ;;
        draft) run lossless "$model" "$held_out" --draft "$draft" --samplings greedy nucleus --dtypes float32 ;;
        families | long_text | quick_start) run "$1" ;;
        canonical) run canonical --mbpp "$shared/mbpp/sanitized-mbpp.json" --mutants 1 ;;
        as_written) run as_written "$demo" "$out/as_written" --shared "$shared" ;;
        graphs) run graphs "$model" "$draft" "$held_out" ;;
        near_ties) run near_ties "$model" "$held_out" ;;
        soak) run soak "$model" "$held_out" --draft "$draft" --base "$base" --minutes 120 ;;
        resume | round_trip) run "$1" "$demo/data" "$out/$1" ;;
        portable) run portable "$model" "$held_out" --new 32 ;;
        kills) run kills "$out/kills" ;;
        fuzz) run fuzz --folder "$out/fuzz" ;;
        places) run places "$out/places" ;;
        demo_places) run demo_places "$out/demo_places" one-core memory+no-home offline+homeless+umlauts --like "$demo" ;;
        repeatability)
            run repeatability "$out/repeatability" experiment=demo "model=$model" "draft=$draft" \
                "prompts.held_out.path=$held_out"
            ;;
        versions) run versions "$out/versions" --pythons python3.11 python3.12 ;;
        learning) measure objectives_learn "$demo/data" "$base" "$out/learning" ;;
        data_rate) measure data_prep "$shared/starcoder_sample" "$shared/tokenizers/codellama-7b" --rounds 5 ;;
        step_time) measure objectives ;;
        loss_memory) measure loss_memory ;;
        plan_memory) measure memory ;;
        export_memory | loop_overhead | draft_overhead) measure "$1" ;;
        baseline) measure baseline 15M 110M 1.1B --new 96 --rounds 3 ;;
        policies) measure policies "$model" "$held_out" --base "$base" --count 10 ;;
        harness) measure harness --k 3 7 --new 200 --rounds 2 --ms 20 1 ;;
        study)
            python -m infer.study experiment=demo "model=$model" "draft=$draft" "prompts.held_out.path=$held_out" \
                "out=$out/study"
            ;;
        *) echo "error: wanted a drill that $0 names, found $1" >&2 && return 2 ;;
    esac
}
all=(data_rate step_time loss_memory plan_memory export_memory loop_overhead draft_overhead baseline policies harness
    study lossless draft families graphs near_ties long_text resume round_trip portable kills fuzz places demo_places
    canonical repeatability quick_start as_written versions soak learning)
failed=()
for name in "${@:-${all[@]}}"; do
    echo "== $name"
    drill "$name" 2>&1 | tee "$out/$name.txt" || failed+=("$name")
done
echo "drill: ${#failed[@]} failed: ${failed[*]:-none}"
[[ ${#failed[@]} -eq 0 ]]
