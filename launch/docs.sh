#!/usr/bin/env bash
# Build the site of docs/ in docs/_build; a broken link or any other warning is an error. LINKS=1 also checks
# external links, which needs the network.
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
echo "docs: wrote docs/_build/index.html"
