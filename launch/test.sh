#!/usr/bin/env bash
# Lint, types, import contracts, tests: two processes of one thread each, a file of tests in one of them.
set -euo pipefail
cd "$(dirname "$0")/.."
bash launch/setup.sh
source .venv/bin/activate
export OMP_NUM_THREADS=1
ruff check .
ruff format --check .
mypy
lint-imports --no-cache
python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
