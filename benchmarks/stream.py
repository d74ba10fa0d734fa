"""How fast one core turns shards into batches, beside two others at the same work.

    python benchmarks/stream.py --dir data/wikibooks          # speed; without --dir: made-up text
    python benchmarks/stream.py --full-size [--windows N]     # planning at 4.5 billion tokens
    python benchmarks/stream.py --statistics                  # pairs beside the original's

ours                 planning, reading, checking, pairs, masks, packing: shards to tensors
hf_collator          transformers' DataCollatorForLanguageModeling, on pairs it need not make
original_procedure   BERT's own procedure in plain Python, on documents already in memory
Only real tokens are counted (special ones too), no padding. One process on one core, files in the
page cache; seconds are those the core worked for the process, so a busy neighbour changes little.
The last line is one JSON object; a ratio is ours / theirs, the lesser of 128 and 512.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from core.console import notice, wrap
from core.errors import main_guard
from data_pipeline.corpus.manifest import SOURCES, Manifest, ShardInfo, load_manifest
from data_pipeline.corpus.shards import ShardIndex, iterate_documents, read_index
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.stream.builder import BatchBuilder
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.pairs import plan_pairs
from data_pipeline.stream.plan import PhaseSpec, Planner, StreamConfig
from data_pipeline.stream.steps import Division
from data_pipeline.stream.windows import WindowIterator
from tests.data_pipeline.stream import original
from tests.datasets import write_dataset

PHASES = {
    128: PhaseSpec(
        max_seq_len=128, row_len=512, max_predictions=20, sequences_per_step=65536, rows_multiple=64
    ),
    512: PhaseSpec(
        max_seq_len=512,
        row_len=2048,
        max_predictions=80,
        sequences_per_step=32768,
        rows_multiple=64,
    ),
}
MICRO_BATCH_ROWS = {128: 64, 512: 16}
FULL = {"documents": 6_500_000, "sentences": 180_000_000, "tokens": 4_500_000_000}
NODE_TOKENS_PER_SECOND = 2.5e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", help="folder of shards; default: made-up text")
    parser.add_argument("--seconds", type=float, default=8.0, help="about how long each is timed")
    parser.add_argument("--full-size", action="store_true", help="plan 4.5 billion tokens")
    parser.add_argument("--statistics", action="store_true", help="compare pairs, not speed")
    parser.add_argument("--windows", type=int, default=0, help="of the full size; 0: an epoch")
    parser.add_argument("--phase", type=int, choices=PHASES, help="128 or 512 only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    phases = [args.phase] if args.phase else list(PHASES)
    if args.dir and not (Path(args.dir) / "manifest.json").exists():
        parser.error(f"--dir {args.dir}: no manifest.json there; `make demo` makes data/demo")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.dir) if args.dir else made_up(Path(scratch))
        if args.full_size:
            result = full_size(folder, phases, args.windows, Path(scratch))
        elif args.statistics:
            result = statistics(folder, phases)
        else:
            result = speed(folder, phases, args.seconds)
    print(json.dumps({"benchmark": "stream", **result}))


# -------------------------------------------------------------------------------------------- speed


def speed(folder: Path, phases: list[int], seconds: float) -> dict[str, Any]:
    for path in folder.iterdir():
        path.read_bytes()
    documents = [d.sentences() for d in islice(iterate_documents(folder), 4000)]
    plain_documents = [[s.tolist() for s in d] for d in documents]
    detail: dict[str, Any] = {}
    print(f"{'length':<8}{'':<26}{'M real tokens/s':>16}{'planning':>10}{'fill':>8}", flush=True)
    rows: dict[str, dict[int, float]] = {}

    def put(phase: int, name: str, rate: float, more: str = "") -> None:
        rows.setdefault(name, {})[phase] = rate
        print(f"{phase:<8}{name:<26}{rate / 1e6:>16.2f}{more}", flush=True)

    ways: dict[str, dict[str, Any]] = {
        "ours": {},
        "ours, whole words": {"whole_word_mask": True},
        "ours, balanced": {"next_sentence": "balanced"},
    }
    if (folder / SOURCES).exists():
        ways["ours, weights"] = {"weights": {load_manifest(folder).sources[-1].name: 2.5}}
    for phase in phases:
        for name, settings in ways.items():
            found = ours(folder, phase, seconds, settings)
            more = f"{found['planning_share']:>10.1%}{found['fill']:>8.1%}"
            put(phase, name, found.pop("tokens_per_second"), more)
            detail.setdefault(str(phase), {}).setdefault(name, found)
        put(phase, "original_procedure", plain(plain_documents, folder, phase, seconds))
        for kind, value in collators(plain_documents, folder, phase, seconds).items():
            put(phase, f"hf_collator, {kind}", value)
    theirs = {
        "hf_collator": {p: max(rows[f"hf_collator, {k}"][p] for k in COLLATED) for p in phases},
        "original_procedure": rows["original_procedure"],
    }
    ratio = {n: round(min(rows["ours"][p] / v[p] for p in phases), 2) for n, v in theirs.items()}
    for phase in phases:
        detail[str(phase)]["tokens_per_second"] = {n: round(v[phase]) for n, v in rows.items()}
    notice("\n".join(wrap(f"ratios (lesser of {phases}): {ratio}")))
    return {"ratio": ratio, "detail": detail}


def ours(folder: Path, phase: int, seconds: float, settings: dict[str, Any]) -> dict[str, Any]:
    """Windows planned and made from end to end; the time of planning counts."""
    data = StreamConfig(dir=str(folder), workers=0, **settings)
    dataset = Dataset(data)
    planner = dataset.planner(PHASES[phase], phase_index=0, seed=0, split="train")
    micro_rows = MICRO_BATCH_ROWS[phase]
    tokens = capacity = sequences = predictions = 0
    spent = planning = 0.0
    epoch = 0
    while spent < seconds or epoch < 2:
        began = time.process_time()
        windows = WindowIterator(planner, dataset.open_store(), (epoch, 0, 0), stop=True)
        plan = windows.first_plan()
        planning += time.process_time() - began
        windows.look_ahead = lambda: None  # the plan is timed above, not in a thread beside
        # A data set of less than a step is made in smaller ones.
        rows_per_step = min(planner.rows_per_step(plan), plan.rows // micro_rows * micro_rows)
        if rows_per_step == 0:
            sys.exit(f"error: {folder}: {plan.rows} rows at {phase}, fewer than a micro-batch has")
        builder = BatchBuilder(
            windows, planner.shape, dataset.vocabulary, rank=0, objective=dataset.objective,
            division=Division(rows_per_step, 1, rows_per_step // micro_rows, micro_rows),
        )  # fmt: skip
        for number in range(plan.rows // rows_per_step * (rows_per_step // micro_rows)):
            batch = builder.build(number).batch
            tokens += batch.tokens
            sequences += batch.sequences
            predictions += batch.predictions
            capacity += batch.input_ids.numel()
        spent += time.process_time() - began
        epoch += 1
    return {
        "tokens_per_second": tokens / spent,
        "planning_share": round(planning / spent, 3),
        "fill": round(tokens / capacity, 4),
        "predicted": round(predictions / tokens, 4),
        "random_next": round(float(plan.is_random.mean()), 4),
        "sequences_a_row": round(plan.sequences / plan.rows, 3),
        "rows_a_step": planner.rows_per_step(plan),
        "sequences_a_step": round(planner.rows_per_step(plan) * plan.sequences / plan.rows, 1),
    }


def plain(documents: list, folder: Path, phase: int, seconds: float) -> float:
    spec, tokenizer, rng = PHASES[phase], Tokenizer.from_dataset(folder), random.Random(0)
    ids = (tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id)
    ordinary = tokenizer.ordinary_ids.tolist()
    tokens, made = 0, []
    began = time.process_time()
    for number in range(len(documents)):
        for instance in original.pairs_of_document(documents, number, phase, 0.1, rng):
            masked = original.mask_instance(
                instance, ids, ordinary, 0.15, spec.max_predictions, rng
            )
            tokens += len(masked[0])
            made.append(original.pad(masked, phase, spec.max_predictions))
            if len(made) == 256:
                for key in made[0]:
                    torch.tensor([m[key] for m in made])
                made = []
        if time.process_time() - began > seconds:
            break
    return tokens / (time.process_time() - began)


COLLATED = ("lists", "tensors")


def collators(documents: list, folder: Path, phase: int, seconds: float) -> dict[str, float]:
    """Tokens a second of the collator on pairs made beforehand, given as lists and as tensors, with
    the special tokens' mask already there (it is slower without)."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    rng, tokenizer = random.Random(0), Tokenizer.from_dataset(folder)
    theirs = transformers.BertTokenizerFast(
        vocab={piece: number for number, piece in enumerate(tokenizer.pieces)}
    )
    collate = transformers.DataCollatorForLanguageModeling(
        theirs, mlm_probability=0.15, return_tensors="pt"
    )
    ready = []
    for number in range(len(documents)):
        for pair in original.pairs_of_document(documents, number, phase, 0.1, rng):
            a, b = pair.a, pair.b
            ready.append(
                {
                    "input_ids": [tokenizer.cls_id, *a, tokenizer.sep_id, *b, tokenizer.sep_id],
                    "token_type_ids": [0] * (len(a) + 2) + [1] * (len(b) + 1),
                    "attention_mask": [1] * (len(a) + len(b) + 3),
                    "special_tokens_mask": [1] + [0] * len(a) + [1] + [0] * len(b) + [1],
                    "next_sentence_label": int(pair.is_random),
                }
            )
        if len(ready) > 8192:
            break
    found = {}
    size = 256 * 128 // phase
    for kind in COLLATED:
        given = ready
        if kind == "tensors":
            given = [{k: torch.tensor(v) for k, v in one.items()} for one in ready]
        tokens, at, began = 0, 0, time.process_time()
        while time.process_time() - began < seconds / 2:
            batch = collate([dict(one) for one in given[at : at + size]])
            tokens += int(batch["attention_mask"].sum())
            at = (at + size) % (len(given) - size)
        found[kind] = tokens / (time.process_time() - began)
    return found


