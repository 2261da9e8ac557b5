#!/usr/bin/env bash
# Run lint, type checks, import contracts and tests: launch/test.sh [options of pytest]
# The tests run in two processes of one thread each, distributed by file, the slowest files first. Types and contracts
# are checked in parallel, and their output is printed at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
bash launch/setup.sh
source .venv/bin/activate
export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE # with it each of several hundred processes would compile this project's modules
ruff check .
ruff format --check .
verdict=$(mktemp)
check() {
    local code=0
    mypy || code=$?
    lint-imports --no-cache || code=$?
    return "$code"
}
set -m # its own process group, which is killed when this script ends
check >"$verdict" 2>&1 &
checking=$!
set +m
trap 'kill -- "-$checking" 2>/dev/null || true; rm -f "$verdict"' EXIT
code=0
python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@" || code=$?
wait "$checking" || code=$?
cat "$verdict"
exit "$code"
