#!/usr/bin/env bash
# Train on several machines. On each of them, with the arguments of launch/train.sh:
#   NODES=4 HEAD=10.0.0.1:29400 RUN=sdsat launch/train_multinode.sh experiment=sdsat_34b_l7 ...
# HEAD is one of the machines, as all of them reach it; RUN is a name that no other run there has. HEAD's port is the
# only one that the run names. Where machines have several networks, name the interface that they reach each other by:
#   export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ ! ${NODES:-} =~ ^[1-9][0-9]*$ || ! ${HEAD:-} =~ ^[^:]+(:[0-9]+)?$ ]]; then
    echo "error: wanted NODES (how many machines) and HEAD (host:port) in the environment," \
        "found NODES='${NODES:-}' HEAD='${HEAD:-}'" >&2
    exit 2
fi
export RENDEZVOUS="--nnodes $NODES --rdzv-backend c10d --rdzv-endpoint $HEAD --rdzv-id ${RUN:-adaptive-tokens}"
exec bash launch/train.sh "$@"