def made_up(scratch: Path) -> Path:
    """A dataset of random ids with the lengths of real text, about 8 million tokens."""
    rng = np.random.default_rng(0)
    documents = []
    for count in np.clip(rng.lognormal(2.7, 1.1, 8000), 1, 3000).astype(int):
        lengths = np.clip(rng.lognormal(3.05, 0.6, count), 1, 250).astype(int)
        documents.append([rng.integers(1000, 30000, n).tolist() for n in lengths])
    write_dataset(
        scratch / "made-up", documents, vocab=30522, documents_per_shard=1000,
        sources=["one", "other"], source_of=lambda name: int(name.split("-")[1]) // 100 % 2,
    )  # fmt: skip
    return scratch / "made-up"


# --------------------------------------------------------------------------------------- statistics


def statistics(folder: Path, phases: list[int]) -> dict[str, Any]:
    """The pairs of an epoch beside those of the original procedure on the same documents; the
    distance in standard errors, those of means over documents (pairs of one share its target)."""
    documents = [[s.tolist() for s in d.sentences()] for d in iterate_documents(folder)]
    lengths = np.array([len(s) for d in documents for s in d], np.uint16)
    counts = np.array([len(d) for d in documents])
    detail: dict[str, Any] = {}
    for phase in phases:
        rng, plainly = random.Random(0), []
        for number in range(len(documents)):
            for i in original.pairs_of_document(documents, number, phase, 0.1, rng):
                facts = (len(i.a), len(i.b), i.is_random, i.forced, i.short, i.cut, i.cut > 0)
                plainly.append((number, *facts))
        pairs = plan_pairs(lengths, counts, key=1, max_seq_len=phase, short_seq_prob=0.1)
        planned = np.column_stack(
            (pairs.document, pairs.a_length, pairs.b_length, pairs.is_random, pairs.forced,
             pairs.short, pairs.cut, pairs.cut > 0)
        )  # fmt: skip
        names = ("tokens of A", "tokens of B", "random B", "one-sentence chunk", "short target",
                 "tokens cut", "cut at all")  # fmt: skip
        print(f"at {phase}: {len(plainly):,} pairs plainly, {len(pairs):,} planned")
        found = {"pairs": [len(plainly), len(pairs)]}
        for column, name in enumerate(names, 1):
            (x, dx), (y, dy) = (
                _mean(np.array(table, float), column, len(documents))
                for table in (plainly, planned)
            )
            apart = abs(x - y) / np.hypot(dx, dy)
            print(f"  {name:<20}{x:>10.4f}{y:>10.4f}   {apart:.1f} standard errors apart")
            found[name] = [round(x, 4), round(y, 4), round(apart, 2)]
        detail[str(phase)] = found
    return {"ratio": {}, "detail": detail}


