#!/usr/bin/env bash
# Train under Slurm. Run this in the project's root: sbatch --nodes 4 launch/train_slurm.sh experiment=sdsat_34b_l7 ... out=RUN
# If the machines have several networks, name the common one: NCCL_SOCKET_IFNAME=ib0 sbatch ... Ten minutes before the time
# limit the ranks save and stop, and the job is queued again.
#SBATCH --job-name=adaptive-tokens
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
#SBATCH --exclusive
#SBATCH --signal=USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?is not set: start this script by sbatch}"
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") # one per line; with a pipe to head, scontrol could fail
export NODES=$SLURM_JOB_NUM_NODES HEAD=${hosts%%$'\n'*}:${PORT:-29400} RUN=$SLURM_JOB_ID
code=0
# srun does not inherit --cpus-per-task from sbatch and would give each task one core; data loading and an offloaded
# optimizer need all cores.
cpus=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-$(nproc)}}
srun --cpus-per-task="$cpus" --kill-on-bad-exit=0 --wait=600 bash launch/train_multinode.sh "$@" || code=$?
[[ $code != 75 ]] || scontrol requeue "$SLURM_JOB_ID" # 75: saved and stopped before the end
exit "$code"
