#!/usr/bin/env bash
# GLUE's grid as a job array, then one job that chooses the best of each task and reports:
#
#   slurm/finetune_glue.sh [-n TASKS] [-c CONFIG] [KEY=VALUE ...]
#
# Every array task runs the same command and takes whatever job is free (a lock on its folder), so
# TASKS is only how many GPUs may work at once. A task that reaches its time limit writes a
# checkpoint and is requeued; starting all of it again goes on where it stopped. Site settings
# (partition, account, time) come from SBATCH_* variables or from `sbatch` options in SBATCH_ARGS;
# FINETUNE_GPUS (default 1; 0 for none) is the number of GPUs of an array task.
set -euo pipefail
# Slurm runs a copy of this file from its spool folder.
if [ -n "${FINETUNE_ROLE:-}" ]; then
    cd "$SLURM_SUBMIT_DIR"
else
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
fi

if [ -z "${FINETUNE_ROLE:-}" ]; then
    tasks=8 config=configs/finetune_glue.yaml
    while getopts "n:c:h" option; do
        case $option in
            n) tasks=$OPTARG ;;
            c) config=$OPTARG ;;
            *) sed -n '2,10s/^# \{0,1\}//p' slurm/finetune_glue.sh; exit 2 ;;
        esac
    done
    shift $((OPTIND - 1))
    overrides=()
    [ $# -eq 0 ] || overrides=(--set "$@")
    # Mistakes show here, not in the queue.
    .venv/bin/python finetune/run.py --config "$config" "${overrides[@]}" --print-config >/dev/null
    mkdir -p runs/slurm
    script=slurm/finetune_glue.sh
    gpus=()
    [ "${FINETUNE_GPUS:-1}" = 0 ] || gpus=(--gpus="${FINETUNE_GPUS:-1}")
    # shellcheck disable=SC2086
    array=$(FINETUNE_ROLE=work sbatch --parsable --export=ALL --array="0-$((tasks - 1))" --requeue \
        --signal=B:USR1@120 "${gpus[@]}" --job-name=glue --output=runs/slurm/%x-%A_%a.log \
        ${SBATCH_ARGS:-} "$script" --config "$config" "${overrides[@]}")
    # shellcheck disable=SC2086
    last=$(FINETUNE_ROLE=collect sbatch --parsable --export=ALL --dependency="afterok:$array" \
        --kill-on-invalid-dep=yes --job-name=glue-report --output=runs/slurm/%x-%j.log \
        ${SBATCH_ARGS:-} "$script" --config "$config" "${overrides[@]}")
    echo "array $array ($tasks tasks), report $last; logs in runs/slurm"
    exit 0
fi

python=.venv/bin/python
if [ "$FINETUNE_ROLE" = collect ]; then
    exec $python finetune/run.py "$@" --collect
fi
# Slurm warns this shell two minutes before the end; the job's processes are told from here.
$python finetune/run.py "$@" &
child=$!
trap 'kill -USR1 $child' USR1 TERM
code=0
wait $child || code=$?
# A signal ends `wait` early (code above 128) while the child still writes its checkpoint.
while kill -0 $child 2>/dev/null; do
    code=0
    wait $child || code=$?
done
if [ $code = 85 ]; then
    id=$SLURM_JOB_ID
    echo "requeued: $id"
    exec scontrol requeue "$id"
fi
exit $code
