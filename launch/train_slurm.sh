#!/usr/bin/env bash
# Train under Slurm, requeued at the time limit: sbatch --nodes 4 launch/train_slurm.sh experiment=sdsat_34b_l7 ...
# Ten minutes before the limit the ranks get SIGUSR1, save and exit with 75; the job then waits for its next turn.
#SBATCH --job-name=adaptive-tokens
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
#SBATCH --exclusive
#SBATCH --signal=USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail
cd "${SLURM_SUBMIT_DIR:?is set by sbatch}"
export NODES=$SLURM_JOB_NUM_NODES RUN=$SLURM_JOB_ID
export HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):${PORT:-29400}"
srun --kill-on-bad-exit=0 bash launch/train_multinode.sh "$@"
code=$?
if [[ $code == 75 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
