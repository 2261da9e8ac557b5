#!/usr/bin/env bash
# Train on all GPUs of this machine: launch/train.sh experiment=sdsat_7b_l5 data.path=... model.path=... out=...
set -euo pipefail
cd "$(dirname "$0")/.."
source .venv/bin/activate
read -ra rendezvous <<<"${RENDEZVOUS:---standalone}"
exec torchrun "${rendezvous[@]}" --nproc_per_node "${RANKS:-gpu}" -m train "$@"
