#!/usr/bin/env bash
# A real model from the first command to the report, on this machine: launch/demo.sh [OUT]
#   SmolLM2-135M -> its own text -> gated fine-tune -> export -> decode -> report, in about 20 minutes.
# Finished stages are skipped; an interrupted demo continues where it stopped.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
exec bash "$(dirname "$0")/pipeline.sh" demo "${1:-runs/demo}" 64 64
