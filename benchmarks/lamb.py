"""The optimiser step of exact LAMB against torch's fused AdamW at BERT-LARGE's shapes.

    OMP_NUM_THREADS=2 python benchmarks/lamb.py [--stage 1] [--layers 24] [--rounds 5]

Both run under the same ZeRO stage in one process and one run, on the same few tokens, in turns.
`step` is what the loop waits for after backward: gradient norm, clipping, update, write-back;
`update` is the part inside the optimiser. Prints a table, then one JSON line; `ratio.adamw` is
LAMB's step over AdamW's, each the shortest of its rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from core.errors import main_guard
from data_pipeline.stream.batch import Batch
from pretrain import distributed
from pretrain.engine import Engine
from pretrain.engine_config import EngineConfig
from pretrain.model import BertForPreTraining, ModelConfig
from pretrain.optim import OptimizerConfig


def main() -> None:
    arguments = _arguments()
    world = distributed.start()
    seconds: dict[str, dict[str, list[float]]] = {}
    for turn, name in enumerate(("adamw", "lamb") * arguments.turns):
        measured = _measure(name, arguments)
        shown = ", ".join(f"{1e3 * second:.0f}" for second in measured["step"])
        print(f"  turn {turn // 2 + 1} of {arguments.turns}, {name}: ms {shown}", flush=True)
        for part, values in measured.items():
            seconds.setdefault(name, {}).setdefault(part, []).extend(values)
    shortest = {
        name: {part: min(values) for part, values in parts.items()}
        for name, parts in seconds.items()
    }
    parameters = _model(arguments, meta=True)
    print(f"{parameters / 1e6:.1f} M parameters, ZeRO stage {arguments.stage}, {_machine()}")
    print(f"{'':8}{'step, ms':>12}{'update, ms':>12}")
    for name, parts in shortest.items():
        print(f"{name:8}{1e3 * parts['step']:12.1f}{1e3 * parts['update']:12.1f}")
    ratio = {k: shortest["lamb"][k] / shortest["adamw"][k] for k in ("step", "update")}
    print(f"{'ratio':8}{ratio['step']:12.3f}{ratio['update']:12.3f}")
    detail = {
        "update_ratio": round(ratio["update"], 4),
        "seconds": {n: {k: round(v, 5) for k, v in parts.items()} for n, parts in shortest.items()},
        "parameters": parameters,
        "stage": arguments.stage,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    result = {"benchmark": "lamb", "ratio": {"adamw": round(ratio["step"], 4)}, "detail": detail}
    print(json.dumps(result), flush=True)
    distributed.meet(world)
    distributed.finish(0)


def _measure(name: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of `rounds` optimiser steps after one that is not counted."""
    engine = Engine(
        _model(arguments),
        OptimizerConfig(name=name),
        EngineConfig(zero_stage=arguments.stage, precision=arguments.precision),
        micro_steps=1,
        micro_batch_rows=1,
    )
    inner: list[float] = []
    engine.optimizer.step = _timed(engine.optimizer.step, inner)
    result: dict[str, list[float]] = {"step": [], "update": []}
    for round_ in range(arguments.rounds + 1):
        inner.clear()
        outcome = engine.train_step(iter([_batch()]), 1e-6)
        if round_ > 0:
            result["step"].append(outcome.seconds["update"])
            result["update"].append(sum(inner))
    engine.close()
    del engine
    gc.collect()
    return result


def _batch() -> Batch:
    """One row of eight tokens: enough for a gradient of every weight."""
    ids = torch.arange(1000, 1008)[None]
    one = torch.ones(1, dtype=torch.int64)
    return Batch(
        input_ids=ids,
        token_type_ids=torch.zeros_like(ids),
        position_ids=torch.arange(8)[None],
        sequence_ids=torch.ones(1, 8, dtype=torch.int32),
        cu_seqlens=torch.tensor([0, 8], dtype=torch.int32),
        masked_lm_positions=3 * one,
        masked_lm_labels=2000 * one,
        cls_positions=0 * one,
        next_sentence_labels=one,
        max_seq_len=8,
        sequences=1,
        predictions=1,
        tokens=8,
        step_sequences=1,
        step_predictions=1,
    )


def _timed(update: Callable[[], None], into: list[float]) -> Callable[[], None]:
    def timed() -> None:
        _wait()
        start = time.perf_counter()
        update()
        _wait()
        into.append(time.perf_counter() - start)

    return timed


def _model(arguments: argparse.Namespace, meta: bool = False):
    config = ModelConfig(
        vocab_size=30522,
        hidden_size=1024,
        num_hidden_layers=arguments.layers,
        num_attention_heads=16,
        intermediate_size=4096,
    )
    device = "meta" if meta else "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = BertForPreTraining(config, generator=None)
    if meta:
        return sum(p.numel() for p in model.parameters())
    for p in model.parameters():
        torch.nn.init.normal_(p, 0, 0.02)
    return model


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=1, help="ZeRO stage: 0, 1 or 2")
    parser.add_argument("--layers", type=int, default=24, help="transformer layers (LARGE: 24)")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps a turn")
    parser.add_argument("--turns", type=int, default=2, help="times each optimiser is set up")
    parser.add_argument("--precision", default="auto", help="auto, fp32 or bf16")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main_guard(main))
