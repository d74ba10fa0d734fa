"""Scores after fine-tuning, here and by Hugging Face: same weights, data, seeds and budget.

    python benchmarks/finetune_scores_vs_hf.py [--tasks-dir DIR --weights DIR --out DIR]

DIR of the tasks: finetune_tasks.tar.xz unpacked (glue/, squad/, conll2003/). DIR of the weights: a
Hugging Face BERT folder. Ours runs as finetune/run.py does it, theirs is their model on padded
inputs in a plain loop; both start with the same new layers, see the same examples in the same order
at the same rates in fp32, and count as they stand at the end. Feature-based: their BertModel's
states under torch's LSTM. What is left to chance is dropout; with --without-dropout the two train
alike to rounding, so one seed of a small share shows whether they do.

Without arguments: a made-up task and a small encoder, without dropout, in half a minute.
Every finished run is a result.json below --out and is not run again, so the same command goes on
where it stopped; `python -m finetune report OUT` shows the same runs with the paper's numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from scipy import stats
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.finetune_vs_hf import Padded, adamw
from core.errors import main_guard
from core.files import write_json
from data_pipeline.corpus.tokenizer import Tokenizer
from finetune import grid, loading
from finetune.batches import step_items, steps_of
from finetune.config import FinetuneConfig
from finetune.features import FeatureNer, Tagger, Words, layers_of
from finetune.glue import Glue
from finetune.metrics import answer_scores
from finetune.ner import Ner
from finetune.results import RESULT
from finetune.squad import Squad
from finetune.tasks import Score, Task, open_task
from finetune.train import Job
from pretrain.hugging_face import Pretrained
from pretrain.schedule import ScheduleConfig, learning_rate
from tests.finetune import tiny

CPU = torch.device("cpu")
SIDES = ("ours", "hf", "random")
WITHIN = {True: "yes", False: "no", None: "-"}


@dataclass(frozen=True)
class Budget:
    """train, dev: examples (NER: sentences). seeds: of ours and theirs; random weights get one."""

    train: int
    dev: int
    batch_size: int
    learning_rate: float
    epochs: float
    seeds: int


# dev 0: all. The whole train.tsv but of SST-2; of SQuAD the sample's articles less those of dev.
BUDGETS = {
    "SST-2": Budget(6000, 0, 16, 1e-4, 1, 3),
    "NER-concat_last_four": Budget(1000, 1000, 8, 1e-3, 4, 3),
    "NER": Budget(800, 400, 8, 2e-4, 3, 2),
    "CoLA": Budget(8551, 0, 16, 1e-4, 3, 3),
    "STS-B": Budget(5749, 0, 16, 1e-4, 2, 3),
    "RTE": Budget(2490, 0, 16, 1e-4, 3, 2),
    "MRPC": Budget(3668, 0, 16, 1e-4, 3, 3),
    "SQuAD-2.0": Budget(2000, 400, 8, 2e-4, 2, 2),
}


def budget_of(name: str, options: argparse.Namespace) -> Budget:
    b, share = BUDGETS[name], options.share
    dev = b.dev or 1000
    return replace(b, train=round(share * b.train), dev=b.dev if share == 1 else round(share * dev))


def config_of(name: str, side: str, options: argparse.Namespace) -> FinetuneConfig:
    b, tasks = budget_of(name, options), options.tasks_dir
    if name == "SQuAD-2.0":
        file = str(tasks / "squad" / "v2.0-sample.json")
        section: dict[str, Any] = {
            "squad": {"version": "2.0", "train_file": file, "dev_share": 0.125}
        }
    elif name.startswith("NER"):
        conll = tasks / "conll2003"
        section = {
            "ner": {
                "train_file": str(conll / "eng.train"),
                "dev_file": str(conll / "eng.testa"),
                "max_seq_len": 128,
                "features": name.partition("-")[2] or None,
                "lstm_dropout": 0.0 if options.without_dropout else 0.1,
            }
        }
    else:
        section = {"glue": {"dir": str(tasks / "glue"), "tasks": [name]}}
    return FinetuneConfig(
        run_dir=str(options.out / name / side),
        encoder={
            "path": str(options.weights),
            "init": "random" if side == "random" else "pretrained",
        },
        grid={
            "batch_size": [b.batch_size],
            "learning_rate": [b.learning_rate],
            "epochs": [b.epochs],
            "seeds": list(range(1 if side == "random" else b.seeds)),
        },
        train={
            "train_examples": b.train,
            "dev_examples": b.dev,
            "select": "last",
            "keep_weights": "none",
            "predict_test": False,
            "precision": "fp32",
        },
        device="cpu",
        threads=1,
        **section,
    )


# ------------------------------------------------------------------------------------ Hugging Face


class PlainTagger(nn.Module):
    """torch's LSTM and a linear layer on [N, L, E] features, with the start of our Tagger."""

    def __init__(self, start: Tagger) -> None:
        super().__init__()
        self.p = start.dropout_p
        old = start.lstm
        self.lstm = nn.LSTM(
            old.input_size,
            old.hidden_size,
            old.num_layers,
            batch_first=True,
            bidirectional=True,
            dropout=old.dropout,
        )
        self.classifier = nn.Linear(start.classifier.in_features, start.classifier.out_features)
        self.load_state_dict(start.state_dict())

    def forward(self, rows: list[torch.Tensor]) -> torch.Tensor:
        packed = nn.utils.rnn.pack_sequence(
            [nn.functional.dropout(r, self.p, self.training) for r in rows], enforce_sorted=False
        )
        out = nn.utils.rnn.unpack_sequence(self.lstm(packed)[0])
        return self.classifier(nn.functional.dropout(torch.cat(out), self.p, self.training))


