"""The launchers on a real Slurm of two nodes: run, checkpoint, requeue, resume."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.load import load
from pretrain import checkpoint
from pretrain.config import PretrainConfig
from pretrain.fragments import read_weights
from tests.datasets import write_dataset
from tests.slurm.cluster import Cluster, why_not
from tests.test_launchers import RANK, SIGNALS, table

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(why_not() is not None, reason=f"no Slurm cluster here: {why_not()}"),
]
ROOT = Path(__file__).resolve().parents[2]
VOCAB = 200

SETTINGS = """
run_dir: RUN
device: cpu
threads: 1
model: {hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 64,
        max_position_embeddings: 64}
engine: {precision: fp32}
data: {dir: DATA, workers: 1}
phases:
  - {max_seq_len: 32, row_len: 128, rows_per_step: 4, sequences_per_step: 16, max_predictions: 5,
     micro_batch_rows: 1, steps: STEPS, learning_rate: 1.0e-2}
  - {max_seq_len: 64, row_len: 128, rows_per_step: 4, sequences_per_step: 8, max_predictions: 10,
     micro_batch_rows: 1, steps: 5, learning_rate: 5.0e-3}
checkpoint: {every_steps: 100000}
evaluation: {every_steps: 0}
logging: {every_steps: 1}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    documents = [
        [rng.integers(5, VOCAB, rng.integers(3, 20)).tolist() for _ in range(12)] for _ in range(60)
    ]
    write_dataset(folder, documents, heldout=documents[:5], vocab=VOCAB)
    return folder


def config(folder: Path, data: Path, steps: int, run: str = "run") -> Path:
    path = folder / "run.yaml"
    text = SETTINGS.replace("RUN", str(folder / run)).replace("DATA", str(data))
    path.write_text(text.replace("STEPS", str(steps)))
    return path


def submit(cluster: Cluster, folder: Path, path: Path, *flags: str) -> str:
    venv = Path(sys.executable).parents[1]
    return cluster.sbatch(
        "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1",
        "--overcommit", "--time=10", f"--chdir={ROOT}", f"--output={folder}/log",
        f"--export=ALL,CONFIG={path},VENV={venv}", *flags, str(ROOT / "slurm/pretrain_large.sh"),
    )  # fmt: skip


