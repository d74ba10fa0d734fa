#!/usr/bin/env bash
#SBATCH --job-name=bert-large
#SBATCH --nodes=4                   # EDIT, or `sbatch --nodes=N`: the same run on any number
#SBATCH --gpus-per-node=8           # EDIT: GPUs of a node; one process each
#SBATCH --ntasks-per-node=8         # EDIT: equal to --gpus-per-node
#SBATCH --cpus-per-task=8           # EDIT: cores of a node / GPUs
#SBATCH --exclusive
#SBATCH --time=24:00:00             # EDIT: the partition's limit; the job requeues itself before it
#SBATCH --signal=B:USR1@300         # 300 s before the limit or at preemption: checkpoint and requeue
#SBATCH --requeue
#SBATCH --open-mode=append          # one log over all restarts
#SBATCH --output=%x-%j.log
#
# Pretrains BERT over several nodes, both phases in one job, and resumes by itself:
#
#   sbatch slurm/pretrain_large.sh
#   sbatch --nodes=2 --export=ALL,CONFIG=configs/pretrain_base.yaml slurm/pretrain_large.sh
#   bash slurm/pretrain_large.sh --dry-run            print the commands and stop
#
# Environment:
#   CONFIG         the run                             configs/pretrain_large.yaml
#   SETTINGS       more `key=value ...` for --set      none
#   VENV           virtual environment to activate     .venv of the checkout, if there is one
#   CONTAINER      image for `srun --container-image`  none (needs the pyxis plugin); its own python3 runs there
#   MOUNTS         more folders in it, /data:/data,... none (data.dir, run_dir outside the checkout)
#   MAX_RESTARTS   restarts in a row without a new checkpoint before it gives up      3
#
# No ssh and no DeepSpeed hostfile: srun starts one process a GPU, and pretrain/distributed.py reads
# rank and rendezvous from the job. Exit code 85 of the program means `start me again`; any other
# failure but a mistake (2) and Ctrl-C (130) is requeued too, as long as checkpoints advance. `scancel JOB` ends the
# job after a checkpoint; the same sbatch line goes on from there.
set -uo pipefail

if [ -n "${SLURM_JOB_ID:-}" ] && [ -n "${SLURM_SUBMIT_DIR:-}" ]; then
    cd "$SLURM_SUBMIT_DIR" || exit 1 # sbatch runs a copy of this script from its spool folder
else
    cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
fi
[ -f slurm/job.sh ] || { echo "error: submit from the checkout: $PWD has no slurm/job.sh"; exit 2; }
source slurm/job.sh

CONFIG=${CONFIG:-configs/pretrain_large.yaml}
SETTINGS=${SETTINGS:-}
MAX_RESTARTS=${MAX_RESTARTS:-3}
[[ $MAX_RESTARTS =~ ^[0-9]+$ ]] || { echo "error: MAX_RESTARTS=$MAX_RESTARTS is no number"; exit 2; }

# One OpenMP thread a process: the work is on the GPU, and the loader has workers of its own.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# A rank that dies ends the others' collectives with an error and not with a hang.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}
# EDIT where the interconnect needs it: NCCL_SOCKET_IFNAME=ib0, NCCL_IB_HCA=mlx5, NCCL_DEBUG=INFO

# Seconds that srun waits for the last task once another has ended. By default it waits for ever for
# a node's slurmstepd that was killed; rank 0 may take 30 for each tracker.
export SLURM_WAIT=${SLURM_WAIT:-300}

# From 22.05 srun does not take over sbatch's --cpus-per-task: each rank would have one core.
command=(srun --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK})
inside=$python
[ -n "${CONTAINER:-}" ] && inside=python3 && command+=(--container-image="$CONTAINER" --container-workdir="$PWD"
    --container-mounts="$PWD:$PWD${MOUNTS:+,$MOUNTS}")
# shellcheck disable=SC2206  # split at spaces on purpose
arguments=(--config "$CONFIG" ${SETTINGS:+--set $SETTINGS})
command+=("$inside" pretrain/run.py "${arguments[@]}")

in_job "${1:-}" "${command[@]}"

run_dir=$("$python" pretrain/run.py "${arguments[@]}" --print-config |
    PYTHONIOENCODING=utf-8:surrogateescape \
        "$python" -c 'import sys, yaml; print((yaml.safe_load(sys.stdin) or {}).get("run_dir"))')
meant $?
code=$?
case $code in
0) ;;
2 | 130) exit $code ;;
*) # the disk or network of the config, or a kill, as for want of memory
    say "reading the config ended with exit code $code"
    try_again "$SLURM_JOB_ID" $code
    exit $code
    ;;
esac
progress=$run_dir/slurm-$SLURM_JOB_ID.progress # checkpoints, restarts that found no new one

again() { # requeue, unless MAX_RESTARTS starts in a row brought no new checkpoint
    local latest="none" seen="" stuck=0 holder="" names="" new="" folder
    [ -f "$run_dir/lock" ] && read -r _ _ _ holder <"$run_dir/lock"
    # The lock's note counts as long as its writer lives, which empties it when it ends in order.
    if [ -n "$holder" ] && [ "$holder" != - ] && [ "$holder" != "$SLURM_JOB_ID" ] &&
        [ "$(squeue -h -j "$holder" -o %T 2>/dev/null)" = RUNNING ]; then
        say "error: job $holder trains in $run_dir; this one is not requeued beside it"
        exit 2
    fi
    [ -f "$progress" ] && read -r seen stuck <"$progress"
    counts "$stuck" || stuck=0
    # All of them, since a damaged one of a later step may stand there, which a run passes over.
    for folder in "$run_dir"/checkpoints/step-[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]; do
        [ -d "$folder" ] || continue
        latest=${folder##*/} && names+=,$latest
        [[ ,$seen, == *,"$latest",* ]] || new=$latest
    done
    if [ -n "$seen" ] && [ -z "$new" ]; then stuck=$((stuck + 1)); else stuck=0; fi
    latest=${new:-$latest} names=${names:-,none}
    # Without a disk for the note Slurm's count decides, in which all restarts are.
    [ "$stuck" -ge "$MAX_RESTARTS" ] || { mkdir -p "$run_dir" && echo "${names#,} $stuck" >"$progress"; } ||
        stuck=${SLURM_RESTART_COUNT:-0}
    if [ "$stuck" -ge "$MAX_RESTARTS" ]; then
        say "error: $stuck restarts without a new checkpoint (newest: $latest); giving up"
        rm -f "$progress"
        exit "$1"
    fi
    say "exit code $1; newest checkpoint: $latest"
    requeue "$SLURM_JOB_ID" "$1"
}

say "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), nodes $SLURM_JOB_NODELIST"
[ "${SLURM_RESTART_COUNT:-0}" != 0 ] || say "$(printf '%q ' "${command[@]}")" # the same at every start

run "${command[@]}"
meant $?
code=$?
case $code in
0)
    [ -f "$run_dir/FINISHED" ] || { say "exit code 0, and no $run_dir/FINISHED"; again 1; }
    rm -f "$run_dir"/slurm-*.progress # of jobs that were ended by hand, too
    say "finished"
    exit 0
    ;;
2) say "error: a mistake in config or data (above); not requeued" && exit 2 ;;
130) say "stopped by hand; not requeued" && exit 130 ;;
*) again "$code" ;;
esac
