#!/usr/bin/env bash
# Train on all GPUs of this machine: launch/train.sh experiment=sdsat_7b_l5 data.path=... model.path=... out=...
# SIGTERM, SIGUSR1, SIGINT and, unless nohup has it ignored, SIGHUP save and end it with code 75: the same command goes on
# with the run.
set -euo pipefail
cd "$(dirname "$0")/.."
source .venv/bin/activate
signals=(TERM USR1 INT HUP)
handled=SIGTERM,SIGINT,SIGQUIT,SIGUSR1
ignored=0x$(awk '/^SigIgn/ { print $2 }' "/proc/$$/status")
((ignored & 1)) || handled+=,SIGHUP # torchrun would handle even what nohup ignores
# Threads for what runs on CPUs, as an offloaded optimizer's step; torchrun would give each of several ranks one.
ranks=${RANKS:-$(nvidia-smi -L 2>/dev/null | wc -l || true)}
cores=$(nproc)
[[ $ranks =~ ^[1-9][0-9]*$ ]] || ranks=$cores # no GPU, or a name that torchrun knows
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
read -ra rendezvous <<<"${RENDEZVOUS:---standalone}"
# torchrun has exit codes of its own, so the trainer leaves its own in a file.
TRAIN_EXIT_FILE=$(mktemp)
export TRAIN_EXIT_FILE
trap 'rm -f "$TRAIN_EXIT_FILE"' EXIT
torchrun "${rendezvous[@]}" --nproc_per_node "${RANKS:-gpu}" \
    --signals-to-handle "$handled" --shutdown-timeout "${SHUTDOWN_TIMEOUT:-600}" \
    -m train "$@" &
torchrun=$!
for signal in "${signals[@]}"; do trap "kill -$signal $torchrun 2>/dev/null || true" "$signal"; done
code=0
wait "$torchrun" || code=$?
while kill -0 "$torchrun" 2>/dev/null; do # a signal ends a wait, not torchrun
    code=0
    wait "$torchrun" || code=$?
done
own=$(<"$TRAIN_EXIT_FILE")
exit "${own:-$code}"
