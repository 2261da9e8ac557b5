#!/usr/bin/env bash
# Train on several machines. Run this on each of them, with the arguments of launch/train.sh:
#   NODES=4 HEAD=10.0.0.1:29400 RUN=sdsat launch/train_multinode.sh experiment=sdsat_34b_l7 ...
# HEAD is the address of one machine, reachable from all of them. RUN is a name that no other run on HEAD uses. Only HEAD's
# port is fixed. If the machines have several networks, name the interface that connects them:
#   export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ ! ${NODES:-} =~ ^[1-9][0-9]*$ || ! ${HEAD:-} =~ ^[^:]+(:[0-9]+)?$ ]]; then
    echo "error: the environment must have NODES (number of machines) and HEAD (host:port)," \
        "got NODES='${NODES:-}' HEAD='${HEAD:-}'. Run NODES=4 HEAD=10.0.0.1:29400 launch/train_multinode.sh ..." >&2
    exit 2
fi
export RENDEZVOUS="--nnodes $NODES --rdzv-backend c10d --rdzv-endpoint $HEAD --rdzv-id ${RUN:-adaptive-tokens}"
exec bash launch/train.sh "$@"
