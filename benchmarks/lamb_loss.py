"""What the naive LAMB costs under ZeRO in held-out loss: the same run with both.

    python benchmarks/lamb_loss.py --data DIR --out DIR [--processes 2 4] [--seeds 0 1]
                                   [--config FILE] [--set KEY=VALUE ...]

exact   this program's LAMB: a trust ratio a tensor, however ZeRO's slices cut it
naive   a LAMB that takes what ZeRO shows it for a tensor: one ratio for all of a rank's slice

Both are pretrain/run.py under ZeRO-1, alike to the last draw. Without --config they train the
demo's model in sequences of 16 for 1,000 steps, with LAMB's own ratio (no bounds) and the rate
that it asks for. Start it again to go on: what is finished is not run again. The last line is one
JSON object: held-out nats at the end by kind, number of processes and seed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from core.processes import begin_command

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("exact", "naive")
CONFIG = f"""
extends: {ROOT}/configs/pretrain_demo.yaml
model: {{attention: sdpa}}
optimizer: {{trust_ratio_min: null}}
phases:
  - {{max_seq_len: 16, row_len: 256, rows_per_step: 4, sequences_per_step: 68, max_predictions: 3,
     micro_batch_rows: 4, steps: 1000, learning_rate: 2.0e-2, warmup: 0.1, decay: linear,
     convention: continuous}}
checkpoint: {{every_steps: 1000}}
evaluation: {{every_steps: 100, rows: 64}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="folder of shards")
    parser.add_argument("--out", required=True, type=Path, help="folder of the runs")
    parser.add_argument("--config", help="of pretraining; by default the demo's model, as above")
    parser.add_argument("--processes", nargs="+", type=int, default=[2])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--set", dest="overrides", nargs="+", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.config is None:
        arguments.config = str(arguments.out / "config.yaml")
        Path(arguments.config).write_text(CONFIG)
    found: dict[str, dict[str, dict[str, float]]] = {kind: {} for kind in KINDS}
    for processes in arguments.processes:
        for seed in arguments.seeds:
            for kind in KINDS:
                loss = held_out(kind, processes, seed, arguments)
                found[kind].setdefault(str(processes), {})[str(seed)] = loss
                print(f"{processes} processes, seed {seed}, {kind}: {loss:.4f} nats", flush=True)
    print(json.dumps({"benchmark": "lamb_loss", "heldout": found}), flush=True)


def held_out(kind: str, processes: int, seed: int, arguments: argparse.Namespace) -> float:
    """Nats at the end of a run, which is gone on with or finished already."""
    run = arguments.out / f"{kind}-{processes}-{seed}"
    settings = [f"run_dir={run}", f"data.dir={arguments.data}", f"seed={seed}", "device=cpu"]
    settings += ["optimizer.name=lamb", "engine.zero_stage=1", "engine.trust_ratios_every=0"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", __file__, kind, "--config", arguments.config]
    command += ["--set", *settings, *arguments.overrides]
    if not (run / "FINISHED").exists():
        begin = functools.partial(begin_command, os.getpid())
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        code = subprocess.run(command, env=environment, preexec_fn=begin).returncode
        if code:
            sys.exit(f"error: {' '.join(command)} ended with {code}")
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["heldout/mlm_loss"] for line in lines if "heldout/mlm_loss" in line][-1]


def worker(kind: str) -> None:
    """pretrain/run.py with the LAMB of this kind; the rest of the command line is its own."""
    from pretrain.optim import Lamb

    def each_slice_is_a_tensor(self: Lamb, *_: object) -> None:
        self._known = {p for group in self.param_groups for p in group["params"]}

    if kind == "naive":
        Lamb.attach = each_slice_is_a_tensor
    runpy.run_path(str(ROOT / "pretrain/run.py"), run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in KINDS:
        worker(sys.argv.pop(1))
    else:
        main()
