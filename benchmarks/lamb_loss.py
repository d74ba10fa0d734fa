"""What the naive LAMB costs under ZeRO in held-out loss: the same run with both.

    python benchmarks/lamb_loss.py --data DIR --out DIR [--processes 2 4] [--set KEY=VALUE ...]

exact   this program's LAMB: a trust ratio a tensor, however ZeRO's slices cut it
naive   a LAMB that takes what ZeRO shows it for a tensor: one ratio for all of a rank's slice

Both are pretrain/run.py with the mini preset under ZeRO-1 and LAMB, alike to the last draw. With
`trust_ratio_min` null the ratio is LAMB's own. Start it again to go on. The last line is one JSON
object: held-out nats by kind and number of processes.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("exact", "naive")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="folder of shards")
    parser.add_argument("--out", required=True, type=Path, help="folder of the runs")
    parser.add_argument("--config", default=str(ROOT / "configs/pretrain_mini.yaml"))
    parser.add_argument("--processes", nargs="+", type=int, default=[2])
    parser.add_argument("--set", dest="overrides", nargs="+", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for processes in arguments.processes:
        for kind in KINDS:
            run = arguments.out / f"{kind}-{processes}"
            settings = [f"run_dir={run}", f"data.dir={arguments.data}", "optimizer.name=lamb"]
            settings += ["engine.zero_stage=1", "engine.trust_ratios_every=0", "device=cpu"]
            command = ["torchrun", "--standalone", f"--nproc-per-node={processes}", __file__, kind]
            command += ["--config", arguments.config, "--set", *settings, *arguments.overrides]
            torchrun = [sys.executable, "-m", "torch.distributed.run", *command[1:]]
            code = subprocess.run(torchrun, env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode
            if code:
                sys.exit(f"error: {' '.join(command)} ended with {code}")
            lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
            losses = [x["heldout/mlm_loss"] for x in lines if "heldout/mlm_loss" in x]
            found.setdefault(kind, {})[str(processes)] = losses[-1]
            print(f"{processes} processes, {kind}: {losses[-1]:.4f} nats", flush=True)
    print(json.dumps({"benchmark": "lamb_loss", "heldout": found}), flush=True)


def worker(kind: str) -> None:
    """pretrain/run.py with the LAMB of this kind; the rest of the command line is its own."""
    from pretrain.optim import Lamb

    def each_slice_is_a_tensor(self: Lamb, _comm_device: object = None) -> None:
        self._known = {p for group in self.param_groups for p in group["params"]}

    if kind == "naive":
        Lamb.attach = each_slice_is_a_tensor
    runpy.run_path(str(ROOT / "pretrain/run.py"), run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in KINDS:
        worker(sys.argv.pop(1))
    else:
        main()