def _mean(table: np.ndarray, column: int, documents: int) -> tuple[float, float]:
    """(mean over pairs, its standard error with documents as the independent draws)."""
    which = table[:, 0].astype(int)
    sums = np.bincount(which, table[:, column], documents)
    sizes = np.bincount(which, minlength=documents)
    mean = sums.sum() / sizes.sum()
    return mean, float(np.sqrt(((sums - mean * sizes) ** 2).sum())) / sizes.sum()


# ---------------------------------------------------------------------------------------- full size


def full_size(folder: Path, phases: list[int], windows: int, scratch: Path) -> dict[str, Any]:
    """Plans windows of a synthetic corpus; its lengths are drawn from those of `folder`."""
    manifest, make_index = synthetic(folder)
    total = {n: sum(getattr(s, n) for s in manifest.shards) for n in FULL}
    print("synthetic manifest: " + ", ".join(f"{v / 1e6:,.1f} M {n}" for n, v in total.items()))
    print(f"{'phase':>6}{'window':>8}{'M tokens':>10}{'seconds':>9}{'of training':>12}{'fill':>8}"
          f"{'peak GB':>9}")  # fmt: skip
    detail: dict[str, Any] = {"manifest": total}
    for phase in phases:
        planner = Planner(
            manifest, lambda shard: read_checked(scratch, shard), StreamConfig(dir="synthetic"),
            PHASES[phase], phase_index=list(PHASES).index(phase), seed=0,
        )  # fmt: skip
        spent, tokens, capacity, sequences, rows, shares = 0.0, 0, 0, 0, 0, []
        before = None
        for window in range(min(windows or planner.windows, planner.windows)):
            shards = planner.window_shards(0, window)
            for shard in shards:
                (scratch / f"{shard.name}.idx").write_bytes(make_index(int(shard.name[-6:])))
            began = time.process_time()
            plan = planner.plan(0, window)
            took = time.process_time() - began
            for shard in shards:
                (scratch / f"{shard.name}.idx").unlink()
            made = int(plan.row_tokens[-1])
            share = took / (made / NODE_TOKENS_PER_SECOND)
            shares.append(share)
            spent, tokens, rows = spent + took, tokens + made, rows + plan.rows
            capacity += plan.rows * planner.shape.row_len
            sequences += plan.sequences
            print(f"{phase:>6}{window:>8}{made / 1e6:>10.1f}{took:>9.2f}{share:>12.2%}"
                  f"{made / (plan.rows * planner.shape.row_len):>8.2%}{peak_gb():>9.2f}",
                  flush=True)  # fmt: skip
            if window == 0:
                rows_a_step = planner.rows_per_step(plan)
            before = plan  # a rank holds the current window while the next is planned
        assert before is not None
        detail[str(phase)] = {
            "windows": len(shares),
            "windows_an_epoch": planner.windows,
            "seconds_a_window": round(spent / len(shares), 3),
            "share_of_training_time": round(spent / (tokens / NODE_TOKENS_PER_SECOND), 4),
            "worst_share": round(max(shares), 4),
            "million_tokens": round(tokens / 1e6, 1),
            "sequences": sequences,
            "fill": round(tokens / capacity, 4),
            "rows_a_step": rows_a_step,
            "sequences_a_step": round(rows_a_step * sequences / rows, 1),
            "recipe": PHASES[phase].sequences_per_step,
        }
        print(f"{phase}: {detail[str(phase)]}")
        del before, plan
        gc.collect()
    detail["peak_memory_gb"] = round(peak_gb(), 3)
    return {"ratio": {}, "detail": detail}


