#!/usr/bin/env bash
# Lint, types, import contracts, tests. The tests run in two processes of one thread each, a file in one of them,
# the longest files first; types and contracts are checked beside them, and their verdict is printed at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
bash launch/setup.sh
source .venv/bin/activate
export OMP_NUM_THREADS=1
ruff check .
ruff format --check .
verdict=$(mktemp)
check() {
    local code=0
    mypy || code=$?
    lint-imports --no-cache || code=$?
    return "$code"
}
set -m # a process group of its own, which ends with this script
check >"$verdict" 2>&1 &
checking=$!
set +m
trap 'kill -- "-$checking" 2>/dev/null || true; rm -f "$verdict"' EXIT
code=0
python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@" || code=$?
wait "$checking" || code=$?
cat "$verdict"
exit "$code"
