#!/usr/bin/env bash
# The long drills on a finished demo, one after another: launch/drill.sh [NAME ...]; without names all of them, most of
# a day on two cores. Each tells OUT/NAME.txt what it found, its last line JSON. DEMO=runs/demo OUT=runs/drills
#   lossless draft families graphs near_ties long_text soak    decoding, held against plain decoding
#   resume round_trip portable                                 training and export
#   kills fuzz places demo_places                              what the world does to all of it
#   canonical repeatability quick_start versions               the sandbox, the report, the documentation, the ranges
set -euo pipefail
cd "$(dirname "$0")/.."
bash launch/setup.sh
source .venv/bin/activate
export OMP_NUM_THREADS=1
demo=${DEMO:-runs/demo} out=${OUT:-runs/drills}
model=$demo/model held_out=$demo/data/held_out.jsonl draft=$demo/draft base=$demo/base/model_directory
mkdir -p "$out"
run() { python -m "tests.drills.$@"; }
drill() {
    case $1 in
        lossless) run lossless "$model" "$held_out" ;;
        draft) run lossless "$model" "$held_out" --draft "$draft" --samplings greedy nucleus --dtypes float32 ;;
        families | long_text | canonical | quick_start) run "$1" ;;
        graphs) run graphs "$model" "$draft" "$held_out" ;;
        near_ties) run near_ties "$model" "$held_out" --count 60 ;;
        soak) run soak "$model" "$held_out" --draft "$draft" --base "$base" --minutes 120 ;;
        resume | round_trip) run "$1" "$demo/data" "$out/$1" ;;
        portable) run portable "$model" "$held_out" --new 32 ;;
        kills) run kills "$out/kills" ;;
        fuzz) run fuzz --folder "$out/fuzz" ;;
        places) run places "$demo" "$out/places" ;;
        demo_places) run demo_places "$out/demo_places" one-core memory+no-home offline+homeless+umlauts --like "$demo" ;;
        repeatability) run repeatability "$out/repeatability" "model=$model" "draft=$draft" prompts=humaneval ;;
        versions) run versions "$out/versions" --pythons python3.11 python3.12 ;;
        *) echo "error: wanted a drill that $0 names, found $1" >&2 && return 2 ;;
    esac
}
all=(lossless draft families graphs near_ties long_text resume round_trip portable kills fuzz places demo_places
    canonical repeatability quick_start versions soak)
failed=()
for name in "${@:-${all[@]}}"; do
    echo "== $name"
    drill "$name" 2>&1 | tee "$out/$name.txt" || failed+=("$name")
done
echo "drill: ${#failed[@]} failed: ${failed[*]:-none}"
[[ ${#failed[@]} -eq 0 ]]
