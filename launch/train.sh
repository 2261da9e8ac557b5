#!/usr/bin/env bash
# Train on all GPUs of this machine: launch/train.sh experiment=sdsat_7b_l5 data.path=... model.path=... out=...
#   Paths are relative to the project's root. RANKS is the number of processes, or auto, gpu or cpu (default: one per GPU).
#   SIGTERM, SIGUSR1, SIGINT and SIGHUP (unless nohup ignores it) save a checkpoint and end the training with code 75. The
#   same command resumes it.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
cd "$(dirname "$0")/.."
source launch/stages.sh
check_ranks
if [[ ! -f .venv/bin/activate ]]; then # not set up here: the machines of a run may share this folder
    echo "error: .venv must have the project's packages. Run bash launch/setup.sh first" >&2
    exit 2
fi
source .venv/bin/activate
signals=(TERM USR1 INT HUP)
handled=SIGTERM,SIGINT,SIGQUIT,SIGUSR1
ignored=0x$(awk '/^SigIgn/ { print $2 }' "/proc/$$/status")
((ignored & 1)) || handled+=,SIGHUP # torchrun would handle it even if nohup ignores it
# Threads for work on CPUs, such as the step of an offloaded optimizer. torchrun's default is one thread per rank.
ranks=${RANKS:-$(nvidia-smi -L 2>/dev/null | wc -l || true)}
cores=$(nproc)
if [[ -z ${RANKS:-} && $ranks == 0 ]] && ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "error: RANKS must be the number of processes on a machine without GPUs, got none." \
        "Run RANKS=1 launch/train.sh ..." >&2
    exit 2
fi
[[ $ranks =~ ^[1-9][0-9]*$ ]] || ranks=$cores # no GPU, or a word such as RANKS=auto
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
read -ra rendezvous <<<"${RENDEZVOUS:---standalone}"
# After a signal torchrun does not know the exit code of the trainer, so the trainer writes its code to a file.
TRAIN_EXIT_FILE=$(mktemp)
export TRAIN_EXIT_FILE
trap 'rm -f "$TRAIN_EXIT_FILE"' EXIT
python launch/torchrun.py "${rendezvous[@]}" --nproc_per_node "${RANKS:-gpu}" \
    --signals-to-handle "$handled" --shutdown-timeout "${SHUTDOWN_TIMEOUT:-600}" \
    -m train "$@" &
torchrun=$!
for signal in "${signals[@]}"; do trap "kill -$signal $torchrun 2>/dev/null || true" "$signal"; done
code=0
wait "$torchrun" || code=$?
while kill -0 "$torchrun" 2>/dev/null; do # a signal interrupts `wait`, but torchrun still runs
    code=0
    wait "$torchrun" || code=$?
done
own=$(<"$TRAIN_EXIT_FILE")
exit "${own:-$code}"
