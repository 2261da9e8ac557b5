#!/usr/bin/env bash
# Style, import contracts and types: launch/test.sh without the tests.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
cd "$(dirname "$0")/.."
bash launch/setup.sh
source .venv/bin/activate
ruff check .
ruff format --check .
lint-imports --no-cache
mypy
