#!/usr/bin/env bash
# Makes .venv with the versions of requirements.lock; does nothing where it is up to date.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v python3.11 || command -v python3 || true)
if [[ -z $python ]] || ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "error: wanted Python 3.11 or newer on the path, found ${python:-none}" >&2
    exit 2
fi
if ! cmp -s requirements.lock .venv/installed.lock; then
    echo "setup: installing the locked dependencies into .venv"
    [[ -x .venv/bin/python ]] || "$python" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
    cp requirements.lock .venv/installed.lock
fi