def steps_done(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def until(true: object, seconds: float, log: Path) -> None:
    deadline = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
        time.sleep(0.1)


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    return read_weights(checkpoint.resolve(run) / "engine")


@pytest.fixture(scope="module")
def straight(cluster: Cluster, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    job = submit(cluster, folder, config(folder, data, STEPS))
    assert cluster.wait(job) == "COMPLETED", (folder / "log").read_text()
    return folder


STEPS = 400


def test_two_nodes_train_together(straight: Path) -> None:
    log = (straight / "log").read_text()
    assert "2 process(es)" in log and "finished" in log
    state = checkpoint.read_state(checkpoint.resolve(straight / "run"))
    assert (state.position.step, state.world_size) == (STEPS + 5, 2)


@pytest.mark.parametrize("how", ["USR1", "preempted"])
def test_a_signal_ends_in_a_checkpoint_a_requeue_and_the_same_weights(
    cluster: Cluster, data: Path, straight: Path, tmp_path: Path, how: str
) -> None:
    partition = "--partition=low" if how == "preempted" else "--partition=main"
    job = submit(cluster, tmp_path, config(tmp_path, data, STEPS), partition)
    log = tmp_path / "log"
    until(lambda: steps_done(tmp_path / "run") >= 10, 120, log)
    if how == "USR1":
        cluster.run("scancel", "--batch", "--signal=USR1", job)
    else:
        other = cluster.sbatch(
            "--partition=main", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
        )
    assert cluster.wait(job) == "COMPLETED", log.read_text()
    text = log.read_text()
    assert "SIGUSR1: stopped at step" in text and "resumed from" in text and "start 2" in text
    if how == "preempted":
        assert cluster.state(other) == "COMPLETED"
    ours, theirs = final_weights(tmp_path / "run"), final_weights(straight / "run")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_a_killed_rank_is_requeued_and_a_user_mistake_is_not(
    cluster: Cluster, data: Path, tmp_path: Path
) -> None:
    path = config(tmp_path, data, STEPS)
    path.write_text(path.read_text().replace("every_steps: 100000", "every_steps: 20"))
    job = submit(cluster, tmp_path, path)
    log = tmp_path / "log"
    until(lambda: steps_done(tmp_path / "run") >= 30, 120, log)
    cluster.run("scancel", "--signal=KILL", f"{job}.0")
    assert cluster.wait(job) == "COMPLETED", log.read_text()
    assert "requeue:" in log.read_text() and "resumed from" in log.read_text()

    path.write_text(path.read_text().replace("rows_per_step: 4", "rows_per_step: 3"))
    path.write_text(path.read_text().replace(str(tmp_path / "run"), str(tmp_path / "run2")))
    job = submit(cluster, tmp_path, path, f"--output={tmp_path}/log2")
    assert cluster.wait(job) == "FAILED"
    assert "not requeued" in (tmp_path / "log2").read_text()


def test_a_node_that_goes_down_is_waited_for_and_the_run_goes_on(
    cluster: Cluster, data: Path, straight: Path, tmp_path: Path
) -> None:
    path = config(tmp_path, data, STEPS)
    path.write_text(path.read_text().replace("every_steps: 100000", "every_steps: 20"))
    job, log = submit(cluster, tmp_path, path), tmp_path / "log"
    until(lambda: (tmp_path / "run/checkpoints/latest").exists(), 120, log)
    cluster.run("scontrol", "update", "nodename=node1", "state=down", "reason=test")
    try:
        until(lambda: cluster.state(job) == "PENDING", 60, log)
    finally:
        # slurmd is well, so the node may have come back by itself already.
        cluster.run("scontrol", "update", "nodename=node1", "state=resume", check=False)
    assert cluster.wait(job) == "COMPLETED", log.read_text()
    text = log.read_text()
    assert "start 2" in text and "resumed from" in text
    ours, theirs = final_weights(tmp_path / "run"), final_weights(straight / "run")
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_before_its_time_limit_a_job_is_requeued(
    cluster: Cluster, data: Path, tmp_path: Path
) -> None:
    # Slurm looks every 30 s, and sends what falls due before its next look: not in the first second
    # of a job here, when there is no script yet and the signal would be lost.
    job = submit(
        cluster, tmp_path, config(tmp_path, data, 1_000_000), "--time=2", "--signal=B:USR1@60"
    )
    log = tmp_path / "log"
    try:
        until(lambda: log.exists() and "resumed from" in log.read_text(), 240, log)
    finally:
        text = log.read_text() if log.exists() else ""
        cluster.cancel(job)
    assert "USR1 (time limit or preemption)" in text and "SIGUSR1: stopped at step" in text
    assert "start 2" in text and "TIME LIMIT" not in text


@pytest.mark.parametrize("requeue", ["--requeue", "--no-requeue"])
def test_the_doctor_compares_the_jobs_time_with_the_plan(
    cluster: Cluster, data: Path, tmp_path: Path, requeue: str
) -> None:
    path = config(tmp_path, data, 10**9)
    ask = f"{sys.executable} -m pretrain doctor --config {path} --signal-lead 30"
    arguments = ("--wait", "--time=10", requeue, f"--output={tmp_path}/log", f"--chdir={ROOT}")
    cluster.run("sbatch", *arguments, f"--wrap={ask}", check=False)
    text = " ".join((tmp_path / "log").read_text().split())
    planned = r"hours \S+ days planned on 1 .* the job has [\d.]+ min: \d+ starts"
    assert re.search(planned, text), text
    mends = re.search(r"-> sbatch --requeue, or --time=\d+:00:00 or more", text)
    assert bool(mends) == (requeue == "--no-requeue"), text


def test_the_full_geometry_is_accepted_by_the_scheduler(cluster: Cluster) -> None:
    script = str(ROOT / "slurm/pretrain_large.sh")
    said = cluster.run("sbatch", "--test-only", "--nodes=2", f"--chdir={ROOT}", script)
    assert "to start at" in said and "16 processors" not in said.split("using")[0]


def test_the_shipped_config_starts_on_many_ranks_and_passes_into_phase_2(
    cluster: Cluster, tmp_path: Path
) -> None:
    """configs/pretrain_large.yaml as it is, but for small sequences and a small model. Four ranks
    that may take eight times its rows at once divide a step as its 32 GPUs do."""
    rng = np.random.default_rng(0)
    documents = [
        [rng.integers(5, VOCAB, rng.integers(3, 20)).tolist() for _ in range(40)]
        for _ in range(600)
    ]
    write_dataset(tmp_path / "data", documents, heldout=documents[:9], vocab=VOCAB)
    shipped = load(ROOT / "configs/pretrain_large.yaml", PretrainConfig).phases
    small = {
        "device": "cpu",
        "run_dir": tmp_path / "run",
        "data.dir": tmp_path / "data",
        "model.compile": "false",  # two minutes of a C++ compiler
        "model.hidden_size": 32,
        "model.num_hidden_layers": 1,
        "model.num_attention_heads": 2,
        "model.intermediate_size": 64,
        # About 1,280 and 320 rows: no multiple of what 32 GPUs need, if that is not asked for.
        "phases.0.max_seq_len": 32,
        "phases.0.row_len": 64,
        "phases.0.sequences_per_step": 2900,
        "phases.1.max_seq_len": 64,
        "phases.1.row_len": 128,
        "phases.1.sequences_per_step": 720,
    }
    for i, phase in enumerate(shipped):
        small[f"phases.{i}.steps"] = 2
        small[f"phases.{i}.micro_batch_rows"] = 8 * phase.micro_batch_rows
    settings = " ".join(f"{k}={v}" for k, v in small.items())
    job = cluster.sbatch(
        "--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1",
        "--time=10", f"--chdir={ROOT}", f"--output={tmp_path}/log",
        f"--export=ALL,VENV={Path(sys.executable).parents[1]},SETTINGS={settings}",
        str(ROOT / "slurm/pretrain_large.sh"),
    )  # fmt: skip
    assert cluster.wait(job, 240) == "COMPLETED", (tmp_path / "log").read_text()
    log = (tmp_path / "log").read_text()
    assert "4 process(es)" in log and "finished" in log
    state = checkpoint.read_state(checkpoint.resolve(tmp_path / "run"))
    assert (state.position.step, state.position.phase, state.world_size) == (4, 1, 4)


def stand_in(folder: Path, step: str) -> str:
    """A VENV whose python is the real one, but for a step of a job: that is the shell's `step`."""
    python = folder / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f"""#!/bin/bash
        touch {folder}/began
        [ -z "${{SLURM_STEP_ID:-}}" ] && exec {sys.executable} "$@"
        {step}
        """
    )
    python.chmod(0o755)
    return f"VENV={folder}/venv"


def submit_stand_in(cluster: Cluster, path: Path, step: str, *flags: str, more: str = "") -> str:
    """slurm/pretrain_large.sh on the config `path`, with one task of `step` for the training."""
    folder = path.parent
    return cluster.sbatch(
        "--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1",
        "--overcommit", "--time=10", f"--chdir={ROOT}", f"--output={folder}/log",
        f"--export=ALL,CONFIG={path},{stand_in(folder, step)}{more}", *flags,
        str(ROOT / "slurm/pretrain_large.sh"),
    )  # fmt: skip


def finishes(folder: Path) -> str:
    """Shell: what a run leaves that has done all its steps."""
    return f"mkdir -p {folder}/run && echo 1 >{folder}/run/FINISHED && exit 0"


WAITS_FOR_USR1 = "trap 'exit 85' USR1; echo up; for i in $(seq 600); do sleep 0.1; done; exit 3"


def test_srun_returns_what_the_table_of_launchers_says(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    rows = table()
    place = rows["the ranks end with"].index("`srun`")
    said = {first: cells[place] for first, cells in rows.items()}

    def command(*ends: str) -> list[str | Path]:
        flags = ["--ntasks=2", "--nodes=1", "--overcommit", "--mem=1G"]
        return ["srun", *flags, sys.executable, script, *ends]

    def code(*ends: str) -> str:
        done = subprocess.run(command(*ends), env=cluster.environment, timeout=60)
        return str(done.returncode)

    assert code("0", "0") == said["0"]
    for end in ("2", "85", "130"):
        assert code(end, end) == said["2, 85 or 130"].replace("the same", end)
    for ends in (("killed", "85"), ("85", "killed")):
        assert code(*ends) == said["one killed (`kill -9`), the others 85"]
    for row, number in SIGNALS.items():
        with subprocess.Popen(command("waits", "waits"), env=cluster.environment) as srun:
            until(lambda: len(list(tmp_path.glob("rank.py-*"))) == 2, 60, script)
            srun.send_signal(number)
            assert str(srun.wait(60)) == said[row], row
        for mark in tmp_path.glob("rank.py-*"):
            mark.unlink()


@pytest.mark.parametrize(
    ("variable", "arguments"),
    [("", ["--set", "phases.0.steps=abc"]), ("", ["--no-such-flag"]), ("MASTER_PORT=abc", [])],
)
def test_a_mistake_that_every_rank_meets_has_its_own_code_whoever_comes_late(
    cluster: Cluster, data: Path, tmp_path: Path, variable: str, arguments: list[str]
) -> None:
    """srun ends the other with the first that leaves, and returns the larger of their codes."""
    late = 'sleep $((2 * SLURM_PROCID)); exec env "$@"'
    command = [sys.executable, "pretrain/run.py", "--config", config(tmp_path, data, 9), *arguments]
    done = subprocess.run(
        ["srun", "--nodes=2", "--ntasks=2", "--overcommit", "--mem=2G", "--kill-on-bad-exit=1",
         f"--chdir={ROOT}", "bash", "-c", late, "late", *filter(None, [variable]), *command],
        env=cluster.environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr


def test_scancel_ends_the_job_after_a_checkpoint(
    cluster: Cluster, data: Path, tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path, config(tmp_path, data, 1_000_000))
    log = tmp_path / "log"
    until(lambda: steps_done(tmp_path / "run") >= 10, 120, log)
    cluster.run("scancel", job)
    until(lambda: cluster.state(job) != "RUNNING", 60, log)
    time.sleep(10)  # a requeued job waits 5 s here
    found = cluster.state(job)
    cluster.cancel(job)
    assert found == "CANCELLED" and "start 2" not in log.read_text(), log.read_text()
    assert "itself ends or requeues the job; not requeued" in log.read_text()
    assert checkpoint.resolve(tmp_path / "run").exists()


@pytest.mark.parametrize(("ends", "code"), [("exit 7", 7), ("exit 0", 1)])
def test_restarts_without_a_first_checkpoint_come_to_an_end(
    cluster: Cluster, tmp_path: Path, ends: str, code: int
) -> None:
    """With a run_dir that the YAML of --print-config spreads over lines. An end with 0 that left no
    RUN/FINISHED is none."""
    run = "a folder with spaces " * 5 + "x"
    path = config(tmp_path, tmp_path, 1, run)
    job = submit_stand_in(cluster, path, ends, more=",MAX_RESTARTS=2")
    try:
        assert cluster.wait(job, 90) == "FAILED", (tmp_path / "log").read_text()
    finally:
        cluster.cancel(job)
    log = (tmp_path / "log").read_text()
    assert "start 3" in log and "start 4" not in log
    assert "2 restarts without a new checkpoint (newest: none); giving up" in log
    assert f"ExitCode={code}:0" in cluster.run("scontrol", "-o", "show", "job", job)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [run, "began", "log", "run.yaml", "venv"]
    )


def test_a_node_whose_slurmstepd_is_killed_is_not_waited_for(
    cluster: Cluster, tmp_path: Path
) -> None:
    path = config(tmp_path, tmp_path, 1)
    dies = f"[ $SLURM_NODEID = 0 ] && touch {tmp_path}/again && kill -9 $PPID"
    ends = f"[ -e {tmp_path}/again ] && {finishes(tmp_path)}; sleep 1; {dies}; sleep 1; exit 85"
    job = submit_stand_in(cluster, path, ends, "--nodes=2", more=",SLURM_WAIT=5")
    try:
        assert cluster.wait(job) == "COMPLETED", (tmp_path / "log").read_text()
    finally:
        cluster.cancel(job)
    assert "exit code 85" in (tmp_path / "log").read_text()


def test_a_job_is_not_requeued_beside_one_that_trains_in_its_folder(
    cluster: Cluster, tmp_path: Path
) -> None:
    other = cluster.sbatch("--nodes=1", "--overcommit", "--output=/dev/null", "--wrap=sleep 600")
    path = config(tmp_path, tmp_path, 1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/lock").write_text(f"0-0 7 node9 {other}\n")
    until(lambda: cluster.state(other) == "RUNNING", 30, tmp_path / "log")
    try:
        job = submit_stand_in(cluster, path, "exit 85")
        assert cluster.wait(job) == "FAILED", (tmp_path / "log").read_text()
    finally:
        cluster.cancel(other)
    assert f"error: job {other} trains in {tmp_path}/run" in (tmp_path / "log").read_text()
    assert "ExitCode=2:0" in cluster.run("scontrol", "-o", "show", "job", job)


def test_a_requeue_that_slurm_refuses_is_not_a_success(cluster: Cluster, tmp_path: Path) -> None:
    path = config(tmp_path, tmp_path, 1)
    job = submit_stand_in(cluster, path, WAITS_FOR_USR1, "--no-requeue")
    log = tmp_path / "log"
    until(lambda: log.exists() and "up" in log.read_text(), 30, log)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    assert cluster.wait(job) == "FAILED", log.read_text()
    assert "did not requeue" in log.read_text()
    assert "ExitCode=85:0" in cluster.run("scontrol", "-o", "show", "job", job)


def test_usr1_while_the_script_reads_its_config_is_requeued(
    cluster: Cluster, tmp_path: Path
) -> None:
    step = f"[ -e {tmp_path}/signalled ] && {finishes(tmp_path)}; {WAITS_FOR_USR1}"
    job, log = submit_stand_in(cluster, config(tmp_path, tmp_path, 1), step), tmp_path / "log"
    until(lambda: (tmp_path / "began").exists(), 30, log)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    (tmp_path / "signalled").touch()
    assert cluster.wait(job) == "COMPLETED", log.read_text()
    assert "USR1 (time limit or preemption)" in log.read_text() and "start 2" in log.read_text()


@pytest.mark.parametrize("script", ["pretrain_large.sh", "prepare_data.sh"])
def test_a_task_of_the_step_has_the_cores_that_the_job_asked_for(
    cluster: Cluster, tmp_path: Path, script: str
) -> None:
    """Slurm 22.05 gives a step one core a task unless srun is told, which its own record shows."""
    show = f'scontrol --oneliner show step "$SLURM_JOB_ID.$SLURM_STEP_ID" >{tmp_path}/step'
    venv = stand_in(tmp_path, f"{show}; {finishes(tmp_path)}")
    job = cluster.sbatch(
        "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=3", "--gpus-per-node=2", "--time=5",
        "--mem-per-cpu=10M", f"--chdir={ROOT}", f"--output={tmp_path}/log",
        f"--export=ALL,CONFIG=configs/pretrain_demo.yaml,{venv},MPI=none,"
        f"SETTINGS=run_dir={tmp_path}/run",
        str(ROOT / "slurm" / script),
    )  # fmt: skip
    assert cluster.wait(job) == "COMPLETED", (tmp_path / "log").read_text()
    assert " TresPerStep=cpu:12 " in (tmp_path / "step").read_text()


def test_ranks_of_two_nodes_meet_whatever_is_in_their_memory(cluster: Cluster) -> None:
    """What a rank has freed is what its MPI's address may lie in, and be sent with."""
    code = (
        "import os; sizes = [520 + os.getpid() * i % 3480 for i in range(20000)];"
        "freed = list(map(os.urandom, sizes)); kept = freed[::2]; del freed;"
        "from data_pipeline.corpus.prepare import join_ranks; print('rank of', join_ranks().size)"
    )
    said = cluster.run(
        "srun", "--mpi=pmi2", "--nodes=2", "--ntasks=2", "--overcommit", "--kill-on-bad-exit=1",
        f"--chdir={ROOT}", sys.executable, "-c", code,
    )  # fmt: skip
    assert said.count("rank of 2") == 2, said


@pytest.mark.parametrize(
    ("script", "command"),
    [
        ("pretrain_large.sh", "pretrain/run.py --config c.yaml --set seed=1 device=cpu"),
        ("prepare_data.sh", "-m data_pipeline prepare --config c.yaml --set seed=1 device=cpu"),
    ],
)
def test_dry_run_prints_the_exact_command(script: str, command: str) -> None:
    environment = os.environ | {"CONFIG": "c.yaml", "SETTINGS": "seed=1 device=cpu"}
    for cores in ("", "7"):
        done = subprocess.run(
            ["bash", str(ROOT / "slurm" / script), "--dry-run"],
            env=environment | {"SLURM_CPUS_PER_TASK": cores},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert command in done.stdout
        assert ("--cpus-per-task" in done.stdout) == bool(cores)
        assert not cores or " --cpus-per-task=7 " in done.stdout


def test_a_container_begins_in_the_checkout_and_sees_what_is_mounted() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "slurm/pretrain_large.sh"), "--dry-run"],
        env=os.environ | {"CONTAINER": "image", "MOUNTS": "/data:/data"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    words = shlex.split(done.stdout.splitlines()[1])
    assert f"--container-workdir={ROOT}" in words
    assert f"--container-mounts={ROOT}:{ROOT},/data:/data" in words
    assert words[words.index("pretrain/run.py") - 1] == "python3"  # the image's own