class PaddedFeatures:
    """Their hidden states of every word's first piece, and a tagger on them.

    The same interface as `Padded`; an item is a sentence of words.
    """

    def __init__(self, ner: FeatureNer, start: Tagger, weights: Path) -> None:
        assert ner.config.features == "concat_last_four"
        bert = transformers.BertModel.from_pretrained(weights, dtype=torch.float32).eval()
        layers = layers_of(ner.config.features, bert.config.num_hidden_layers)
        self.model = PlainTagger(start)
        states = []
        for name, sentences in ner.sentences.items():
            words = sum(len(s.words) for s in sentences)
            found = torch.zeros(words, len(layers) * bert.config.hidden_size)
            for item, window in zip(ner.encoded[name], ner.windows[name], strict=True):
                s = item.sequences[0]
                with torch.no_grad():
                    hidden = bert(
                        input_ids=torch.from_numpy(s.ids[None].astype(np.int64)),
                        token_type_ids=torch.from_numpy(s.types[None].astype(np.int64)),
                        output_hidden_states=True,
                    ).hidden_states
                rows = torch.cat([hidden[n][0] for n in layers], -1)
                found[window.words] = rows[window.places]
            states.append(found)
        self.states = torch.cat(states)

    def _rows(self, items: list[Words]) -> list[torch.Tensor]:
        return [self.states[item.rows] for item in items]

    def loss(self, items: list[Words], _length: int | None) -> torch.Tensor:
        labels = torch.from_numpy(np.concatenate([item.label for item in items]))
        return nn.functional.cross_entropy(self.model(self._rows(items)), labels)

    @torch.no_grad()
    def predict(self, items: list[Words]) -> list[np.ndarray]:
        self.model.eval()
        return [self.model(self._rows([item])).numpy() for item in items]


def train_theirs(
    config: FinetuneConfig, task: Task, source: Pretrained, job: Job
) -> tuple[Score, dict[str, list[np.ndarray]], float]:
    """Score and outputs on dev after one run, and its seconds."""
    started = time.perf_counter()
    ours, _ = loading.build(source, task.head, config.encoder, job.seed)
    weights, pad_id = Path(config.encoder.path), source.tokenizer.pad_id
    sets = task.sets
    if isinstance(task, FeatureNer):
        layers = layers_of(task.config.features, source.shape.num_hidden_layers)
        shapes = [np.zeros((1, source.shape.hidden_size), np.float16)] * len(layers)
        generator = torch.Generator().manual_seed(job.seed)
        start = Tagger(shapes, task.head, task.config, generator)
        theirs: Any = PaddedFeatures(task, start, weights)
    else:
        theirs = Padded(ours, pad_id, CPU, weights)
    torch.manual_seed(job.seed)
    items, model = sets["train"], theirs.model
    steps = steps_of(len(items), job.batch_size, job.epochs)
    optimizer = adamw(model, config.train, job.learning_rate)
    schedule = ScheduleConfig(
        learning_rate=job.learning_rate,
        warmup=config.train.warmup,
        decay="linear",
        convention="continuous",
    )
    for step in range(steps):
        model.train()
        chosen = [items[i] for i in step_items(len(items), job.batch_size, job.seed, step)]
        theirs.loss(chosen, None).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.train.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, schedule)
        optimizer.step()
        optimizer.zero_grad()
    outputs = {name: theirs.predict(sets[name]) for name in task.dev_sets}
    return task.score(outputs), outputs, time.perf_counter() - started


