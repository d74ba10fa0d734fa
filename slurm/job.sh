# Sourced by the job scripts, first of all: a signal that finds no trap ends a job for good.

[ $# = 0 ] || [ "$*" = --dry-run ] ||
    { echo "error: no argument but --dry-run is read: $*; set the variables that the script lists"; exit 2; }

[ -z "${VENV:-}" ] || [ -x "$VENV/bin/python" ] || { echo "error: VENV: no $VENV/bin/python"; exit 2; }
VENV=${VENV:-$PWD/.venv}
python=python3
[ -x "$VENV/bin/python" ] && python=$VENV/bin/python && PATH=$VENV/bin:$PATH # for a LAUNCHER
export PYTHONUNBUFFERED=1

say() { echo "$(date '+%F %T') $*"; } # one log holds all restarts

pid="" asked=""
stop() {
    # What is ended by hand, or by scancel, stays so at the time limit.
    [ "$asked" = INT ] || { [ "$1" = USR1 ] && [ -n "$asked" ]; } || asked=$1
    case $asked in
    USR1) say "USR1 (time limit or preemption): checkpoint, then stop" ;;
    TERM) say "TERM (cancelled, requeued, or a node is down): checkpoint, then stop" ;;
    *) say "$asked: checkpoint, then stop" ;;
    esac
    [ -z "$pid" ] || kill -USR1 "$pid" 2>/dev/null
}
trap 'stop USR1' USR1 # before the time limit, and at preemption
trap 'stop TERM' TERM
trap 'stop HUP' HUP
trap 'stop INT' INT # by hand, as Ctrl-C: not requeued

run() { # a command that stops at USR1; its exit code, 85 if a signal came before it
    [ -z "$asked" ] || return 85
    "$@" &
    pid=$!
    [ -z "$asked" ] || kill -USR1 "$pid"
    # A trap ends `wait` early, with a code of its own; the last one gives the command's.
    while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done
    wait "$pid"
}

meant() { # meant CODE: returns the code of a command that a signal to this script may have ended
    if [ -z "$asked" ] || [ "$1" = 0 ] || [ "$1" = 2 ]; then return "$1"; fi
    [ "$asked" = INT ] && return 130
    # Python met it before it hears any, or bash 5.2 has lost the code of what ended in the trap: -1.
    if [ "$1" -gt 128 ] || [ "$1" -lt 0 ]; then return 85; fi
    return "$1"
}

requeue() { # requeue JOB CODE: ends this shell, with CODE where the job does not run again
    local code=$2 state
    trap 'exit $code' TERM # the requeue's own: it is no news
    trap '' USR1 HUP INT   # which would end the wait for it
    for pause in 5 10 0; do
        if [ "$asked" = USR1 ] || ! state=$(squeue -h -j "$1" -o %T); then
            # A controller that does not answer says nothing of the job: a TERM may be that of scancel.
            [ "$asked" = TERM ] && state=unknown || state=RUNNING
        elif [ "$state" != RUNNING ]; then
            # By scancel, or to requeue it itself. At a time limit USR1 came first.
            say "Slurm itself ends or requeues the job; not requeued from here"
            exit "$2"
        fi
        if [ "$state" = RUNNING ] && say "requeue: job $1" && scontrol requeue "$1"; then
            sleep 60 &           # which the requeue does not let end
            wait $! || exit "$2" # its TERM met that first
            break
        fi
        [ $pause != 0 ] || rm -f "${note:-}" # no start will read it
        sleep $pause
    done
    say "error: Slurm did not requeue the job: submit it again to go on"
    exit "$2"
}

try_again() { # try_again JOB CODE: without a signal it is a disk or network that did not answer, or a
    # process that was killed: not for ever.
    if [ -n "$asked" ] || { [ "$2" = 85 ] && [ "$SECONDS" -gt 3600 ]; }; then requeue "$1" 85; fi
    tries=$((tries + 1))
    # Without a disk for the note Slurm's count decides, in which those by a signal are too.
    if [ "$tries" -le 20 ] && { echo "$tries" >"$note" || [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; }; then
        requeue "$1" 85
    fi
    say "error: $tries starts in a row ended so; giving up: submit it again to go on"
}

counts() { # counts WORD: whether it is a number; bash runs what else a note may hold, or ends by it
    [[ $1 =~ ^(0|[1-9][0-9]{0,5})$ ]]
}

in_job() { # in_job FLAG COMMAND...: FLAG --dry-run prints the command and ends; else there is a job
    if [ "$1" = --dry-run ]; then
        printf 'cd %q\n' "$PWD"
        printf '%q ' "${@:2}"
        echo
        exit 0
    fi
    [ -n "${SLURM_JOB_ID:-}" ] || { echo "error: start it with sbatch, or see --dry-run"; exit 2; }
    task=$SLURM_JOB_ID # which for the last task of an array is the id of them all
    [ -n "${SLURM_ARRAY_JOB_ID:-}" ] && task=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    note=$PWD/slurm-$task.tries tries=0 # how many starts in a row ended, and nobody asked for it
    [ -f "$note" ] && read -r tries <"$note"
    counts "$tries" || tries=0
    rm -f "$note"
}

array_job() { # array_job FLAG COMMAND...: the whole of an array's task
    in_job "$@"
    shift
    say "task $task, start $((${SLURM_RESTART_COUNT:-0} + 1))"
    run "$@"
    meant $?
    local code=$?
    # 137: killed, as for want of memory, and nobody said why.
    [ $code = 85 ] || [ $code = 137 ] && try_again "$task" $code
    exit $code
}
