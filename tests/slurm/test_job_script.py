"""The job scripts' own decisions, with commands that stand for Slurm's and the program's."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PYTHON = """#!/bin/bash
case "$*" in
    *--print-config*) $MEANWHILE; echo "run_dir: '$RUN'"; exit $CONFIG_CODE ;;
    *) exec {python} "$@" ;;
esac
"""
SRUN = """#!/bin/bash
mkdir -p "$RUN/checkpoints/$STEP"
exit $RUN_CODE
"""
COMMANDS = {
    "venv/bin/python": PYTHON.format(python=sys.executable),
    "bin/srun": SRUN,
    "bin/scontrol": "#!/bin/bash\n[ $1 = requeue ] && echo ran again\n",
    "bin/squeue": "#!/bin/bash\necho RUNNING\n",
    "bin/sleep": "#!/bin/bash\n",
}


def hear_all() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # a `&` and nohup ignore them
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def job(tmp_path):
    for name, text in COMMANDS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "slurm").symlink_to(ROOT / "slurm")

    def start(
        script: str = "pretrain_large.sh", *arguments: str, **environment: str
    ) -> tuple[int, str]:
        known = {
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "VENV": f"{tmp_path}/venv",
            "RUN": f"{tmp_path}/a run", "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_JOB_NODELIST": "n", "CONFIG_CODE": "0", "RUN_CODE": "1", "MEANWHILE": ":",
        }  # fmt: skip
        done = subprocess.run(
            ["bash", str(ROOT / "slurm" / script), *arguments], env=known | environment,
            capture_output=True, text=True, start_new_session=True, timeout=60,
            preexec_fn=hear_all,
        )  # fmt: skip
        return done.returncode, done.stdout

    return start


SCRIPTS = sorted(p.name for p in (ROOT / "slurm").glob("*.sh") if p.name != "job.sh")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_virtual_environment_that_is_none_is_not_passed_over(job, script, tmp_path):
    (tmp_path / "data_pipeline").mkdir()
    code, said = job(script, "--dry-run", VENV=f"{tmp_path}/vemv")
    assert (code, said) == (2, f"error: VENV: no {tmp_path}/vemv/bin/python\n")


@pytest.mark.parametrize("script", SCRIPTS)
def test_arguments_that_no_script_reads_are_refused(job, script):
    for arguments in (["--config", "mine.yaml"], ["mine.yaml"], ["--dry-run", "mine.yaml"], [""]):
        code, said = job(script, *arguments)
        assert code == 2 and said.startswith(
            f"error: no argument but --dry-run is read: {arguments[0]}"
        )


def test_a_run_whose_checkpoints_advance_is_started_again_whatever_latest_is(job, tmp_path):
    (tmp_path / "a run/checkpoints/latest").mkdir(parents=True)
    limit = {"MAX_RESTARTS": "1"}
    for step in "123":
        assert "ran again" in job(STEP=f"step-0000000{step}", **limit)[1]
    code, said = job(STEP="step-00000003", **limit)
    assert "giving up" in said and code == 1 and "ran again" not in said


def test_folders_that_are_not_the_newest_checkpoint_hide_none(job, tmp_path):
    checkpoints = tmp_path / "a run/checkpoints"
    for other in ("step-00000009", "step-best", "step-00000009.bak", "step-1"):
        (checkpoints / other).mkdir(parents=True)
    os.utime(checkpoints / "step-00000009", (1 << 33, 1 << 33))  # of a clock that was ahead
    assert "ran again" in job(STEP="step-00000001", MAX_RESTARTS="1")[1]
    for step in "23":
        code, said = job(STEP=f"step-0000000{step}", MAX_RESTARTS="1")
        assert "ran again" in said and f"newest checkpoint: step-0000000{step}\n" in said
    assert "giving up" in job(STEP="step-00000003", MAX_RESTARTS="1")[1]


@pytest.mark.parametrize(
    ("code", "tries", "count", "again"),
    [
        (85, "19", 500, True), (85, "20", 20, False), (2, "0", 0, False), (130, "0", 0, False),
        (137, "0", 0, True), (1, "20", 20, False),
        (85, None, 19, True), (85, None, 20, False),  # no disk for the note
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_read_now_is_read_again(job, tmp_path, code, tries, count, again):
    note = tmp_path / "slurm-7.tries"
    note.write_text(tries) if tries else note.mkdir()
    ended, said = job(CONFIG_CODE=str(code), SLURM_RESTART_COUNT=str(count))
    assert ended == (85 if again else code) and ("ran again" in said) == again
    assert note.is_file() == (again and tries is not None)


@pytest.mark.parametrize("count", [b"\xb0", b"0 1", b"08", b"a[$(touch HERE)]", b"9" * 30, b""])
def test_a_damaged_note_ends_no_job_and_runs_nothing(job, tmp_path, count):
    progress, tries = tmp_path / "a run/slurm-7.progress", tmp_path / "slurm-7.tries"
    made = tmp_path / "made"
    count = count.replace(b"HERE", str(made).encode()).replace(b"a[", b"PATH[")
    progress.parent.mkdir()
    progress.write_bytes(b"none " + count + b"\n")
    tries.write_bytes(count + b"\n")
    code, said = job(STEP=".", RUN_CODE="85")
    assert code == 85 and "ran again" in said and progress.read_text() == "none 1\n"
    tries.write_bytes(count + b"\n")
    code, said = job(CONFIG_CODE="85")
    assert code == 85 and "ran again" in said and tries.read_text() == "1\n"
    assert not made.exists()


def test_a_run_dir_that_is_no_utf_8_is_left_to_the_program_to_refuse(job, tmp_path):
    python = PYTHON.format(python=sys.executable)
    python = python.replace("echo \"run_dir: '$RUN'\"", "echo 'run_dir: \"/n\\udce9\"'")
    (tmp_path / "venv/bin/python").write_text(python)
    code, said = job(PYTHONIOENCODING="utf-8", RUN_CODE="2", STEP="none")
    assert code == 2 and "reading the config" not in said


def test_notes_go_where_no_start_will_read_them(job, tmp_path):
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run/slurm-3.progress").write_text("step-00000001 0\n")  # of a cancelled job
    (tmp_path / "a run/FINISHED").touch()
    assert job(RUN_CODE="0", STEP="step-00000001")[0] == 0
    assert not list((tmp_path / "a run").glob("*.progress"))
    (tmp_path / "bin/scontrol").write_text("#!/bin/bash\nexit 1\n")
    (tmp_path / "venv/bin/python").write_text("#!/bin/bash\nexit 85\n")
    for script in ("pretrain_large.sh", "finetune_glue.sh"):
        code, said = job(script)
        assert code == 85 and "Slurm did not requeue the job" in said
        assert not list(tmp_path.glob("*.tries"))


@pytest.mark.parametrize("count", ["0", "1"])
def test_the_term_of_a_requeue_is_no_news_and_lines_are_dated(job, tmp_path, count):
    # As Slurm does with a job that it has requeued; the time limit's USR1 may come then, too.
    (tmp_path / "bin/scontrol").write_text("#!/bin/bash\nkill -USR1 $PPID; kill -TERM $PPID\n")
    code, said = job(STEP="step-00000001", RUN_CODE="85", SLURM_RESTART_COUNT=count)
    assert code == 85
    lines = said.splitlines()
    dates = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")
    assert all(map(dates.match, lines))
    plain = [dates.sub("", line) for line in lines]
    command = [plain.pop(1)] if count == "0" else []  # the same at every start
    assert all(re.match("srun .* pretrain/run.py --config ", line) for line in command)
    assert plain == [
        f"job 7, start {int(count) + 1}, nodes n",
        "exit code 85; newest checkpoint: step-00000001",
        "requeue: job 7",
    ]


@pytest.mark.parametrize(("name", "ends", "again"), [("INT", 130, False), ("HUP", 85, True)])
def test_other_signals_of_scancel_end_in_a_checkpoint(job, tmp_path, name, ends, again):
    stops = "trap 'exit 85' USR1; kill -$NAME $PPID; while :; do :; done"
    (tmp_path / "bin/srun").write_text(f"#!/bin/bash\n{stops}\n")
    code, said = job(NAME=name)
    assert code == ends and f"{name}: checkpoint, then stop" in said
    assert ("ran again" in said) == again


def test_a_signal_that_ends_the_reading_of_the_config_too_is_a_requeue(job, tmp_path):
    code, said = job(MEANWHILE="kill -HUP 0")  # as `scancel --full` does
    assert code == 85 and "ran again" in said


@pytest.mark.parametrize(
    ("name", "state", "ends"),
    [("INT", "echo RUNNING", 130), ("TERM", "echo COMPLETING", 85), ("TERM", "exit 1", 85)],
)
def test_what_is_ended_by_hand_is_not_requeued_at_the_time_limit(job, tmp_path, name, state, ends):
    """state: what squeue does; after scancel the controller may not answer."""
    stops = (
        'trap : USR1; p="/usr/bin/sleep 0.3"; kill -$NAME $PPID; $p; kill -USR1 $PPID; $p; exit 85'
    )
    (tmp_path / "bin/srun").write_text(f"#!/bin/bash\n{stops}\n")
    (tmp_path / "bin/squeue").write_text(f"#!/bin/bash\n{state}\n")
    code, said = job(NAME=name)
    assert code == ends and "ran again" not in said, said


def test_the_term_of_a_requeue_that_ends_the_wait_for_it_is_no_refusal(job, tmp_path):
    (tmp_path / "bin/sleep").write_text("#!/bin/bash\nkill -TERM $$\n")
    code, said = job(STEP="step-00000001")
    assert code == 1 and "ran again" in said and "did not requeue" not in said


@pytest.mark.parametrize(("count", "again"), [("1", True), ("2", False)])
def test_restarts_come_to_an_end_without_a_disk_for_their_number(job, tmp_path, count, again):
    (tmp_path / "a run/slurm-7.progress").mkdir(parents=True)
    code, said = job(STEP="step-00000001", MAX_RESTARTS="2", SLURM_RESTART_COUNT=count)
    assert code == 1 and ("ran again" in said) == again and ("giving up" in said) != again


def test_a_number_of_restarts_that_is_none_is_refused(job):
    code, said = job(MAX_RESTARTS="three", STEP="step-00000001")
    assert code == 2 and "MAX_RESTARTS=three" in said and "again" not in said


@pytest.mark.parametrize(
    ("program", "seconds", "tries", "ends", "after"),
    [
        ("kill -KILL $$", 0, "19", 85, "20"),
        ("kill -KILL $$", 9999, "20", 137, None),
        ("exit 85", 0, "20", 85, None),
        ("exit 85", 9999, "20", 85, ""),
        ("kill -USR1 $PPID; exit 85", 0, "20", 85, ""),
    ],
)
@pytest.mark.parametrize("script", ["finetune_glue.sh", "pretrain_sweep.sh"])
def test_a_task_of_an_array_that_nobody_stopped_runs_again_not_for_ever(
    job, tmp_path, script, program, seconds, tries, ends, after
):
    """after: the note for the next start; None: there is none."""
    (tmp_path / "venv/bin/python").write_text(f"#!/bin/bash\n{program}\n")
    note = tmp_path / "slurm-7_3.tries"
    note.write_text(tries)
    task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "500"}
    code, said = job(script, CONFIGS="c.yaml", SECONDS=str(seconds), **task)
    assert code == ends and ("ran again" in said) == (after is not None)
    assert ("21 starts in a row ended so; giving up" in said) == (after is None)
    assert (note.read_text().strip() if note.exists() else "") == (after or "")
