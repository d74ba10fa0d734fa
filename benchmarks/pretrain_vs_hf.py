"""What a budget of tokens and of time buys: this trainer beside Hugging Face's usual way.

    python benchmarks/pretrain_vs_hf.py --data DIR --out DIR [--config configs/pretrain_mini.yaml]

ours   pretrain/run.py with the config: its phases, packed rows, its optimiser
hf     transformers' BertForPreTraining of the same shape, at the length of the last phase: pairs
       made by BERT's own procedure, DataCollatorForLanguageModeling, padded, torch's AdamW, linear
       warm-up over 10 % and linear decay, clipping at 1, sdpa, autocast to bf16 where ours is in
       bf16. Sequences a step, peak rate, dropout and scale of the initial weights are ours.

Both see the same shards, on one thread, with one budget of tokens (what our rows hold, of which
under 1 % is padding). One evaluation for both: our model with the weights of either, on the
config's held-out rows of the last phase, at every checkpoint. Time is CPU time of the whole
process: start, checkpoints and data count, evaluations do not. A busy neighbour changes it little;
on an idle core it is wall time.

The sides run one after the other and go on where they stopped or were killed, so the same command
may run in pieces; `--sides` chooses. What there is so far is written at every end: OUT/curves.json,
OUT/over_tokens.svg, OUT/over_seconds.svg, and a last line that is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import psutil
import torch
import transformers
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs.load import load
from core.errors import main_guard
from core.files import replacing, write_json
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.heldout import HeldOut
from pretrain.checkpoint import load_model_state, read_state
from pretrain.config import PretrainConfig
from pretrain.evaluate import guessing, guessing_sums, score, token_counts
from pretrain.model import BertForPreTraining
from tests.data_pipeline.stream import original

RUN = Path(__file__).resolve().parent.parent / "pretrain" / "run.py"


class Stop(Exception):
    """A signal asks to end; the same command goes on."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="folder of shards")
    parser.add_argument("--out", required=True, type=Path, help="folder of runs and results")
    parser.add_argument("--config", default="configs/pretrain_mini.yaml", help="of ours")
    parser.add_argument("--set", dest="overrides", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--sides", nargs="*", default=["ours", "hf"], choices=["ours", "hf"])
    parser.add_argument("--evaluations", type=int, default=20, help="points of their curve")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    overrides = [*arguments.overrides, f"data.dir={arguments.data}", f"run_dir={out / 'ours'}"]
    overrides += ["threads=1", "data.workers=0", "device=cpu", "evaluation.every_steps=0"]
    config = load(arguments.config, PretrainConfig, overrides)
    if any(phase.rows_per_step is None for phase in config.phases):
        sys.exit(f"error: {arguments.config}: phases.N.rows_per_step is to be given: the budget")
    judge = Judge(config)
    sides = {
        "ours": lambda: train_ours(config, arguments.config, overrides, out),
        "hf": lambda: train_theirs(config, judge, out, arguments.evaluations),
    }
    before = {number: signal.signal(number, _stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for side in arguments.sides:
            sides[side]()
    except Stop:
        print("stopped: the same command goes on", flush=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    curves = {"ours": ours_curve(config, judge, out), "hf": _lines(out / "hf.jsonl")}
    write_json(out / "curves.json", curves)
    for key, name, unit in (("tokens", "million tokens", 1e6), ("seconds", "CPU minutes", 60)):
        figure = Figure(figsize=(7, 4), layout="tight")
        axes = figure.subplots()
        for side, points in curves.items():
            axes.plot([p[key] / unit for p in points], [p["mlm_loss"] for p in points], label=side)
        axes.axhline(judge.unigram, color="gray", linestyle=":", label="token frequencies")
        axes.set_xlabel(name)
        axes.set_ylabel(f"held-out masked LM at {config.phases[-1].max_seq_len}, nats")
        axes.legend()
        figure.savefig(out / f"over_{key}.svg", metadata={"Date": None})
    last = {side: points[-1] for side, points in curves.items() if points}
    result = {"benchmark": "pretrain_vs_hf", "unigram": judge.unigram, "last": last}
    if len(last) == 2:
        result["ratio"] = {"tokens_per_second": _rate(last["ours"]) / _rate(last["hf"])}
    print(json.dumps(result), flush=True)


def _rate(point: dict[str, float]) -> float:
    return point["tokens"] / point["seconds"]


class Judge:
    """The evaluation that both sides meet."""

    def __init__(self, config: PretrainConfig) -> None:
        self.dataset = Dataset(config.data)
        self.shape = config.model.with_vocab_size(self.dataset.manifest.vocab_size)
        self.batches = HeldOut(
            self.dataset,
            config.phases[-1],
            seed=config.seed,
            rank=0,
            world=1,
            micro_batch_rows=1,
            rows=config.evaluation.rows,
        )
        counts, sep_id = token_counts(self.dataset), self.dataset.tokenizer.sep_id
        self.unigram = guessing(guessing_sums(self.batches, counts, sep_id)).entropy

    def __call__(self, weights: dict[str, torch.Tensor]) -> dict[str, float]:
        model = BertForPreTraining(self.shape, generator=None)
        known = model.state_dict()
        for name, tensor in known.items():
            # Of rows that pad the vocabulary nothing is predicted, but what is no number spreads.
            tensor.zero_()[: len(weights[name])].copy_(weights[name])
        return vars(score(model.eval(), self.batches))


# ------------------------------------------------------------------------------------------- ours


def train_ours(config: PretrainConfig, file: str, overrides: list[str], out: Path) -> None:
    """Run or go on; the CPU seconds at each checkpoint are added to OUT/ours.jsonl."""
    log, folder = out / "ours.jsonl", Path(config.run_dir) / "checkpoints"
    known = {line["step"]: line["seconds"] for line in _lines(log)}
    if config.total_steps in known:
        return
    newest = max((_step(p) for p in folder.glob("step-*") if _step(p) in known), default=0)
    spent = known.get(newest, 0.0)
    command = [sys.executable, str(RUN), "--config", file, "--set", *overrides]
    child = subprocess.Popen(command, start_new_session=True)
    process, alive = psutil.Process(child.pid), True
    try:
        while alive:
            alive = child.poll() is None  # and one look after its end
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
            for path in folder.glob("step-*/COMPLETE.json"):
                if _step(path.parent) not in known:
                    known[_step(path.parent)] = spent + times.user + times.system
                    entry = {"step": _step(path.parent), "seconds": known[_step(path.parent)]}
                    with log.open("a") as file_:
                        file_.write(json.dumps(entry) + "\n")
            time.sleep(0.1)
    except Stop:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            child.wait()
            raise
    if child.wait():
        sys.exit(f"error: {' '.join(command)} ended with {child.returncode}")


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def ours_curve(config: PretrainConfig, judge: Judge, out: Path) -> list[dict[str, float]]:
    """A point a checkpoint that is kept; scores are kept in OUT/ours_scores.json."""
    run, points = Path(config.run_dir), []
    scores_file = out / "ours_scores.json"
    scores = json.loads(scores_file.read_text()) if scores_file.exists() else {}
    for line in sorted(_lines(out / "ours.jsonl"), key=lambda line: line["step"]):
        folder, step = run / "checkpoints" / f"step-{line['step']:08d}", str(line["step"])
        if step not in scores:
            if not folder.exists():
                continue
            scores[step] = judge(load_model_state(folder)[0]) | {"tokens": _tokens(folder, run)}
        points.append(line | scores[step])
    write_json(scores_file, scores)
    return points


def _tokens(checkpoint: Path, run: Path) -> float:
    """Real tokens up to a checkpoint: those of its phase are counted in it, those of the phases
    before are their positions less the padding that metrics.jsonl shows."""
    state = read_state(checkpoint)
    phases = [
        PretrainConfig.model_validate(state.config).phases[i]
        for i in range(len(state.config["phases"]))
    ]
    padding: dict[int, list[float]] = {}
    for line in _lines(run / "metrics.jsonl"):
        if "throughput/padding_share" in line:
            padding.setdefault(round(line["rate/phase"]) - 1, []).append(
                line["throughput/padding_share"]
            )
    total = float(state.stream.tokens) if state.stream is not None else 0.0
    for i in range(state.position.phase):
        positions = (
            phases[i].steps
            * phases[i].rows_per_step
            * (phases[i].row_len or 4 * phases[i].max_seq_len)
        )
        total += positions * (1 - sum(padding[i]) / len(padding[i]))
    return total


# ----------------------------------------------------------------------------------------- theirs


def pairs(dataset: Dataset, max_seq_len: int, seed: int) -> Iterator[dict[str, Any]]:
    """Examples for their collator, without end; each epoch has an order and pairs of its own."""
    tokenizer = dataset.tokenizer
    documents = [[s.tolist() for s in d.sentences()] for d in dataset.documents("train")]
    epoch = 0
    while True:
        rng = random.Random(f"{seed} {epoch}")
        order = list(range(len(documents)))
        rng.shuffle(order)
        pool: list[dict[str, Any]] = []
        for number in order:
            for pair in original.pairs_of_document(documents, number, max_seq_len, 0.1, rng):
                ids = [tokenizer.cls_id, *pair.a, tokenizer.sep_id, *pair.b, tokenizer.sep_id]
                pool.append(
                    {
                        "input_ids": ids,
                        "token_type_ids": [0] * (len(pair.a) + 2) + [1] * (len(pair.b) + 1),
                        "next_sentence_label": int(pair.is_random),
                    }
                )
            if len(pool) >= 50_000:
                rng.shuffle(pool)
                yield from pool
                pool = []
        rng.shuffle(pool)
        yield from pool
        epoch += 1


def train_theirs(config: PretrainConfig, judge: Judge, out: Path, evaluations: int) -> None:
    """Run or go on from OUT/hf.pt; a line of OUT/hf.jsonl an evaluation."""
    phase, tokenizer = config.phases[-1], judge.dataset.tokenizer
    budget = sum(
        p.steps * p.rows_per_step * (p.row_len or 4 * p.max_seq_len) for p in config.phases
    )
    shape = judge.shape
    torch.manual_seed(config.seed)
    model = transformers.BertForPreTraining(
        transformers.BertConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            num_hidden_layers=shape.num_hidden_layers,
            num_attention_heads=shape.num_attention_heads,
            intermediate_size=shape.intermediate_size,
            max_position_embeddings=shape.max_position_embeddings,
            hidden_dropout_prob=shape.hidden_dropout_prob,
            attention_probs_dropout_prob=shape.attention_probs_dropout_prob,
            initializer_range=shape.initializer_range,
            attn_implementation="sdpa",
        )
    ).train()
    decay = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, eps=1e-6, fused=True)
    theirs = transformers.BertTokenizerFast(
        vocab={piece: number for number, piece in enumerate(tokenizer.pieces)}
    )
    collate = transformers.DataCollatorForLanguageModeling(theirs, mlm_probability=0.15)
    at = {"step": 0, "tokens": 0, "seconds": 0.0, "points": 0}
    file, log = out / "hf.pt", out / "hf.jsonl"
    began = time.process_time()
    if file.exists():
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        at = saved["at"]
        kept = [line for line in _lines(log) if line["step"] <= at["step"]]
        log.write_text("".join(json.dumps(line) + "\n" for line in kept))
    if at["tokens"] >= budget:
        return
    examples = pairs(judge.dataset, phase.max_seq_len, config.seed)
    for _ in range(at["step"] * phase.sequences_per_step):
        next(examples)
    if at["step"]:
        began = time.process_time()  # what a run in one piece would not do
    bf16 = config.engine.precision == "bf16"

    def save() -> None:
        nonlocal began
        now = time.process_time()
        at["seconds"], began = at["seconds"] + now - began, now
        with replacing(file, durable=False) as new:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "at": at}, new
            )

    try:
        while at["tokens"] < budget:
            torch.manual_seed(config.seed * 1_000_003 + at["step"])
            batch = collate([next(examples) for _ in range(phase.sequences_per_step)])
            done = at["tokens"] / budget
            rate = phase.learning_rate * min(done / 0.1 + 1e-3, (1 - done) / 0.9, 1)
            for group in optimizer.param_groups:
                group["lr"] = rate
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            at["step"] += 1
            at["tokens"] += int(batch["attention_mask"].sum())
            if at["tokens"] >= min((at["points"] + 1) * budget / evaluations, budget):
                at["points"] += 1
                save()
                point = {k: at[k] for k in ("step", "tokens", "seconds")}
                point |= judge(_named(model))
                with log.open("a") as lines:
                    lines.write(json.dumps(point) + "\n")
                print(
                    f"hf step {at['step']}: {at['tokens'] / 1e6:.2f} M tokens, "
                    f"{at['seconds']:.0f} s, {point['mlm_loss']:.3f} nats, "
                    f"{point['mlm_accuracy']:.1%} right",
                    flush=True,
                )
                began = time.process_time()
    except Stop:
        save()
        raise


def _named(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Their names are ours, the tied decoder aside."""
    return {n: t.float() for n, t in model.state_dict().items() if ".decoder." not in n}


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def _stop(_number: int, _frame: object) -> None:
    raise Stop


if __name__ == "__main__":
    sys.exit(main_guard(main))
