#!/usr/bin/env bash
#SBATCH --job-name=bert-data
#SBATCH --nodes=1                   # EDIT, or `sbatch --nodes=N`: the bytes are the same for any number
#SBATCH --ntasks-per-node=64        # EDIT: cores of a node; about 0.5 GB of memory each
#SBATCH --cpus-per-task=1
#SBATCH --mem-per-cpu=1G
#SBATCH --time=12:00:00             # EDIT: see the table of hours in docs/corpus.md
#SBATCH --requeue
#SBATCH --open-mode=append          # one log over all restarts
#SBATCH --output=%x-%j.log
#
# Turns text into shards over any number of nodes that share a file system:
#
#   sbatch slurm/prepare_data.sh
#   sbatch --nodes=8 --export=ALL,CONFIG=configs/data_wikibooks.yaml,OUT=/scratch/wikibooks slurm/prepare_data.sh
#   bash slurm/prepare_data.sh --dry-run              print the command and stop
#
# Environment:
#   CONFIG     what to prepare                      configs/data_wikibooks.yaml
#   OUT        folder of the dataset                `out` of the config
#   SETTINGS   more `key=value ...` for --set       none
#   VENV       virtual environment                  .venv of the checkout, if there is one
#   MPI        srun's --mpi plugin                  pmi2, which the mpich of requirements.txt speaks
#
# A job that ran out of time or lost a node goes on where it was when it is submitted again. Ranks
# that did not find each other (another MPI plugin) are noticed and refused, never run side by side.
set -euo pipefail
[ $# = 0 ] || [ "$*" = --dry-run ] ||
    { echo "error: no argument but --dry-run is read: $*; set the variables that the script lists"; exit 2; }

if [ -n "${SLURM_JOB_ID:-}" ] && [ -n "${SLURM_SUBMIT_DIR:-}" ]; then
    cd "$SLURM_SUBMIT_DIR" # sbatch runs a copy of this script from its spool folder
else
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
fi
[ -d data_pipeline ] || { echo "error: submit from the checkout: $PWD has no data_pipeline"; exit 2; }

CONFIG=${CONFIG:-configs/data_wikibooks.yaml}
[ -z "${VENV:-}" ] || [ -x "$VENV/bin/python" ] || { echo "error: VENV: no $VENV/bin/python"; exit 2; }
VENV=${VENV:-$PWD/.venv}
python=python3
[ -x "$VENV/bin/python" ] && python=$VENV/bin/python
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1

# From 22.05 srun does not take over sbatch's --cpus-per-task.
command=(srun --mpi="${MPI:-pmi2}" --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK})
command+=("$python" -m data_pipeline prepare --config "$CONFIG")
[ -n "${OUT:-}" ] && command+=(--out "$OUT")
# shellcheck disable=SC2206  # split at spaces on purpose
[ -n "${SETTINGS:-}" ] && command+=(--set $SETTINGS)

if [ "${1:-}" = --dry-run ]; then
    printf 'cd %q\n' "$PWD"
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi
exec "${command[@]}"
