"""slurm/prepare_data.sh on a real Slurm of two nodes."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.corpus.verify import verify
from tests.data_pipeline.corpus.text import wikiextractor, write_config, write_vocabulary
from tests.slurm.cluster import Cluster, why_not

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(why_not() is not None, reason=f"no Slurm cluster here: {why_not()}"),
]
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def submit(cluster, folder, config, name, *more):
    job = cluster.sbatch(
        "--nodes=2", "--ntasks-per-node=2", "--mem-per-cpu=100M", "--overcommit", "--time=10",
        f"--chdir={ROOT}", f"--output={folder}/{name}.log",
        "--export=ALL," + ",".join(
            [f"CONFIG={config}", f"OUT={folder}/{name}", f"VENV={Path(sys.executable).parents[1]}",
             *more]
        ),
        str(ROOT / "slurm/prepare_data.sh"),
    )  # fmt: skip
    state = cluster.wait(job)
    return state, (folder / f"{name}.log").read_text()


def test_two_nodes_give_the_same_bytes_as_one_process(cluster, tmp_path):
    wiki = tmp_path / "wiki"
    wiki.mkdir()
    for part in range(6):
        (wiki / f"wiki_{part}").write_text(wikiextractor(range(20 * part, 20 * part + 20)))
    vocab = write_vocabulary(tmp_path / "vocab.txt")
    source = {"name": "wiki", "kind": "wikiextractor", "path": str(wiki)}
    config = write_config(tmp_path / "c.yaml", vocab, [source])
    state, log = submit(cluster, tmp_path, config, "four")
    assert state == "COMPLETED" and "4 ranks" in log, log
    assert verify(tmp_path / "four") == []
    from configs.load import load
    from data_pipeline.corpus.prepare import PrepareConfig, Ranks, prepare

    prepare(load(config, PrepareConfig, [f"out={tmp_path}/one"]), Ranks())
    for path in sorted((tmp_path / "one").glob("*")):
        if path.suffix in (".tar", ".idx") or path.name == "manifest.json":
            other = tmp_path / "four" / path.name
            digests = [hashlib.sha256(p.read_bytes()).hexdigest() for p in (path, other)]
            assert digests[0] == digests[1], path.name
    # Without PMI the four tasks would be four jobs of one.
    state, log = submit(cluster, tmp_path, config, "alone", "MPI=none")
    assert state == "FAILED"
    assert "SLURM_STEP_NUM_TASKS=4 processes were started, but MPI sees 1" in log
    assert not (tmp_path / "alone").exists()


def test_a_mistake_has_its_own_code_however_slowly_the_others_leave(cluster, tmp_path):
    """srun ends the others with the first that leaves, and returns the largest of their codes."""
    slow = (
        "import atexit, os, time\natexit.register(time.sleep, 3 * int(os.environ['SLURM_PROCID']))"
    )
    (tmp_path / "sitecustomize.py").write_text(slow)
    done = subprocess.run(
        ["srun", "--mpi=pmi2", "--nodes=2", "--ntasks=2", "--overcommit", "--mem=200M",
         "--kill-on-bad-exit=1", f"--chdir={ROOT}", sys.executable, "-m", "data_pipeline",
         "prepare", "--config", f"{tmp_path}/none"],
        env=cluster.environment | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and f"error: {tmp_path}/none" in done.stderr, done.stderr
