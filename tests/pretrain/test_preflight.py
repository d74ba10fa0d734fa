"""Before the first step: what a rank finds wrong is refused by all; who is slow is named."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import resource
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from configs.load import load
from core import files
from core.errors import TryAgain, UserError
from data_pipeline.corpus.manifest import load_manifest
from pretrain import deepspeed_door, distributed, preflight
from pretrain import doctor as doctor_of
from pretrain.checkpoint import Checkpoints
from pretrain.config import PretrainConfig
from pretrain.doctor import Finding, Job
from pretrain.preflight import Health
from tests import gloo, soak

ALONE = distributed.World(0, 1, 0, 1, "alone", torch.device("cpu"), None)


def refusals(rank: int, size: int, data: Path, out: Path) -> dict[str, str]:
    world = distributed.start("cpu")
    first = data / f"{load_manifest(data).shards[0].name}.tar"

    def said(overrides: list[str] = (), run_dir: Path = out / "run") -> str:
        sets = [f"data.dir={data}", f"run_dir={run_dir}", *overrides]
        config = load(data / "run.yaml", PretrainConfig, sets)
        try:
            with preflight.run_folder(config, world):
                preflight.check(config, world)
        except UserError as error:
            return str(error)
        return "nothing"

    def doctor(*sets: str, lead: float = 300, job: Job | None = None) -> list[Finding]:
        sets = (f"data.dir={data}", f"run_dir={out}/looked at/run", *sets)
        return doctor_of.examine(load(data / "run.yaml", PretrainConfig, sets), world, lead, job)

    found = {"well": said(), "config": said([f"seed={rank}"])}
    found["doctor"] = doctor()
    # More steps than the disk has room for checkpoints, hours than the job; no time to write one.
    late = "checkpoint.keep_last=1000000000", "checkpoint.every_steps=1", "phases.0.steps=900000000"
    found["doctor, late"] = doctor(*late, lead=1e-9, job=Job(3600, requeues=False))
    found["doctor, rows"] = doctor("phases.0.rows_per_step=3", "phases.0.sequences_per_step=3")
    found["doctor, no GPU"] = doctor("device=cuda")
    found["doctor, a key"] = doctor('engine.deepspeed={"wall_clock_breakdwn": true}')
    monitor = {"enabled": True, "nope": 1, "output_path": f"{out}/monitored"}
    found["doctor, a monitor"] = doctor(f"engine.deepspeed={json.dumps({'csv_monitor': monitor})}")
    (out / "tuned/mrpc/lr=2e-05").mkdir(parents=True, exist_ok=True)
    (out / "tuned/mrpc/lr=2e-05/result.json").write_text("{}")
    found["doctor, others"] = doctor(f"run_dir={out}/tuned", "logging.trackers=[wandb]")
    disk = os.statvfs(out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: os.statvfs_result((*disk[:5], 999, 7, 7, *disk[8:])))
        found["doctor, full of files"] = doctor()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: Path(path) != out)
        found["doctor, no right"] = doctor()
    found["a file"] = said(run_dir=data / "run.yaml")
    found["no data"] = said([f"data.dir={out}/none"], run_dir=out / "not made/run")
    tracked = load(data / "run.yaml", PretrainConfig, [f"run_dir={out}/tracked/run"])
    with contextlib.suppress(UserError), preflight.run_folder(tracked, world):
        if rank == 0:
            (out / "tracked/run/trackers.json").write_text("{}")
            for name in ("wandb", "mlruns"):
                (out / "tracked/run" / name / "0").mkdir(parents=True)
        distributed.gather(world, None)
        raise UserError("a mistake")
    files.SHOWN_WITHIN = 0.2
    (out / f"host {rank}").mkdir()
    with contextlib.chdir(out / f"host {rank}"):  # a disk of each host's own
        found["missing"] = said(run_dir=Path("run"))
        if rank == 1:
            Path("run").mkdir()
            Path("run/lock").write_text("- 1 here -\n")
        found["own"] = said(run_dir=Path("run"))
    (out / "mine").mkdir(exist_ok=True)
    said([f"data.dir={out}/none"], run_dir=out / "mine")
    distributed.gather(world, None)
    if rank == 0:
        os.truncate(first, first.stat().st_size - 1)
    distributed.gather(world, None)
    found["short shard"] = said()
    found["doctor, short shard"] = doctor()
    if rank == 1:  # a device whose sums are off by one
        right = torch.Tensor.__matmul__
        torch.Tensor.__matmul__ = lambda a, b: right(a, b) + (a.dtype == torch.float) * 1.0
        try:
            preflight.multiply(torch.device("cpu"))
        except UserError as error:
            found["device"] = str(error)
        torch.Tensor.__matmul__ = right
    return found


def test_what_one_rank_finds_is_refused_by_all(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    soak.make_data(tmp_path / "data")
    first, second = gloo.run(2, refusals, tmp_path / "data", tmp_path)
    dated = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d preflight: 2 process"
    assert re.search(dated, capfd.readouterr().out, re.M)
    assert first["well"] == second["well"] == "nothing"
    assert "the ranks disagree on the config" in first["config"] == second["config"]
    assert ".tar: " in first["short shard"] and "in the manifest" in first["short shard"]
    assert first["short shard"] == second["short shard"]
    assert "computes a wrong matrix product" in second["device"]
    assert first["no data"].startswith(f"{tmp_path}/none/manifest.json: ")
    for name, what in (("missing", "missing"), ("own", "another folder than rank 0's")):
        told = f"run_dir: run is {what} on {socket.gethostname()}; all hosts must share it"
        assert first[name] == second[name] == told
    assert not (tmp_path / "tracked").exists()
    assert not (tmp_path / "not made").exists() and (tmp_path / "mine").exists()
    for name in ("doctor", "doctor, rows", "doctor, short shard"):
        assert [x.mend for x in first[name]] == [x.mend for x in second[name]]
    well = {line.name: line for line in first["doctor"]}
    machine = "python,packages,compiler,MPI,/dev/shm,open files,locked memory,device,DeepSpeed,"
    machine += "ranks,all-reduce"
    assert list(well) == [
        *machine.split(","),
        *"data,run folder,engine,disk,checkpoint,hours".split(","),
    ]
    assert well["all-reduce"].found.endswith("by gloo")
    assert "planned on 2 device(s) at 40% of the peak" in well["hours"].found
    late = {line.name: line.mend for line in first["doctor, late"] if line.mend}
    assert list(late) == ["disk", "checkpoint", "hours"]
    assert re.match(r"--set checkpoint.keep_last=\d+, or .*: not enough disk: ", late["disk"])
    assert late["checkpoint"].startswith("#SBATCH --signal=B:USR1@")
    assert re.fullmatch(r"sbatch --requeue, or --time=\d+:00:00 or more", late["hours"])
    assert not any(line.mend for line in first["doctor"])
    assert not (tmp_path / "looked at").exists() and not list(tmp_path.glob(".doctor*"))
    ill = {line.name: line.mend for line in first["doctor, rows"] if line.mend}
    assert list(ill) == ["data"] and "do not divide by 2 ranks" in ill["data"]
    ill = {line.name: line.mend for line in first["doctor, full of files"] if line.mend}
    assert list(ill) == ["disk"] and "room for 7 more files (df -i)" in ill["disk"]
    ill = {line.name: line.mend for line in first["doctor, a key"] if line.mend}
    assert list(ill) == ["engine"] and "did you mean wall_clock_breakdown?" in ill["engine"]
    ill = {line.name: line.mend for line in first["doctor, a monitor"] if line.mend}
    assert list(ill) == ["engine"] and "nope" in ill["engine"]
    assert not (tmp_path / "monitored").exists()
    ill = {line.name: line.mend for line in first["doctor, others"] if line.mend}
    assert list(ill) == ["run folder", "trackers"] and "pip install wandb" in ill["trackers"]
    assert "holds jobs of fine-tuning" in ill["run folder"]
    ill = {line.name: line.mend for line in first["doctor, no right"] if line.mend}
    told = f"run_dir: {tmp_path}: checkpoints cannot be written there (Permission denied)"
    assert ill == {"disk": told}
    ill = {line.name: line.mend for line in first["doctor, no GPU"] if line.mend}
    assert list(ill) == ["device"] and "--set device=cpu" in ill["device"]
    assert first["doctor, no GPU"][-1].found.startswith("not known without a GPU")
    sizes = r"[1-9][\d.]* GB free, checkpoints need [1-9][\d.]* [kM]B more"
    assert re.fullmatch(sizes, well["disk"].found)
    assert {x.name: x.mend for x in first["doctor, short shard"]}["data"] == first["short shard"]
    assert first["a file"] == f"run_dir: {tmp_path / 'data/run.yaml'}: no folder"
    lines = (tmp_path / "run/preflight.txt").read_text().splitlines()
    assert lines[0].startswith("preflight: 2 process(es) on 1 host(s)")
    assert len(lines) == 3


def test_all_else_is_looked_at_without_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(device: str) -> distributed.World:
        raise UserError(f"started on {device}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(distributed, "start", start)
    large = Path(__file__).parents[2] / "configs/pretrain_large.yaml"
    with pytest.raises(UserError, match="started on auto"):
        doctor_of.main(["--config", str(large)])


@pytest.mark.parametrize("option", ["--time-limit", "--signal-lead"])
@pytest.mark.parametrize("value", ["nan", "-1", "inf", "x"])
def test_a_duration_that_is_none_is_refused(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        doctor_of.main([f"{option}={value}"])
    assert f"argument {option}: {value}: is no number" in capsys.readouterr().err


def test_the_time_that_slurm_gives_a_job() -> None:
    said = "JobId=7 Requeue=1 Restarts=0 RunTime=00:10:30 TimeLimit=1-02:00:00 TimeMin=N/A"
    assert doctor_of.read_job(said) == Job(26 * 3600 - 630, requeues=True)
    assert doctor_of.read_job(said.replace("Requeue=1", "Requeue=0")).requeues is False
    assert doctor_of.read_job(said.replace("1-02:00:00", "UNLIMITED")).seconds == float("inf")
    assert doctor_of.read_job("slurm_load_jobs error: Invalid job id specified") is None


def test_what_is_broken_on_a_machine_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # its import fails
    monkeypatch.setattr(deepspeed_door, "deepspeed", deepspeed_door.deepspeed.__wrapped__)
    for port in ("abc", "99999", "9" * 5000):
        monkeypatch.setenv("MASTER_PORT", port)
        ill = {x.name: x for x in doctor_of.examine(None, ALONE) if x.mend}
        assert "cannot be imported: ModuleNotFoundError" in ill["DeepSpeed"].found
        assert f"MASTER_PORT={port[:3]}" in ill["port"].found
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexec sleep 9\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert doctor_of.slurm_job(patience=0.05) is None
    said = "printf 'JobName=caf\\351 TimeLimit=UNLIMITED RunTime=00:00:09 Requeue=1\\n'"  # Latin-1
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{said}\n")
    assert doctor_of.slurm_job() == Job(math.inf, requeues=True)


@pytest.mark.parametrize("precision", ["bf16", "auto"])
def test_bf16_that_is_emulated_is_none(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    about = types.SimpleNamespace(name="Tesla V100", total_memory=32e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    config = load("configs/pretrain_demo.yaml", PretrainConfig, [f"engine.precision={precision}"])
    world = distributed.World(0, 1, 0, 1, "alone", torch.device("cuda"), None)
    found = {x.name: x for x in doctor_of.on_machine(world, config)}["device"]
    assert "no bf16" in found.found
    assert found.mend == ("--set engine.precision=auto" if precision == "bf16" else "")


def test_the_doctor_names_the_hosts_that_differ() -> None:
    well, other = Finding("torch", "2.13"), Finding("torch", "2.10", "install 2.13")
    same, fine = Finding("shm", "1 GB"), Finding("shm", "2 GB")
    everyone = [
        ("a", [well, same]),
        ("b", [other, fine]),
        ("b", [other, fine]),
        ("c", [well, same]),
    ]
    lines = doctor_of.merged(everyone)
    assert lines == [Finding("torch", "b: 2.10", "install 2.13"), same]
    assert doctor_of.report(lines) == [
        "mend  torch  b: 2.10", "             -> install 2.13", "ok    shm    1 GB", "1 to mend"
    ]  # fmt: skip
    assert doctor_of.merged([("a", [other]), ("b", [other])]) == [other]
    words, command = "some words " * 20, "python -m pretrain doctor --config " + "c" * 80
    long = doctor_of.report([Finding("data", words, command)])
    assert long[-2] == f"{' ' * 12}-> {command}"
    assert max(map(len, long[:-2])) <= 80
    assert all(line.startswith(" " * 12) for line in long[1:-1])


def holder(boot: str, pid: int, path: Path, seconds: float) -> subprocess.Popen[bytes]:
    """A process that holds the lock for so long, with a note of that boot and pid."""
    script = (
        "import sys, time; from pathlib import Path; from core.files import Lock\n"
        "lock = Lock(Path(sys.argv[1])); lock.take(); lock.path.write_text(sys.argv[2])\n"
        "print('held', flush=True); time.sleep(float(sys.argv[3]))"
    )
    note = f"{boot} {pid} node7 12\n"
    command = [sys.executable, "-c", script, str(path), note, str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def test_a_lock_is_waited_for_unless_its_holder_is_seen_alive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    boot = f"{boot_id}/{os.readlink('/proc/self/ns/pid')}"
    config = load("configs/pretrain_demo.yaml", PretrainConfig, [f"run_dir={tmp_path}"])

    def start(patience: float, watchdog_seconds: float = 600) -> str:
        own = config.model_copy(update={"watchdog_seconds": watchdog_seconds})
        with preflight.run_folder(own, ALONE, patience):
            return (tmp_path / "lock").read_text()

    # Of this boot and alive; gone, killed and not all of it gone yet, or of a host that lost its
    # power: the server may still hold it.
    with holder(boot, os.getpid(), tmp_path / "lock", 60) as process:
        with pytest.raises(UserError, match=f"in use by another run: process {os.getpid()} on no"):
            start(60)
        assert capsys.readouterr().err == ""
        process.kill()
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    for at, pid in ((boot, 2**22), (boot, ended.pid), ("0-0", os.getpid())):
        with holder(at, pid, tmp_path / "lock", 60) as process:
            with pytest.raises(TryAgain, match=f"{tmp_path} is in use .*{pid} on node7.* in 0.1 s"):
                start(0.1)
            out, err = capsys.readouterr()
            assert "waiting up to 0.1 s" in err and not out
            with pytest.raises(TryAgain, match=f"{pid} on node7.* in 2 s"):  # before the watchdog
                start(60, watchdog_seconds=1)
            capsys.readouterr()
            process.kill()
    ended.wait()
    with holder("0-0", 1, tmp_path / "lock", 0.1):
        assert start(60) == f"{boot} {os.getpid()} {socket.gethostname()} 12\n"
    assert capsys.readouterr().err.count("waiting up to") <= 1


@pytest.mark.parametrize("error", [None, RuntimeError, UserError, TryAgain, KeyboardInterrupt])
def test_the_note_of_a_lock_goes_with_an_end_in_order_alone(
    tmp_path: Path, error: type[BaseException] | None
) -> None:
    config = load("configs/pretrain_demo.yaml", PretrainConfig, [f"run_dir={tmp_path}"])
    for half in (
        ".config.yaml.9999999.part",
        ".metrics.jsonl.9999999.part",
        ".page.html.9999999.part",
    ):
        (tmp_path / half).touch()
    with contextlib.suppress(Exception, KeyboardInterrupt), preflight.run_folder(config, ALONE):
        assert [p.name for p in tmp_path.glob(".*")] == [".page.html.9999999.part"]  # another's
        if error is not None:
            raise error("the end")
    in_order = error in (None, KeyboardInterrupt)
    assert ((tmp_path / "lock").read_text() == "") == in_order


@pytest.mark.parametrize("error", [UserError, KeyboardInterrupt])
def test_a_start_whose_folder_was_taken_away_leaves_the_next_one_alone(
    tmp_path: Path, error: type[BaseException]
) -> None:
    """It may have waited for its data meanwhile, before it had anything to do with checkpoints."""
    run = tmp_path / "run"
    config = load("configs/pretrain_demo.yaml", PretrainConfig, [f"run_dir={run}"])
    with contextlib.ExitStack() as following:
        with contextlib.suppress(error), preflight.run_folder(config, ALONE) as lock:
            run.rename(tmp_path / "moved")
            following.enter_context(preflight.run_folder(config, ALONE))
            there = {path.name: path.read_bytes() for path in run.iterdir()}
            replaced = pytest.raises(UserError, match=f"^run_dir: {run} was removed or replaced")
            with replaced:
                Checkpoints(run, ALONE, config.checkpoint, lock=lock).check_place()
            raise error("the end")
        assert {path.name: path.read_bytes() for path in run.iterdir()} == there


def test_a_start_that_finds_no_room_for_its_lock_leaves_no_folder(tmp_path: Path) -> None:
    config = load("configs/pretrain_demo.yaml", PretrainConfig, [f"run_dir={tmp_path}/new/run"])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        refused = pytest.raises(UserError, match="^run_dir: .*/new/run/lock: File too large")
        with refused, preflight.run_folder(config, ALONE):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_a_config_of_the_user_s_own_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("theirs\n")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/last.ckpt").touch()  # of another tool
    config = load("configs/pretrain_demo.yaml", PretrainConfig, [f"run_dir={tmp_path}"])
    refused = pytest.raises(UserError, match=f"run_dir: {path} was written by no run")
    with refused, preflight.run_folder(config, ALONE):
        pass
    assert path.read_text() == "theirs\n"
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "config.yaml"]
    path.unlink()
    path.symlink_to(tmp_path / "none")
    refused = pytest.raises(UserError, match=f"run_dir: {path} was written by no run")
    with refused, preflight.run_folder(config, ALONE):
        pass
    assert path.is_symlink()
    path.unlink()
    for _ in range(2):  # a run's own is
        with preflight.run_folder(config, ALONE):
            path.write_text("half")


def test_a_folder_that_tensorboard_cannot_name_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    config = load("configs/pretrain_demo.yaml", PretrainConfig, [f"run_dir={folder}"])
    refused = pytest.raises(UserError, match="run_dir: .*: a name in UTF-8 is expected")
    with refused, preflight.run_folder(config, ALONE):
        pass
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("theirs", ["result.json", "last.pt"])  # a job is done, or begun
def test_a_folder_of_fine_tuning_is_refused(tmp_path: Path, theirs: str) -> None:
    config = load("configs/pretrain_demo.yaml", PretrainConfig, [f"run_dir={tmp_path}"])
    (tmp_path / "config.yaml").write_text("theirs\n")
    (tmp_path / "SST-2/b4").mkdir(parents=True)
    (tmp_path / "SST-2/b4" / theirs).touch()
    refused = pytest.raises(UserError, match="run_dir: .* holds jobs of fine-tuning")
    with refused, preflight.run_folder(config, ALONE):
        pass
    assert (tmp_path / "config.yaml").read_text() == "theirs\n"
    (tmp_path / "checkpoints").mkdir()  # a run with both, from before this was refused, goes on
    with preflight.run_folder(config, ALONE):
        pass


def test_of_two_starts_at_once_the_second_leaves_the_folder_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have seen that there was none."""
    folder = tmp_path / "run"
    config = load("configs/pretrain_demo.yaml", PretrainConfig, [f"run_dir={folder}"])
    make, first = Path.mkdir, []

    def mkdir(path: Path, **more: bool) -> None:
        make(path, **more)
        if path == folder and not first:
            first.append(holder("0-0", 1, folder / "lock", 60))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(TryAgain), preflight.run_folder(config, ALONE, 0.1):
        pass
    assert (folder / "lock").exists()
    with first[0] as process:
        process.kill()


def threads(rank: int, size: int) -> tuple[int, ...]:
    """By default, where the two ranks may use the same 8 cores, and where each has 8 of its own;
    then 3 that are asked for."""
    world, found = distributed.start("cpu"), []
    for cores, asked in ((range(8), 0), (range(8 * rank, 8 * rank + 8), 0), (range(8), 3)):
        os.sched_getaffinity = lambda _, cores=cores: set(cores)
        preflight.set_threads(asked, world)
        found.append(torch.get_num_threads())
    return tuple(found)


def test_cores_are_divided_among_the_ranks_that_share_them() -> None:
    assert gloo.run(2, threads) == [(4, 8, 3)] * 2


def test_the_slow_are_named_and_come_first() -> None:
    everyone = [Health(r, f"node{r}", 10.0, 300.0) for r in range(5)]
    assert not any("slow" in line for line in preflight.health_table(everyone))
    everyone[3] = Health(3, "node3", 21.0, 300.0)
    everyone[4] = Health(4, "node4", 10.0, 601.0)
    lines = preflight.health_table(everyone)
    assert "node3" in lines[0] and lines[0].endswith("slow: matmul")
    assert "node4" in lines[1] and lines[1].endswith("slow: read")
    assert sum("slow" in line for line in lines) == 2
