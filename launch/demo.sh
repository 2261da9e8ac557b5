#!/usr/bin/env bash
# The main job on this machine: launch/demo.sh [OUT]
#   data -> base model -> fine-tune and a draft model -> export -> decode -> report.
# Finished stages are skipped; an interrupted demo continues where it stopped.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
exec bash "$(dirname "$0")/pipeline.sh" demo "${1:-runs/demo}"
