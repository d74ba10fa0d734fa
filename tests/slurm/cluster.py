"""A throw-away Slurm cluster of N nodes on this one machine, for tests: needs root and Debian's
packages slurmctld, slurmd, slurm-client and munge. Nothing outside its folder is touched, but a
marked block in /etc/hosts."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from core.files import Lock
from tests.ports import free_port

_HOSTS = Path("/etc/hosts")
_BEGIN, _END = "# BEGIN slurm test cluster", "# END slurm test cluster"

_FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}

_CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={dir}/munge.sock,cred_expire=5
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool-%n
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd-%n.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdLogFile={dir}/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=256
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
KillWait=5
ReturnToService=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName=DEFAULT CPUs=64 RealMemory=64000 Gres=gpu:8
{nodes}
PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE State=UP
PartitionName=main Default=YES PriorityTier=10 PreemptMode=OFF
PartitionName=low PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
"""


def why_not() -> str | None:
    """The reason a cluster cannot be started here; None if it can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [p for p in ("slurmctld", "slurmd", "munged", "sbatch") if not _which(p)]
    return f"not installed: {', '.join(missing)}" if missing else None


class Cluster:
    """`with Cluster(folder) as c: c.sbatch(...)`. Its daemons are ended by pid. One at a time: who
    comes second waits for the first to leave /etc/hosts."""

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self.folder = folder
        self.count = nodes
        self._munged: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Cluster:
        self._lock = Lock(_HOSTS)
        self._lock.take()
        d = self.folder
        for name in ("state", "dev"):
            (d / name).mkdir(parents=True)
        (d / "munge.key").write_bytes(secrets.token_bytes(128))
        (d / "munge.key").chmod(0o600)
        # Fake GPUs have to be device nodes; these are copies of /dev/null.
        for i in range(8):
            os.mknod(d / f"dev/nvidia{i}", 0o666 | 0o020000, os.makedev(1, 3))
        port = free_port(self.count + 1)
        host = socket.gethostname()
        nodes = "\n".join(
            f"NodeName=node{i} NodeHostname={host} NodeAddr=127.0.1.{10 + i} Port={port + 1 + i}"
            for i in range(self.count)
        )
        (d / "slurm.conf").write_text(_CONF.format(host=host, port=port, dir=d, nodes=nodes))
        (d / "gres.conf").write_text(f"Name=gpu File={d}/dev/nvidia[0-7]\n")
        # Without a cgroup mount slurmd dies, unless a plugin it never uses is named.
        (d / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        _hosts([f"127.0.1.{10 + i} node{i}" for i in range(self.count)])
        self.environment = os.environ | {"SLURM_CONF": str(d / "slurm.conf")}
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        d = self.folder
        munged = [
            _which("munged"), "--foreground", f"--key-file={d}/munge.key",
            f"--socket={d}/munge.sock", f"--pid-file={d}/munged.pid",
            f"--log-file={d}/munged.log", f"--seed-file={d}/munged.seed", "--force",
        ]  # fmt: skip
        with (d / "munged.out").open("wb") as out:
            self._munged = subprocess.Popen(munged, stdout=out, stderr=out)
        _until(lambda: (d / "munge.sock").exists(), 10, "munged")
        self.run(_which("slurmctld"))
        for i in range(self.count):
            (d / f"spool-node{i}").mkdir()
            self.run(_which("slurmd"), "-N", f"node{i}")
        _until(lambda: self._idle() == self.count, 40, "idle nodes")

    def __exit__(self, *_: object) -> None:
        if (self.folder / "slurmctld.pid").exists():
            subprocess.run(["scancel", "--full", "--signal=KILL", "-u", "root"],
                           env=self.environment, timeout=20, capture_output=True)  # fmt: skip
            subprocess.run(["scancel", "-u", "root"],
                           env=self.environment, timeout=20, capture_output=True)  # fmt: skip
            time.sleep(1)
        for pid_file in [*self.folder.glob("slurmd-*.pid"), self.folder / "slurmctld.pid"]:
            if pid_file.exists():
                _end(int(pid_file.read_text()))
        if self._munged is not None:
            self._munged.terminate()
            self._munged.wait(10)
        _hosts([])
        self._lock.close()

    def run(self, *command: str, check: bool = True) -> str:
        """Run a client command of this cluster; its output."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def sbatch(self, *arguments: str) -> str:
        """Submit; the job's id."""
        return self.run("sbatch", "--parsable", *arguments).strip()

    def state(self, job: str) -> str:
        shown = self.run("scontrol", "-o", "show", "job", job)
        found = re.search(r"JobState=(\w+)", shown)
        return found[1] if found else "UNKNOWN"

    def until_running(self, job: str, seconds: float = 60, log: Path | None = None) -> None:
        """log: has then a line, too, since a signal of --batch is lost before the job's shell runs;
        it was not there before."""
        _until(lambda: self.state(job) == "RUNNING", seconds, f"the start of job {job}")
        if log is not None:
            _until(lambda: log.exists() and log.read_text(), seconds, f"the first line of {log}")

    def wait(self, job: str, seconds: float = 180) -> str:
        """Wait until the job has ended for good; its state."""
        _until(lambda: self.state(job) in _FINAL, seconds, f"job {job}")
        return self.state(job)

    def cancel(self, job: str, seconds: float = 180) -> None:
        """End the job for good. Repeated, since a job that is killed may requeue itself."""

        def ended() -> bool:
            self.run("scancel", "--full", "--signal=KILL", job, check=False)
            self.run("scancel", job, check=False)
            return self.state(job) in _FINAL

        _until(ended, seconds, f"the end of job {job}")

    def _idle(self) -> int:
        shown = self.run("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D", check=False)
        return int(shown) if shown.strip().isdigit() else 0


def _which(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _until(true: object, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.2)


def _end(pid: int) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, number)
            for _ in range(25):
                time.sleep(0.2)
                os.kill(pid, 0)
        except ProcessLookupError:
            return


def _hosts(lines: list[str]) -> None:
    text = re.sub(rf"{_BEGIN}\n.*?{_END}\n", "", _HOSTS.read_text(), flags=re.S)
    if lines:
        text = text.rstrip("\n") + "\n" + "\n".join([_BEGIN, *lines, _END]) + "\n"
    _HOSTS.write_text(text)  # in place: it may be a bind mount
