"""The launcher's full geometry, sixteen nodes of eight GPUs, is accepted by a real scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, why_not

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(why_not() is not None, reason=f"no Slurm cluster here: {why_not()}"),
]
ROOT = Path(__file__).resolve().parents[2]


def test_sixteen_nodes_are_accepted_and_seventeen_are_not(tmp_path: Path) -> None:
    script = str(ROOT / "slurm/pretrain_large.sh")
    with Cluster(tmp_path, nodes=16) as cluster:
        asked = ["sbatch", "--test-only", f"--chdir={ROOT}"]
        said = cluster.run(*asked, "--nodes=16", script)
        assert "to start at" in said and "node[0-15]" in said
        assert "to start at" not in cluster.run(*asked, "--nodes=17", script, check=False)