def run_theirs(config: FinetuneConfig, task: Task, source: Pretrained, job: Job) -> None:
    score, outputs, seconds = train_theirs(config, task, source, job)
    folder = grid.folder_of(config, job)
    (folder / "predictions").mkdir(parents=True, exist_ok=True)
    if outputs:
        task.write(outputs, score, folder / "predictions")
    result = {
        **grid.identity(config, source, job),
        "trained": "all, Hugging Face" if not job.task.startswith("NER-") else "features, HF",
        "main": score.main,
        "scores": score.values,
        "state": score.state,
        "failed": score.failed,
        "seconds": round(seconds, 1),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    write_json(folder / RESULT, result)


def differing_tokens(task: Task, ours: Tokenizer, weights: Path) -> tuple[int, int]:
    """(sequences that Hugging Face's tokenizer gives otherwise, sequences looked at).

    Of SQuAD the windows that hold a whole context, of NER the words.
    """
    theirs = transformers.AutoTokenizer.from_pretrained(weights)
    differing = total = 0
    for name in ("train", "dev"):
        if isinstance(task, Glue):
            limit = max(item.tokens for item in task.sets[name])
            pairs = [
                (theirs(*row.texts, truncation=True, max_length=max(limit, 8)), item)
                for row, item in zip(task.rows[name], task.sets[name], strict=True)
            ]
        elif isinstance(task, Squad):
            counts = Counter(w.question for w in task.windows[name])
            pairs = [
                (theirs(task.questions[name][w.question].text, q.context), item)
                for w, item in zip(task.windows[name], task.sets[name], strict=True)
                if counts[w.question] == 1
                for q in [task.questions[name][w.question]]
            ]
        else:
            assert isinstance(task, Ner)
            words = sorted({w for s in task.sentences[name] for w in s.words})
            total += len(words)
            pieces = theirs(words, add_special_tokens=False)["input_ids"]
            differing += sum(a != b for a, b in zip(pieces, ours.encode_batch(words), strict=True))
            continue
        total += len(pairs)
        for encoded, item in pairs:
            s = item.sequences[0]
            same = encoded["input_ids"] == s.ids.tolist()
            differing += not (same and encoded["token_type_ids"] == s.types.tolist())
    return differing, total


# ----------------------------------------------------------------------------------------- results


def scores_of(config: FinetuneConfig) -> list[dict[str, Any]]:
    """Results of a side's finished runs, by seed."""
    found = []
    for job in grid.jobs(config):
        path = grid.folder_of(config, job) / RESULT
        if path.exists():
            found.append(json.loads(path.read_text(encoding="utf-8")))
    return found


def constant(task: Task) -> float:
    """The score of a guess that is the same everywhere."""
    if isinstance(task, Glue) and task.head.labels:
        guess = Counter(row.label for row in task.rows["train"]).most_common(1)[0][0]
        row = np.eye(len(task.head.labels))[guess]
        return task.score({name: [row] * len(task.sets[name]) for name in task.dev_sets}).value
    if isinstance(task, Squad):
        return 100 * statistics.fmean(not golds for golds in task.golds.values())
    return 0.0


def span_f1(task: Squad, config: FinetuneConfig) -> list[float]:
    """F1 of the best span on the questions that have an answer, whatever tau says; by seed."""
    values = []
    for job in grid.jobs(config):
        path = grid.folder_of(config, job) / "predictions" / "dev_nbest_predictions.json"
        if (grid.folder_of(config, job) / RESULT).exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            texts = {q: next((e["text"] for e in found[q] if e["text"]), "") for q in found}
            f1 = [answer_scores(texts[q], g, "2.0")[1] for q, g in task.golds.items() if g]
            values.append(100 * statistics.fmean(f1))
    return values


def compare(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Means, sample deviations, and whether the difference is within noise.

    half_width: of the 95 % interval of the difference of two means by Student's t, one variance.
    """
    n, m = len(ours), len(theirs)
    result: dict[str, Any] = {"ours": [round(x, 2) for x in ours]}
    result["hugging_face"] = [round(x, 2) for x in theirs]
    if n and m:
        result["difference"] = round(statistics.fmean(ours) - statistics.fmean(theirs), 2)
    if n > 1 and m > 1:
        squares = (n - 1) * statistics.variance(ours) + (m - 1) * statistics.variance(theirs)
        error = (squares / (n + m - 2) * (1 / n + 1 / m)) ** 0.5
        result["half_width"] = round(float(stats.t.ppf(0.975, n + m - 2)) * error, 2)
        result["within"] = abs(result["difference"]) <= result["half_width"]
        result["within_their_deviation"] = abs(result["difference"]) <= statistics.stdev(theirs)
    return result


def cell(values: list[float]) -> str:
    if not values:
        return "-"
    text = " ".join(f"{v:.2f}" for v in values)
    if len(values) > 1:
        text += f", mean {statistics.fmean(values):.2f} +- {statistics.stdev(values):.2f}"
    return text


def table(names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Print the comparison as markdown; the detail for the JSON line."""
    detail: dict[str, Any] = {}
    print(
        "| task | measure | train / dev | batch, rate, epochs | constant guess | ours | "
        "Hugging Face | difference, 95 % | within | ours from random weights |\n"
        + "|---" * 10
        + "|"
    )
    for name in names:
        sides = {side: config_of(name, side, options) for side in SIDES}
        found = {side: scores_of(config) for side, config in sides.items()}
        if not found["ours"]:
            continue
        source = loading.read(sides["ours"].encoder, sides["ours"].task.max_seq_len)
        task = open_task(sides["ours"], name, source.tokenizer)
        measures = list(dict.fromkeys([found["ours"][0]["main"], "accuracy"]))
        rows = {
            measure: {s: [r["scores"][measure] for r in found[s]] for s in SIDES}
            for measure in measures
            if measure in found["ours"][0]["scores"]
        }
        if isinstance(task, Squad):
            rows["f1 of the best span, answerable"] = {s: span_f1(task, sides[s]) for s in SIDES}
        for at, (measure, values) in enumerate(rows.items()):
            b, sizes = budget_of(name, options), {k: len(v) for k, v in task.sets.items()}
            result = compare(values["ours"], values["hf"])
            result["random"] = [round(x, 2) for x in values["random"]]
            result["failed"] = {s: sum(r["failed"] for r in found[s]) for s in SIDES}
            differing, total = differing_tokens(task, source.tokenizer, options.weights)
            result["differing_tokens"] = f"{differing} of {total}"
            detail[f"{name} {measure}" if at else name] = result
            failed = {s: f" ({n} failed)" if n else "" for s, n in result["failed"].items()}
            difference = f"{result['difference']:+.2f}" if "difference" in result else "-"
            width = f", +-{result['half_width']:.2f}" if "half_width" in result else ""
            print(
                f"| {name} | {measure} | {b.train} / {b.dev or sizes['dev']} | {b.batch_size}, "
                f"{b.learning_rate:g}, {b.epochs:g} | {f'{constant(task):.2f}' if not at else '-'} "
                f"| {cell(values['ours'])}{failed['ours']} | {cell(values['hf'])}{failed['hf']} | "
                f"{difference}{width} | {WITHIN[result.get('within')]} | "
                f"{cell(values['random'])}{failed['random']} |",
                flush=True,
            )
    return detail


def work(names: list[str], options: argparse.Namespace) -> None:
    """Task after task two seeds and the random weights, then the other seeds."""
    most = options.seeds or max(BUDGETS[n].seeds for n in names)
    plan = [
        (name, side, seed)
        for seeds in (range(min(2, most)), range(2, most))
        for name in names
        for seed in seeds
        for side in ("ours", "hf", *(["random"] if seed == 1 else []))
        if seed < BUDGETS[name].seeds
    ]
    plan = [(name, side, 0 if side == "random" else seed) for name, side, seed in plan]
    deadline = time.monotonic() + 60 * (options.minutes or float("inf"))
    for name, side, seed in plan:
        config = config_of(name, side, options)
        job = next(j for j in grid.jobs(config) if j.seed == seed)
        if (grid.folder_of(config, job) / RESULT).exists():
            continue
        if time.monotonic() > deadline:
            print(f"{options.minutes} minutes are over; the same command goes on")
            return
        if side != "hf":
            one = config.model_copy(
                update={"grid": config.grid.model_copy(update={"seeds": (seed,)})}
            )
            code = grid.sweep(one)
            if code:
                raise SystemExit(code)
            continue
        folder = grid.prepare(config)
        source = loading.read(config.encoder, config.task.max_seq_len)
        run_theirs(config, open_task(config, name, source.tokenizer), source, job)
        result = json.loads((grid.folder_of(config, job) / RESULT).read_text(encoding="utf-8"))
        shown = "  ".join(f"{k} {v:.2f}" for k, v in result["scores"].items())
        print(f"Hugging Face {folder.parent.name} {job.name}: {shown}", flush=True)


def without_dropout(weights: Path, folder: Path) -> Path:
    """A folder of links to the weights' files beside a config.json without dropout."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in weights.iterdir():
        if file.is_file() and not (folder / file.name).exists() and file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    plain = json.loads((weights / "config.json").read_text(encoding="utf-8"))
    plain |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    write_json(folder / "config.json", plain)
    return folder


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks-dir", type=Path, help="folder with glue/, squad/ and conll2003/")
    parser.add_argument("--weights", type=Path, help="a Hugging Face BERT folder, uncased")
    parser.add_argument("--out", type=Path, help="folder of the results, kept and gone on with")
    parser.add_argument("--tasks", nargs="+", choices=BUDGETS, default=list(BUDGETS))
    parser.add_argument("--seeds", type=int, help="at most so many; default: those of the budget")
    parser.add_argument("--share", type=float, default=1, help="of the budget's examples")
    parser.add_argument("--without-dropout", action="store_true", help="nothing is left to chance")
    parser.add_argument("--minutes", type=float, default=0, help="start no run after; 0: no limit")
    parser.add_argument("--table", action="store_true", help="only show what is there")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    given = [options.tasks_dir, options.weights, options.out]
    if any(given) and not all(given):
        parser.error("--tasks-dir, --weights and --out go together")
    if all(given):
        return compare_sides(options)
    with tempfile.TemporaryDirectory() as scratch:
        made_up(Path(scratch), options)
        return compare_sides(options)


def made_up(folder: Path, options: argparse.Namespace) -> None:
    """SST-2 of sentences about cats, which are good, and dogs, and a small untrained encoder."""
    words = [w for w in tiny.WORDS if w.isalpha() and w not in ("cat", "dog")]
    rng = np.random.default_rng(0)
    place = folder / "glue" / "SST-2"
    place.mkdir(parents=True)
    for name, rows in (("train.tsv", 1600), ("dev.tsv", 400)):
        lines = ["sentence\tlabel"]
        for _ in range(rows):
            label, sentence = int(rng.integers(2)), rng.choice(words, rng.integers(2, 20)).tolist()
            sentence.insert(int(rng.integers(len(sentence))), ("dog", "cat")[label])
            lines.append(f"{' '.join(sentence)}\t{label}")
        (place / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    # An encoder that knows nothing wants a higher rate than a pretrained one.
    BUDGETS["SST-2"] = Budget(1600, 400, 16, 2e-3, 5, 1)
    options.tasks, options.seeds, options.without_dropout = ["SST-2"], 1, True
    options.tasks_dir, options.out = folder, folder / "out"
    options.weights = tiny.encoder(folder / "encoder", max_position_embeddings=128)


def compare_sides(options: argparse.Namespace) -> int:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if options.without_dropout:
        options.weights = without_dropout(options.weights, options.out / "weights")
    if not options.table:
        work(options.tasks, options)
    detail = table(options.tasks, options)
    differences = {name: d["difference"] for name, d in detail.items() if "difference" in d}
    detail["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    plain = {"benchmark": "finetune_scores_vs_hf", "difference": differences, "detail": detail}
    print(json.dumps(plain))
    return 0


if __name__ == "__main__":
    sys.exit(main_guard(lambda: main(sys.argv[1:])))
