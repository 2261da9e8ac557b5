#!/usr/bin/env bash
# Builds the site of docs/ into docs/_build; a broken link or any other warning is an error. LINKS=1 then asks the
# network whether the external links answer.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
cd "$(dirname "$0")/.."
bash launch/setup.sh
source .venv/bin/activate
build() { python -m sphinx --fail-on-warning --keep-going --quiet --nitpicky --builder "$1" docs "$2"; }
build html docs/_build
[[ -z ${LINKS:-} ]] || build linkcheck docs/_build/linkcheck
echo "docs: the site is docs/_build/index.html"
