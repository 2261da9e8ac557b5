#!/usr/bin/env bash
# Train, export and measure SmolLM2-135M on this machine: launch/demo.sh [OUT]
#   SmolLM2-135M -> its own text -> minutes of gated fine-tuning -> export -> decode -> report;
#   then the same report for adapters/smollm2-135m (trained for two hours on a CPU and four minutes on a GPU),
#   and a table of both.
# A rerun skips finished stages and continues an interrupted one.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
project=$(cd "$(dirname "$0")/.." && pwd)
source "$project/launch/stages.sh"
out=$(in_project "${1:-$project/runs/demo}")
cd "$project"
minutes=5
[[ $(uname -m) == x86_64 ]] && ! grep -q avx512f /proc/cpuinfo && minutes=7 # AVX2 makes fewer steps per minute
bash launch/pipeline.sh demo "$out" 48 96 0.1 "$minutes" 0
source .venv/bin/activate
report() { # MODEL OUT: unless a report is newer than the demo's model and the adapter in adapters/
    [[ $2/report.json -nt $out/model/manifest.json && $2/report.json -nt adapters/smollm2-135m/adaptive.json ]] ||
        python -m infer.bench experiment=demo prompts="[humaneval,'$out/chat/held_out.jsonl']" model="$1" out="$2"
}
report "$out/model" "$out/report"
report smollm2 "$out/trained"
python -m infer.bench.compare reports="['$out/report','$out/trained']" names="[$minutes minutes,two hours]"
echo "demo: open $out/report/index.html, $out/trained/index.html and the training's $out/tuned/index.html"
