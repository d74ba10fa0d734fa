"""The parity grid as a table: `python -m tests.pretrain.parity_table [--worlds 1 2 3 4]`.

Largest error of a tensor, |ours - reference| / |reference|, after 50 clipped steps on given
gradients against the float64 reference, by ZeRO stage, precision and world size; then the same
with a LAMB that takes each slice for a tensor.
"""

from __future__ import annotations

import argparse

from tests import gloo
from tests.pretrain import engine_cases

CASES = [("fp32", 0), ("fp32", 1), ("fp32", 2), ("bf16", 1), ("bf16", 2)]
CASES = [(stage, precision, 1, ()) for precision, stage in CASES]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 3, 4])
    worlds = parser.parse_args().worlds
    exact = {w: gloo.run(w, engine_cases.parity, CASES, timeout=280)[0] for w in worlds}
    naive = {w: gloo.run(w, engine_cases.naive, [0, 1, 2], timeout=280)[0] for w in worlds}
    print("| LAMB | precision | ZeRO stage |" + "".join(f" world {w} |" for w in worlds))
    print("|---|---|---|" + "---|" * len(worlds))
    for case in CASES:
        errors = "".join(f" {exact[w][case]['error']:.1e} |" for w in worlds)
        print(f"| ours | {case[1]} | {case[0]} |{errors}")
    for stage in (0, 1, 2):
        errors = "".join(f" {naive[w][stage]:.1e} |" for w in worlds)
        print(f"| slice taken for a tensor | fp32 | {stage} |{errors}")
    worst = max(r["error"] for w in worlds for r in exact[w].values())
    print(f"\nworst of ours: {worst:.2e}, bound 1e-6")


if __name__ == "__main__":
    main()
