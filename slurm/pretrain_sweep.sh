#!/usr/bin/env bash
#SBATCH --job-name=bert-sweep
#SBATCH --array=0-7                 # EDIT, or `sbatch --array=0-N`: how many runs at once
#SBATCH --gpus=1                    # EDIT: GPUs of a run; more want LAUNCHER
#SBATCH --cpus-per-task=8           # EDIT: cores of a node / GPUs
#SBATCH --time=24:00:00             # EDIT: a task that reaches it is requeued and goes on
#SBATCH --signal=B:USR1@300         # 300 s before the limit or at preemption: checkpoint and requeue
#SBATCH --requeue
#SBATCH --open-mode=append          # one log over all restarts
#SBATCH --output=%x-%A_%a.log
#
# A list of pretraining runs, shared by an array of jobs:
#
#   sbatch --export=ALL,CONFIGS="a.yaml b.yaml" slurm/pretrain_sweep.sh
#   CONFIGS=a.yaml bash slurm/pretrain_sweep.sh --dry-run        print the command and stop
#
# Environment:
#   CONFIGS    the runs, each with its own run_dir  required
#   SETTINGS   more `key=value ...` for --set       none
#   LAUNCHER   what starts a run                    one process; torchrun --standalone --nproc-per-node 8
#   VENV       virtual environment                  .venv of the checkout, if there is one
#
# All tasks run the same command: each takes whatever run is free. `scancel` ends it after a checkpoint;
# the same sbatch line goes on where it stopped.
set -uo pipefail

if [ -n "${SLURM_JOB_ID:-}" ] && [ -n "${SLURM_SUBMIT_DIR:-}" ]; then
    cd "$SLURM_SUBMIT_DIR" || exit 1 # sbatch runs a copy of this script from its spool folder
else
    cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
fi
[ -f slurm/job.sh ] || { echo "error: submit from the checkout: $PWD has no slurm/job.sh"; exit 2; }
source slurm/job.sh

[ -n "${CONFIGS:-}" ] || { echo "error: CONFIGS names no run"; exit 2; }

# shellcheck disable=SC2206  # split at spaces on purpose
command=("$python" -m pretrain sweep $CONFIGS ${SETTINGS:+--set $SETTINGS}
    ${LAUNCHER:+--launcher "$LAUNCHER"})
array_job "${1:-}" "${command[@]}"