def peak_gb() -> float:
    # Not getrusage: its peak counts what the parent held when this process was forked.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e9


def read_checked(scratch: Path, shard: ShardInfo) -> ShardIndex:
    """As the stream reads an index: file, sha256, arrays."""
    path = scratch / f"{shard.name}.idx"
    hashlib.sha256(path.read_bytes()).hexdigest()
    return read_index(path)


def synthetic(folder: Path) -> tuple[Manifest, Any]:
    """(manifest of FULL size, index bytes of shard n). A document's sentence count and a sentence's
    length are draws from the real histograms, the counts scaled to the mean of FULL."""
    indexes = [read_index(folder / f"{s.name}.idx") for s in load_manifest(folder).split("train")]
    counts = np.concatenate([i.sentence_counts for i in indexes]).astype(float)
    lengths = np.concatenate([i.sentence_lengths for i in indexes])
    # Scaling by a constant keeps the skew; the few counts below one sentence become one.
    wanted, scale = FULL["sentences"] / FULL["documents"], 1.0
    for _ in range(50):
        scale *= wanted / np.maximum(1, np.rint(counts * scale)).mean()
    counts = np.maximum(1, np.rint(counts * scale)).astype(np.int64)
    stretch = FULL["tokens"] / FULL["sentences"] / lengths.mean()
    shards = 640
    documents = -(-FULL["documents"] // shards)

    def drawn(number: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(number)
        some = rng.choice(counts, documents)
        drawn_lengths = rng.choice(lengths, int(some.sum())) * stretch + rng.random(int(some.sum()))
        return some, np.clip(drawn_lengths, 1, 65535).astype(np.uint16)

    def index_bytes(number: int) -> bytes:
        some, drawn_lengths = drawn(number)
        n = len(some)
        sizes = 512 + 0 * some
        head = b"BERTIDX1" + np.uint32(n).tobytes() + np.uint64(len(drawn_lengths)).tobytes()
        return head + b"".join(
            (
                (1024 * np.arange(n, dtype=np.uint64)).tobytes(),
                sizes.astype(np.uint32).tobytes(),
                np.zeros(n, np.uint32).tobytes(),
                some.astype(np.uint32).tobytes(),
                drawn_lengths.tobytes(),
            )
        )

    infos = []
    for number in range(shards):
        some, drawn_lengths = drawn(number)
        infos.append(
            ShardInfo(
                f"shard-{number:06d}", "train", 0, "", 0, "", len(some),
                len(drawn_lengths), int(drawn_lengths.sum(dtype=np.int64)),
            )
        )  # fmt: skip
    return Manifest(30522, "", True, tuple(infos), ()), index_bytes


if __name__ == "__main__":
    sys.exit(main_guard(main))
