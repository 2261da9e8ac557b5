#!/usr/bin/env bash
# Train on several machines: run this on each, with the same arguments as launch/train.sh and
#   NODES=4 HEAD=10.0.0.1:29400 RUN=sdsat launch/train_multinode.sh experiment=sdsat_34b_l7 ...
# HEAD is an address of one of the machines that all of them reach, RUN a name that only this run has.
set -euo pipefail
cd "$(dirname "$0")/.."
for name in NODES HEAD; do
    if [[ -z ${!name:-} ]]; then
        echo "error: wanted $name in the environment (NODES: how many machines; HEAD: host:port), found none" >&2
        exit 2
    fi
done
source .venv/bin/activate
exec torchrun --nnodes "$NODES" --nproc_per_node "${RANKS:-gpu}" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id "${RUN:-adaptive-tokens}" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout 600 -m train "$@"
