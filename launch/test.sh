#!/usr/bin/env bash
# Lint, types, import contracts, tests.
set -euo pipefail
cd "$(dirname "$0")/.."
bash launch/setup.sh
source .venv/bin/activate
export OMP_NUM_THREADS=1
ruff check .
ruff format --check .
mypy
lint-imports --no-cache
python -m pytest "$@"
