#!/usr/bin/env bash
#SBATCH --job-name=bert-glue
#SBATCH --array=0-7                 # EDIT, or `sbatch --array=0-N`: how many GPUs work at once
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8           # EDIT: cores of a node / GPUs
#SBATCH --time=12:00:00             # EDIT: a task that reaches it is requeued and goes on
#SBATCH --signal=B:USR1@120         # 120 s before the limit or at preemption: checkpoint and requeue
#SBATCH --requeue
#SBATCH --open-mode=append          # one log over all restarts
#SBATCH --output=%x-%A_%a.log
#
# GLUE's grid, or any other of finetune/run.py, as an array of jobs that share it:
#
#   sbatch slurm/finetune_glue.sh
#   sbatch --array=0-31 --export=ALL,SETTINGS=encoder.path=runs/large slurm/finetune_glue.sh
#   bash slurm/finetune_glue.sh --dry-run             print the command and stop
#
# Environment:
#   CONFIG     the grid                             configs/finetune_glue.yaml
#   SETTINGS   more `key=value ...` for --set       none
#   VENV       virtual environment                  .venv of the checkout, if there is one
#
# All tasks run the same command: each takes whatever setting is free and, when none is left, chooses
# the best of each task and writes RUN/report.md; the last to end does so with all results. `scancel`
# ends it after a checkpoint; the same sbatch line goes on where it stopped.
set -uo pipefail

if [ -n "${SLURM_JOB_ID:-}" ] && [ -n "${SLURM_SUBMIT_DIR:-}" ]; then
    cd "$SLURM_SUBMIT_DIR" || exit 1 # sbatch runs a copy of this script from its spool folder
else
    cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
fi
[ -f slurm/job.sh ] || { echo "error: submit from the checkout: $PWD has no slurm/job.sh"; exit 2; }
source slurm/job.sh

CONFIG=${CONFIG:-configs/finetune_glue.yaml}

# shellcheck disable=SC2206  # split at spaces on purpose
command=("$python" finetune/run.py --config "$CONFIG" ${SETTINGS:+--set $SETTINGS})
array_job "${1:-}" "${command[@]}"
